#!/usr/bin/env python3
"""Measures with Nsight Compute (ncu) what a stage moves on a GPU, and compares it with the emulator's ledger and the formulas.

  bench/profile_stage.py NN [options] [options of the program stepNN]     one problem
  bench/profile_stage.py --cases FILE [options]                           several: each line is NN[,NN...] and such options
  bench/profile_stage.py --make-ledger FILE --cases FILE | NN ...         needs no GPU: the ledgers of these problems, by the emulator
  bench/profile_stage.py --from FILE [options]                            needs no GPU: tables of what --record wrote

Options:
  --programs FOLDER   the gpu build (build/gpu)
  --emulator FOLDER   the cpu build (build/cpu), for problems that --ledger does not hold and that take up to a minute
  --ledger FILE       what --make-ledger wrote
  --record FILE       keeps ncu's output and the programs' (JSON lines), for --from
  --json FILE         the numbers of the tables
  --ncu FILE          Nsight Compute's command line (PATH, $CUDA_HOME/bin, /usr/local/cuda/bin, /opt/nvidia/nsight-compute)
  --cache-control all|none    whether ncu empties the caches before each kernel (all: every kernel starts cold)

docs/measuring_bytes.md says what each number counts. Exit status: 0 all measured and right, 1 a run failed or was wrong, 2 a bad
argument or file, 3 a stage refuses a problem (and nothing worse happened).
"""

import csv
import glob
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECTOR = 32  # bytes
CHECK_ROWS = "64"  # rows compared with float64: the counters do not depend on it
EMULATION_SECONDS = 60
PROGRAM_SECONDS = 300  # a program that takes longer hangs
FAILED, BAD_ARGUMENT, REFUSED = 1, 2, 3

# Options of the programs that would break what is done with their output here.
OWN_OPTIONS = ("--output", "--against", "--quiet", "--traffic", "--rows-only", "--list", "--repeats", "--max-seconds", "--check-rows",
               "--schedule", "--force", "--help")
# What a ledger depends on: the stage and variant, the problem, and the shared memory that decides the tile sizes.
IDENTITY = ("variant", "batch", "heads", "kv_heads", "seq", "kv_seq", "head_dim", "dtype", "causal", "layout", "shared_memory_per_block")


class Problem(Exception):
    """An error that ends the program, or a case of several, with its text."""

    def __init__(self, text, status=FAILED):
        super().__init__(text)
        self.status = status


# ---------------------------------------------------------------------------------------------------------------------------------
# The counters

@dataclass(frozen=True)
class Quantity:
    """A number that ncu gives for a kernel launch."""

    key: str
    metrics: tuple  # names, the preferred one first: the others are asked for where a GPU or an ncu does not know it
    unit: str  # of the value after conversion: bytes, sectors, requests, seconds, percent, count
    required: bool = False


def _sectors(key, operation, required=False):
    return Quantity(key, (f"l1tex__t_sectors_pipe_lsu_mem_global_op_{operation}.sum",), "sectors", required)


QUANTITIES = (
    _sectors("l1_load_sectors", "ld", True),
    _sectors("l1_store_sectors", "st", True),
    _sectors("l1_atomic_sectors", "atom"),
    _sectors("l1_reduction_sectors", "red"),
    _sectors("l1_async_copy_sectors", "ldgsts"),  # cp.async
    Quantity("l1_load_requests", ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",), "requests"),
    Quantity("l1_store_requests", ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",), "requests"),
    Quantity("l2_read_sectors", ("lts__t_sectors_op_read.sum",), "sectors"),
    Quantity("l2_write_sectors", ("lts__t_sectors_op_write.sum",), "sectors"),
    Quantity("l2_read_sectors_from_l1", ("lts__t_sectors_srcunit_tex_op_read.sum",), "sectors"),
    Quantity("l2_write_sectors_from_l1", ("lts__t_sectors_srcunit_tex_op_write.sum",), "sectors"),
    Quantity("dram_read_bytes", ("dram__bytes_read.sum", "dram__bytes_op_read.sum"), "bytes"),
    Quantity("dram_write_bytes", ("dram__bytes_write.sum", "dram__bytes_op_write.sum"), "bytes"),
    Quantity("seconds", ("gpu__time_duration.sum",), "seconds", True),
    Quantity("occupancy_percent", ("sm__warps_active.avg.pct_of_peak_sustained_active",), "percent"),
    Quantity("tensor_pipe_percent",
             ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
              "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"), "percent"),
    Quantity("instructions", ("smsp__inst_executed.sum",), "count"),
    Quantity("registers", ("launch__registers_per_thread",), "count"),
    Quantity("blocks_by_registers", ("launch__occupancy_limit_registers",), "count"),
    Quantity("blocks_by_shared_memory", ("launch__occupancy_limit_shared_mem",), "count"),
    Quantity("blocks_by_warps", ("launch__occupancy_limit_warps",), "count"),
    Quantity("blocks_by_slots", ("launch__occupancy_limit_blocks",), "count"),
)
ADDITIVE = {"bytes", "sectors", "requests", "seconds"}

# Units as ncu writes them, with --print-units base and without, in short and in words. Any other unit is an error: a wrong scale must
# not pass for a result.
SCALES = {
    "bytes": {"byte": 1, "B": 1, "Kbyte": 1e3, "KB": 1e3, "Mbyte": 1e6, "MB": 1e6, "Gbyte": 1e9, "GB": 1e9, "Tbyte": 1e12},
    "seconds": {"second": 1, "s": 1, "sec": 1, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6, "nsecond": 1e-9, "ns": 1e-9},
    "percent": {"%": 1},
    "sectors": {"sector": 1, "": 1},
    "requests": {"request": 1, "": 1},
    "count": {"": 1, "inst": 1, "register/thread": 1, "block": 1},
}
COLUMNS = ("ID", "Kernel Name", "Block Size", "Grid Size")


def convert(text, ncu_unit, quantity):
    """The value in the quantity's unit; None for what ncu could not measure."""
    if text in ("", "n/a", "N/A"):
        return None
    scale = SCALES[quantity.unit].get(ncu_unit)
    if scale is None:
        accepted = ", ".join(repr(unit) for unit in SCALES[quantity.unit])
        raise Problem(f"ncu's CSV gives {quantity.key} in {ncu_unit!r}; accepted units: {accepted}")
    if not re.fullmatch(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?([eE][-+]?\d+)?", text):
        raise Problem(f"ncu's CSV gives {quantity.key} as {text!r}, which is no number")
    value = float(text.replace(",", "")) * scale
    if value < 0:
        raise Problem(f"ncu's CSV gives {quantity.key} as {text!r}; a number from 0 on is accepted")
    return value


@dataclass
class Launch:
    """One kernel launch as ncu saw it; a quantity that could not be measured is None."""

    kernel: str
    grid: str
    block: str
    values: dict

    def limit(self):
        """The number of blocks that an SM can hold, and what limits it: (4, "registers"), or None."""
        limits = [(self.values[key], word) for key, word in (
            ("blocks_by_registers", "registers"), ("blocks_by_shared_memory", "shared memory"), ("blocks_by_warps", "warps"),
            ("blocks_by_slots", "block slots")) if self.values[key] is not None]
        return min(limits) if limits else None


def short_name(kernel):
    """"void step01::scores<__nv_bfloat16, (int)2>(...)" is scores."""
    match = re.search(r"step(?:\d\d|[a-z])::(?:\w+::)*(\w+)", kernel)
    return match[1] if match else kernel


def parse_ncu(text):
    """The launches in what `ncu --csv --page raw` printed: lines that start with ==, a row of names, a row of units, then a row a
    launch. Raises Problem on anything else."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), None)
    if begin is None:
        raise Problem("ncu printed no CSV (no line starts with \"ID\",):\n" + indent(tail(text)))
    try:
        # ncu's messages may stand below the rows as well.
        rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[begin:] if line and not line.startswith("=="))), strict=True))
    except csv.Error as error:
        raise Problem(f"ncu's CSV is damaged: {error}") from None
    names, rows = rows[0], rows[1:]
    if len(set(names)) != len(names):
        raise Problem(f"ncu's CSV has two columns of one name: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    if "Metric Name" in names:
        raise Problem("ncu's CSV has a row for each metric (--page details); a row for each kernel is accepted (--page raw)")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise Problem(f"ncu's CSV lacks the columns {', '.join(missing)}; it has {', '.join(names)}")
    for number, row in enumerate(rows, begin + 2):
        if len(row) != len(names):
            raise Problem(f"ncu's CSV is damaged: line {number} has {len(row)} fields, the heading {len(names)}")
    if not rows or rows[0][names.index("ID")] != "":
        raise Problem("ncu's CSV lacks the row of units below the names")
    units = dict(zip(names, rows[0]))
    launches = []
    for row in rows[1:]:
        cells = dict(zip(names, row))
        if not cells["ID"].isdigit():
            raise Problem(f"ncu's CSV is damaged: ID {cells['ID']!r} is no number")
        values = {}
        for quantity in QUANTITIES:
            values[quantity.key] = None
            for metric in quantity.metrics:
                if metric in cells and values[quantity.key] is None:
                    values[quantity.key] = convert(cells[metric], units[metric], quantity)
            if quantity.required and values[quantity.key] is None:
                raise Problem(f"ncu's CSV has no value of {quantity.metrics[0]} for kernel {cells['Kernel Name']}")
        launches.append(Launch(short_name(cells["Kernel Name"]), cells["Grid Size"], cells["Block Size"], values))
    if not launches:
        raise Problem("ncu's CSV holds no kernel launch")
    return launches


def total(launches):
    """Sums of what adds up; percentages are means over the kernels' time; None where a launch lacks the value."""
    sums = {}
    for quantity in QUANTITIES:
        values = [launch.values[quantity.key] for launch in launches]
        if None in values:
            sums[quantity.key] = None
        elif quantity.unit in ADDITIVE or quantity.key == "instructions":
            sums[quantity.key] = sum(values)
        elif quantity.unit == "percent":
            seconds = sum(launch.values["seconds"] for launch in launches)
            sums[quantity.key] = sum(v * launch.values["seconds"] for v, launch in zip(values, launches)) / seconds if seconds else None
        else:
            sums[quantity.key] = None
    return sums


def l1_sectors(values):
    """(read, written). The ledger counts an atomic as a read and a write, so it is put on both sides here as well."""
    both = (values["l1_atomic_sectors"] or 0) + (values["l1_reduction_sectors"] or 0)
    return values["l1_load_sectors"] + (values["l1_async_copy_sectors"] or 0) + both, values["l1_store_sectors"] + both


def l2_sectors(values):
    """(read, written) by L1 where that is known, else by everybody."""
    def pick(key):
        return values[key + "_from_l1"] if values[key + "_from_l1"] is not None else values[key]
    return pick("l2_read_sectors"), pick("l2_write_sectors")


def difference_percent(measured, expected):
    """How far a measurement is from what was expected; None where nothing was expected and something was measured."""
    if expected == 0:
        return 0.0 if measured == 0 else None
    return 100.0 * (measured - expected) / expected


# ---------------------------------------------------------------------------------------------------------------------------------
# Programs

def run_program(command, seconds=PROGRAM_SECONDS):
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
                              env={**os.environ, "LC_ALL": "C"}, check=False)
    except subprocess.TimeoutExpired:
        raise Problem(f"did not end within {seconds} s: {shlex.join(command)}") from None
    except OSError as error:
        raise Problem(f"cannot start {command[0]}: {error.strerror}") from None


def tail(text, count=20):
    return "\n".join(text.strip().splitlines()[-count:])


def indent(text):
    return "\n".join("  " + line for line in text.splitlines())


def find_program(build, stage):
    found = glob.glob(os.path.join(build, "steps", f"{stage}_*", f"step{stage}"))
    if len(found) != 1:
        raise Problem(f"{os.path.join(build, 'steps', stage + '_*', 'step' + stage)} does not exist: build it (./workbook run {stage})",
                      BAD_ARGUMENT)
    return found[0]


def program_lines(command, seconds=PROGRAM_SECONDS):
    """The JSON objects that a step program prints, one a variant. Its exit status 0, 1 and 3 are in them; others are errors."""
    result = run_program(command, seconds)
    if result.returncode == BAD_ARGUMENT:
        raise Problem(result.stderr.strip(), BAD_ARGUMENT)
    try:
        lines = [json.loads(line) for line in result.stdout.splitlines()]
    except json.JSONDecodeError:
        lines = []
    if result.returncode not in (0, FAILED, REFUSED) or not lines:
        raise Problem(f"exit status {result.returncode}: {shlex.join(command)}\n{indent(tail(result.stderr + result.stdout))}")
    return lines


def find_ncu(given):
    if given:
        if not os.access(given, os.X_OK):
            raise Problem(f"--ncu={given}: there is no such program", BAD_ARGUMENT)
        return given
    candidates = [shutil.which("ncu")]
    candidates += [os.path.join(os.environ[name], "bin", "ncu") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates += ["/usr/local/cuda/bin/ncu"]
    # 2025.3.1 after 2024.10.0: by number, the latest first.
    candidates += sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), key=lambda p: [int(n) for n in re.findall(r"\d+", p)], reverse=True)
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise Problem(
        "Nsight Compute's command line, ncu, is missing: not on PATH, nor in $CUDA_HOME/bin, /usr/local/cuda/bin or "
        "/opt/nvidia/nsight-compute.\nIt is a part of the CUDA toolkit; alone it is the package cuda-nsight-compute-13-0 of NVIDIA's "
        "package repository,\nor a download from https://developer.nvidia.com/nsight-compute. --ncu FILE names one that lies elsewhere.",
        BAD_ARGUMENT)


NOT_PERMITTED = """this user may not read the GPU's counters (ERR_NVGPUCTRPERM). One of these permits it:
  as root: run the same command with sudo
  for every user: load the driver with NVreg_RestrictProfilingToAdminUsers=0, as
    echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf; then reboot
    (grep RmProfilingAdminOnly /proc/driver/nvidia/params then says 0)
  in a container: start it with --cap-add SYS_ADMIN; where that is not allowed, the host's driver option above"""


class Collector:
    """Runs ncu. Metrics that this GPU or this ncu does not know are left out from then on."""

    def __init__(self, ncu, cache_control):
        self.ncu = ncu
        self.cache_control = cache_control
        self.choice = {quantity.key: 0 for quantity in QUANTITIES}  # index into its metrics; past the end: not measured

    def metrics(self):
        return [q.metrics[self.choice[q.key]] for q in QUANTITIES if self.choice[q.key] < len(q.metrics)]

    def drop(self, text):
        """Goes to the next name of each metric that an error of ncu says it does not know; False when there is none."""
        errors = "\n".join(line for line in text.splitlines()
                           if line.startswith(("==ERROR==", "==WARNING==")) and "metric" in line.lower())
        dropped = False
        for quantity in QUANTITIES:
            choice = self.choice[quantity.key]
            if choice < len(quantity.metrics):
                base = re.escape(quantity.metrics[choice].split(".")[0])
                if re.search(rf"(?<!\w){base}(?!\w)", errors):
                    self.choice[quantity.key] += 1
                    dropped = True
                    last = self.choice[quantity.key] == len(quantity.metrics)
                    if last and quantity.required:
                        raise Problem(f"this GPU or this ncu does not know {quantity.metrics[choice]}, which is needed:\n{indent(errors)}")
                    print(f"ncu does not know {quantity.metrics[choice]}" + (f": {quantity.key} is not measured" if last else
                          f"; {quantity.metrics[self.choice[quantity.key]]} instead"), file=sys.stderr)
        return dropped

    def collect(self, stage, program):
        """What ncu and the program print for the kernels of one forward: (ncu's text, the program's JSON object)."""
        while True:
            with tempfile.TemporaryDirectory() as folder:
                log = os.path.join(folder, "ncu.csv")
                command = [self.ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", log,
                           "--clock-control", "none", "--cache-control", self.cache_control,
                           # Thrust's kernels, which make the inputs, are none of the stage's.
                           "--kernel-name-base", "demangled", "--kernel-name", f"regex:step{stage}::",
                           "--metrics", ",".join(self.metrics()), *program]
                result = run_program(command)
                text = ""
                if os.path.exists(log):
                    with open(log, encoding="utf-8", errors="replace") as file:
                        text = file.read()
            everything = text + "\n" + result.stderr + "\n" + result.stdout
            if "ERR_NVGPUCTRPERM" in everything:
                raise Problem(NOT_PERMITTED)
            if '"ID",' not in text and self.drop(everything):
                continue
            if '"ID",' not in text or result.returncode not in (0, FAILED):
                raise Problem(f"ncu measured nothing, exit status {result.returncode}: {shlex.join(command)}\n{indent(tail(everything))}")
            objects = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"stage"')]
            if len(objects) != 1:
                raise Problem(f"{program[0]} printed {len(objects)} JSON objects under ncu; 1 was expected:\n{indent(tail(everything))}")
            return text, objects[0]


# ---------------------------------------------------------------------------------------------------------------------------------
# Cases

@dataclass
class Case:
    """A stage and the options of its program."""

    stage: str
    options: list = field(default_factory=list)

    def __str__(self):
        return f"stage {self.stage} {shlex.join(self.options)}"


def check_options(words, where):
    for word in words:
        name = word.split("=")[0]
        if name in OWN_OPTIONS:
            raise Problem(f"{where}: {name} is given to the programs here, or has no meaning; the options of the problem, --variant, "
                          "--on and --shared-memory are accepted", BAD_ARGUMENT)


def parse_stage(word, where):
    known = sorted(os.path.basename(folder).split("_")[0] for pattern in ("[0-9][0-9]_*", "[a-z]_*")
                   for folder in glob.glob(os.path.join(ROOT, "steps", pattern)))
    if word.removeprefix("step") in known:
        return word.removeprefix("step")
    match = re.fullmatch(r"(?:step)?0?([0-9]{1,2})", word)
    if match and match[1].zfill(2) in known:
        return match[1].zfill(2)
    raise Problem(f"{where}: stage {word!r} does not exist; accepted: {' '.join(known)}", BAD_ARGUMENT)


def parse_cases(text, name):
    """Cases from lines as "01,03 --heads 2 --seq 512"; # begins a comment."""
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise Problem(f"{name}:{number}: {error}", BAD_ARGUMENT) from None
        if words:
            check_options(words[1:], f"{name}:{number}")
            cases += [Case(parse_stage(stage, f"{name}:{number}"), words[1:]) for stage in words[0].split(",")]
    if not cases:
        raise Problem(f"{name} holds no case", BAD_ARGUMENT)
    return cases


def read_file(path, option):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{option}={path}: {error}", BAD_ARGUMENT) from None


def identity(run):
    return tuple(run[key] for key in IDENTITY)


def read_ledger(path):
    """The runs in a ledger file by their identity."""
    try:
        runs = json.loads(read_file(path, "--ledger"))
        ledger = {identity(run): run for run in runs if run["emulated"] and run["sectors_read"] is not None}
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise Problem(f"--ledger={path} is not what --make-ledger writes: {type(error).__name__}: {error}", BAD_ARGUMENT) from None
    if not ledger:
        raise Problem(f"--ledger={path} holds no run of the emulator", BAD_ARGUMENT)
    return ledger


def make_ledger(path, cases, emulator):
    """Runs the emulator, and writes what it counted. Runs that are refused are left out, with the reason on stderr."""
    runs, status = [], 0
    for case in cases:
        print(f"emulating {case}", file=sys.stderr, flush=True)
        program = find_program(emulator, case.stage)
        for run in program_lines([program, *case.options, "--json", "--check-rows", CHECK_ROWS], seconds=7200):
            if not run["emulated"]:
                raise Problem(f"--emulator={emulator}: this is a build for a GPU; the preset cpu is needed", BAD_ARGUMENT)
            if run["status"] == "ok":
                runs.append(run)
            else:
                print(f"{run['status']}: {case}: {run['reason']}", file=sys.stderr)
                status = max(status, REFUSED if run["status"] in ("refused", "skipped") else FAILED, key=(0, REFUSED, FAILED).index)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    print(f"{path}: {len(runs)} runs", file=sys.stderr)
    return status


def emulate(case, plain, emulator):
    """The emulator's run of the same problem, playing this GPU; or why there is none."""
    try:
        program = find_program(emulator, case.stage)
    except Problem:
        return None, f"--ledger does not hold it, and there is no emulator in {emulator}"
    # What the user chose (the tile sizes follow from the shared memory) is the same; the GPU's own memory is the emulator's limit.
    options = list(case.options)
    if not any(word.split("=")[0] == "--shared-memory" for word in options):
        options += ["--shared-memory", str(plain["shared_memory_per_block"])]
    if not any(word.split("=")[0] == "--on" for word in options):
        options += ["--on", plain["predicted_on"]]
    # The estimate can be wrong, and other programs can be in the way.
    runs = program_lines([program, *options, "--json", "--check-rows", CHECK_ROWS, "--max-seconds", str(EMULATION_SECONDS)],
                         20 * EMULATION_SECONDS)
    for run in runs:
        if run["variant"] == plain["variant"]:
            if run["status"] != "ok":
                return None, f"the emulator: {run['status']}: {run['reason']}; --make-ledger takes the time"
            if identity(run) != identity(plain):
                return None, "the emulator ran another problem: " + str(dict(zip(IDENTITY, identity(run))))
            return run, None
    return None, "the emulator ran no such variant"


# ---------------------------------------------------------------------------------------------------------------------------------
# Results

def case_name(run):
    """As the benchmarks name it."""
    kv_heads = f"_KV{run['kv_heads']}" if run["kv_heads"] != run["heads"] else ""
    kv_seq = f"_M{run['kv_seq']}" if run["kv_seq"] != run["seq"] else ""
    return (f"step{run['stage']}/{run['name']}/fwd/{run['dtype']}/d{run['head_dim']}/{'causal' if run['causal'] else 'full'}/"
            f"B{run['batch']}_H{run['heads']}{kv_heads}_N{run['seq']}{kv_seq}")


def summarize(plain, launches, ledger):
    """Everything known of one profiled forward, ready for the table and for --json. Sizes are bytes."""
    def scaled(sectors):
        return None if sectors is None else SECTOR * sectors

    def numbers(values):
        read, written = l1_sectors(values)
        l2_read, l2_written = l2_sectors(values)
        seconds, dram_read, dram_written = values["seconds"], values["dram_read_bytes"], values["dram_write_bytes"]
        dram_rate = (dram_read + dram_written) / seconds if None not in (dram_read, dram_written) and seconds else None
        return {
            "l1_read": scaled(read), "l1_written": scaled(written), "l2_read": scaled(l2_read), "l2_written": scaled(l2_written),
            "dram_read": dram_read, "dram_written": dram_written, "ncu_seconds": seconds,
            "l1_bytes_per_second": SECTOR * (read + written) / seconds if seconds else None, "dram_bytes_per_second": dram_rate,
            "occupancy_percent": values["occupancy_percent"], "tensor_pipe_percent": values["tensor_pipe_percent"],
        }

    kernels = []
    for launch in launches:
        limit = launch.limit()
        kernels.append({"kernel": launch.kernel, "grid": launch.grid, "block": launch.block, **numbers(launch.values),
                        "registers": launch.values["registers"], "blocks_per_sm": limit[0] if limit else None,
                        "limited_by": limit[1] if limit else None,
                        "counters": launch.values})
    result = {"case": case_name(plain)}
    for key in ("stage", "name", *IDENTITY, "device"):
        result[key] = plain[key]
    result["predicted"] = {"read": plain["predicted_read"], "written": plain["predicted_written"], "dram": plain["predicted_dram"]}
    result["seconds"] = plain["seconds"]  # without the profiler
    result["measured"] = numbers(total(launches))
    result["ledger"] = result["difference_percent"] = None
    if ledger:
        result["ledger"] = {"requested_read": ledger["requested_read"], "requested_written": ledger["requested_written"],
                            "read": SECTOR * ledger["sectors_read"], "written": SECTOR * ledger["sectors_written"]}
        result["difference_percent"] = {
            side: difference_percent(result["measured"]["l1_" + side], result["ledger"][side]) for side in ("read", "written")}
    result["kernels"] = kernels
    return result


def number(value, digits=0, width=0):
    return ("n/a" if value is None else f"{value:,.{digits}f}").rjust(width)


def table(result):
    """The text of one result."""
    layout = "" if result["layout"] == "bhnd" else f", layout {result['layout']}"
    lines = [f"{result['case']}{layout} on {result['device']}, {number(1e6 * result['seconds'], 1)} µs without the profiler"]
    measured, predicted, ledger = result["measured"], result["predicted"], result["ledger"]

    for heads in (("bytes", "requested", "requested", "ledger", "l1tex", "l1tex vs", "L2", "DRAM", "HBM"),
                  ("", "(formula)", "(ledger)", "sectors x 32", "sectors x 32", "ledger", "", "", "(formula)")):
        lines.append((f"  {heads[0]:10}" + "".join(f"{head:>{11 if n == 5 else 16}}" for n, head in enumerate(heads[1:], 1))).rstrip())
    for word, side in (("read", "read"), ("written", "written")):
        difference = "n/a"
        if ledger:
            percent = result["difference_percent"][side]
            difference = "more" if percent is None else f"{percent:+.3f}%"
        lines.append(f"  {word:10}{number(predicted[side], 0, 16)}{number(ledger and ledger['requested_' + side], 0, 16)}"
                     f"{number(ledger and ledger[side], 0, 16)}{number(measured['l1_' + side], 0, 16)}{difference:>11}"
                     f"{number(measured['l2_' + side], 0, 16)}{number(measured['dram_' + side], 0, 16)}")
    both = None if None in (measured["dram_read"], measured["dram_written"]) else measured["dram_read"] + measured["dram_written"]
    lines.append(f"  {'both':101}{number(both, 0, 16)}{number(predicted['dram'], 0, 16)}")

    lines.append(f"  {'kernel':18}{'regs':>5}{'blocks/SM, limit':>22}{'occup.':>8}{'tensor':>8}{'µs':>10}{'l1tex read':>16}{'written':>14}"
                 f"{'L1 GB/s':>9}{'DRAM GB/s':>10}")
    for kernel in [*result["kernels"], {"kernel": "in total", "registers": None, "blocks_per_sm": None, **measured}]:
        last = kernel["kernel"] == "in total"
        limit = "" if last else "n/a" if kernel["blocks_per_sm"] is None else f"{kernel['blocks_per_sm']:.0f} {kernel['limited_by']}"
        percent = [number(kernel[key], 1) + ("" if kernel[key] is None else "%") for key in ("occupancy_percent", "tensor_pipe_percent")]
        rates = [kernel[key] and 1e-9 * kernel[key] for key in ("l1_bytes_per_second", "dram_bytes_per_second")]
        lines.append(f"  {kernel['kernel']:18}{'' if last else number(kernel['registers']):>5}{limit:>22}{percent[0]:>8}{percent[1]:>8}"
                     f"{number(1e6 * kernel['ncu_seconds'], 1, 10)}{number(kernel['l1_read'], 0, 16)}{number(kernel['l1_written'], 0, 14)}"
                     f"{number(rates[0], 0, 9)}{number(rates[1], 0, 10)}")
    return "\n".join(lines) + "\n"


def agreement(results):
    """A Markdown table: one row a case, what the ledger says and what l1tex counted."""
    lines = ["| case | ledger read | l1tex read | difference | ledger written | l1tex written | difference | L2 read | DRAM read | "
             "DRAM written | HBM formula |", "|:--|" + "--:|" * 10]
    for result in results:
        measured, ledger = result["measured"], result["ledger"]
        cells = [result["case"] + ("" if result["layout"] == "bhnd" else " " + result["layout"])]
        for side in ("read", "written"):
            cells += [number(ledger and ledger[side]), number(measured["l1_" + side])]
            percent = result["difference_percent"] and result["difference_percent"][side]
            cells.append("n/a" if percent is None else f"{percent:+.3f}%")
        cells += [number(value) for value in (measured["l2_read"], measured["dram_read"], measured["dram_written"],
                                              result["predicted"]["dram"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def measure(case, settings, collector):
    """Records of a case, one a variant: what --record keeps."""
    program = find_program(settings.programs, case.stage)
    base = [program, *case.options, "--json", "--check-rows", CHECK_ROWS]
    for plain in program_lines(base):
        if plain["status"] in ("refused", "skipped"):
            raise Problem(f"{plain['status']}: {plain['reason']}", REFUSED)
        if plain["status"] != "ok":
            raise Problem(f"{plain['variant']} {plain['name']} is {plain['status']}: {plain['reason']}")
        if plain["emulated"]:
            raise Problem(f"--programs={settings.programs}: this is the emulator; a build for a GPU is needed (preset gpu)", BAD_ARGUMENT)
        if plain.get("direction") == "bwd":
            raise Problem("refused: a backward pass is not profiled, because ncu would count the forward pass before it too", REFUSED)
        # The program runs its forward once for the check. Timed runs follow unless that one took longer than --max-seconds, which
        # it always does: the limit is the least time that the roofline allows.
        words = [word for n, word in enumerate(case.options)
                 if not (word.startswith("--variant") or (n and case.options[n - 1] == "--variant"))]
        profiled = [program, *words, "--json", "--check-rows", CHECK_ROWS, "--variant", plain["variant"], "--max-seconds",
                    f"{1.001 * plain['predicted_seconds']:.6g}"]
        text, run = collector.collect(case.stage, profiled)
        if run["status"] != "ok" or run["repetitions"] != 1:
            raise Problem(f"{plain['variant']} {plain['name']} under ncu: {run['status']} after {run['repetitions']} timed runs: "
                          f"{run['reason']}")
        yield {"stage": case.stage, "options": case.options, "plain": plain, "ncu": text}


@dataclass
class Settings:
    programs: str = os.path.join(ROOT, "build", "gpu")
    emulator: str = os.path.join(ROOT, "build", "cpu")
    cases: str = None
    ledger: str = None
    make_ledger: str = None
    record: str = None
    source: str = None  # --from
    json: str = None
    ncu: str = None
    cache_control: str = "all"


def parse_arguments(words):
    """(settings, cases)"""
    settings, rest = Settings(), []
    own = {"--" + name.replace("_", "-"): name for name in vars(settings) if name != "source"} | {"--from": "source"}
    words = list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name not in own:
            rest.append(name + equals + value)
            continue
        if not equals:
            if not words:
                raise Problem(f"{name}: its value is missing", BAD_ARGUMENT)
            value = words.pop(0)
        setattr(settings, own[name], value)
    if settings.cache_control not in ("all", "none"):
        raise Problem(f"--cache-control={settings.cache_control}: all and none are accepted", BAD_ARGUMENT)
    if settings.source:
        if rest or settings.cases or settings.make_ledger or settings.record:
            raise Problem("--from takes the cases of its file: no stage, no options of one, no --cases, --make-ledger or --record",
                          BAD_ARGUMENT)
        return settings, []
    if settings.cases:
        if rest:
            raise Problem(f"{rest[0]}: --cases takes stages and options from its file", BAD_ARGUMENT)
        return settings, parse_cases(read_file(settings.cases, "--cases"), settings.cases)
    if not rest or rest[0].startswith("-"):
        raise Problem("a stage (01) or --cases FILE is missing; --help tells more", BAD_ARGUMENT)
    check_options(rest[1:], "the command line")
    return settings, [Case(parse_stage(rest[0], "the command line"), rest[1:])]


def records_of(settings, cases, complain):
    """Records of the file --from, or of new measurements."""
    if settings.source:
        for line_number, line in enumerate(read_file(settings.source, "--from").splitlines(), 1):
            try:
                record = json.loads(line)
                identity(record["plain"])
                record["ncu"] + record["stage"]
            except (json.JSONDecodeError, TypeError, KeyError) as error:
                raise Problem(f"{settings.source}:{line_number} is not what --record writes: {type(error).__name__}: {error}",
                              BAD_ARGUMENT) from None
            yield record
        return
    collector = Collector(find_ncu(settings.ncu), settings.cache_control)
    if settings.record:
        open(settings.record, "w", encoding="utf-8").close()
    for case in cases:
        try:
            for record in measure(case, settings, collector):
                if settings.record:
                    with open(settings.record, "a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
                yield record
        except Problem as problem:
            # What is wrong with one case need not be wrong with the others; permission and arguments are.
            if problem.status == BAD_ARGUMENT or str(problem) == NOT_PERMITTED or len(cases) == 1:
                raise
            complain(f"{case}: {problem}", problem.status)


def main(words):
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    statuses = [0]

    def complain(text, status):
        print(f"profile: {text}", file=sys.stderr, flush=True)
        statuses.append(status)

    try:
        settings, cases = parse_arguments(words)
        if settings.make_ledger:
            return make_ledger(settings.make_ledger, cases, settings.emulator)
        ledgers = read_ledger(settings.ledger) if settings.ledger else {}
        results = []
        for record in records_of(settings, cases, complain):
            plain = record["plain"]
            try:
                launches = parse_ncu(record["ncu"])
                ledger = ledgers.get(identity(plain))
                if ledger and any(ledger[key] != plain[key] for key in ("predicted_read", "predicted_written")):
                    raise Problem(f"--ledger={settings.ledger} was made by another version of the stage: it predicts "
                                  f"{ledger['predicted_read']} and {ledger['predicted_written']} bytes, this build "
                                  f"{plain['predicted_read']} and {plain['predicted_written']}")
                if not ledger:
                    ledger, reason = emulate(Case(record["stage"], record["options"]), plain, settings.emulator)
                    if not ledger:
                        complain(f"{case_name(plain)}: no ledger to compare with: {reason}", FAILED)
                results.append(summarize(plain, launches, ledger))
                print(table(results[-1]), flush=True)
            except Problem as problem:
                complain(f"{case_name(plain)}: {problem}", problem.status)
        if len(results) > 1:
            print(agreement(results))
        if settings.json:
            with open(settings.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
                file.write("\n")
    except Problem as problem:
        complain(str(problem), problem.status)
    return max(statuses, key=(0, REFUSED, BAD_ARGUMENT, FAILED).index)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
