"""Reads benchmark results: JSON files of Google Benchmark, of the stages and of peers.py. For report.py and plots.py."""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

from cases import PEERS, Case, PackedCase, parse_case

DIRECTIONS = {"fwd": "", "bwd": ", backward", "fwdbwd": ", forward and backward"}  # in this order, and how titles call them
MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
COUNTERS = ("TFLOPS", "GB_per_s", "hbm_GB_per_s", "roofline_percent", "extra_MiB", "spread_percent", "predicted_ms", "rel_rms_error")
# What Google Benchmark says of the host, and of itself, which has no part in what is measured.
NOT_OF_THE_GPU = ("host_name", "load_avg", "executable", "caches", "num_cpus", "mhz_per_cpu", "cpu_scaling_enabled", "library_build_type",
                  "aslr_enabled", "library_version", "json_schema_version")
ROOFS = ("bandwidth_GB_s", "l1_GB_s", "tensor_tflops", "fp32_tflops")  # a GPU's limits, in a file's context
# What Google Benchmark appends to a name, depending on how the benchmark is set up.
_SUFFIX = re.compile(r"(/((min_time|min_warmup_time|iterations|repeats|threads):[^/]+|manual_time|process_time|real_time))*$")
_STAGE = re.compile(r"step(\d\d|[a-z])/([A-Za-z0-9_.-]+)/(.+)")
_PEER = re.compile(r"peer/([a-z0-9_]+)/(.+)")


class BadInput(Exception):
    """A file or an option is not as it must be; the message names it and says what is wrong."""


@dataclass
class Run:
    """One case of one stage's variant, or of one peer: timed, or refused."""

    kernel: str  # "01 naive", or a key of PEERS
    case: Case
    ms: float | None  # median; None where refused
    error: str | None = None
    counters: dict = field(default_factory=dict)

    @property
    def tflops(self):
        if isinstance(self.case, PackedCase):  # whose name does not say the lengths
            return self.counters["TFLOPS"]
        return self.case.flops() / self.ms / 1e9

    def bytes_of(self, counter):
        """Bytes behind a rate in GB/s; None where the file has no such counter."""
        rate = self.counters.get(counter)
        return None if rate is None else rate * 1e6 * self.ms


@dataclass
class Results:
    """What one or several files say of one GPU."""

    gpu: str
    contexts: list  # one a file
    runs: dict  # {(kernel, Case): Run}
    ceilings: dict  # {"copy": GB/s, "bf16_matmul": TFLOPS, ...}

    def stages(self):
        """Variants in order of their stage, those of one stage as the files have them."""
        kernels = list(dict.fromkeys(kernel for kernel, _ in self.runs if kernel not in PEERS))
        return sorted(kernels, key=lambda kernel: kernel[:2])

    def peers(self):
        return [key for key in PEERS if any(kernel == key for kernel, _ in self.runs)]

    def cases(self):
        order = {"bf16": 0, "f16": 1, "f32": 2}
        direction = list(DIRECTIONS).index
        return sorted({case for _, case in self.runs}, key=lambda c: (direction(c.direction), order[c.dtype], c.head_dim, c.causal, c.seq,
                                                                       c.kv_seq, c.heads, c.kv_heads, c.batch))

    def groups(self):
        """{(direction, type, d, causal): cases by growing length}"""
        groups = defaultdict(list)
        for case in self.cases():
            groups[case.direction, case.dtype, case.head_dim, case.causal].append(case)
        return groups

    def timed(self, kernel, case):
        run = self.runs.get((kernel, case))
        return run if run and run.ms is not None else None

    def baseline(self, case):
        """The first variant of stage 01; of backward passes that of stage 05, which is standard backward."""
        first = "01 " if case.direction == "fwd" else "05 "
        return next((self.timed(k, case) for k in self.stages() if k.startswith(first)), None)

    def previous(self, kernel, case):
        """The variant before `kernel` among those that were timed on `case`."""
        before = self.stages()[: self.stages().index(kernel)]
        return next((run for k in reversed(before) if (run := self.timed(k, case))), None)

    def best_peer(self, case):
        return min((run for k in self.peers() if (run := self.timed(k, case))), key=lambda run: run.ms, default=None)


def describe(value):
    return f'"{value}"' if isinstance(value, str) else json.dumps(value)[:60]


def load_json(path):
    def not_a_number(word):
        raise ValueError(f"holds {word}, which no measurement is")

    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode("utf-8"), parse_constant=not_a_number)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}: no JSON, or cut off: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise BadInput(f"{path}: nested too deeply for a result file") from error
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error


def get(where, table, key, kind, what, optional=False):
    """table[key], which must be of `kind`. `where` says where that is, for the error."""
    if key not in table:
        if optional:
            return None
        raise BadInput(f"{where}: {key} is missing; {what} is expected")
    value = table[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadInput(f"{where}: {key} = {describe(value)}: {what} is expected")
    return value


def number(where, table, key, optional=True, positive=False):
    value = get(where, table, key, (int, float), "a number", optional)
    if value is None:
        return None
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise BadInput(f"{where}: {key} = {value:g}: a finite number {'above' if positive else 'of at least'} 0 is expected")
    return value


def read_entry(where, entry):
    """A Run, or (name, value) of a ceiling (value None where it failed)."""
    name = get(where, entry, "name", str, "text")
    where = f"{where} ({name})"
    if entry.get("run_type") == "aggregate":
        raise BadInput(f"{where}: an aggregate; each case is one entry with its median here: run without --benchmark_repetitions")
    error = None
    if get(where, entry, "error_occurred", bool, "true or false", optional=True):
        error = get(where, entry, "error_message", str, "the reason") or "no reason given"
    ms = None
    if error is None:
        unit = get(where, entry, "time_unit", str, "ns, us, ms or s")
        if unit not in MILLISECONDS:
            raise BadInput(f"{where}: time_unit = {describe(unit)}: ns, us, ms or s is expected")
        ms = number(where, entry, "real_time", optional=False, positive=True) * MILLISECONDS[unit]
    counters = {key: value for key in COUNTERS if (value := number(where, entry, key)) is not None}

    plain = _SUFFIX.sub("", name)
    stage, peer = _STAGE.fullmatch(plain), _PEER.fullmatch(plain)
    if plain.startswith("peer/ceiling_"):
        rate = counters.get("TFLOPS", counters.get("GB_per_s"))
        if error is None and not rate:
            raise BadInput(f"{where}: neither TFLOPS nor GB_per_s")
        return plain.removeprefix("peer/ceiling_"), None if error else rate
    if stage:
        kernel, rest = f"{stage[1]} {stage[2]}", stage[3]
    elif peer and peer[1] in PEERS:
        kernel, rest = peer[1], peer[2]
    elif peer:
        raise BadInput(f"{where}: unknown peer {peer[1]}; known are {', '.join(PEERS)}")
    else:
        raise BadInput(f"{where}: name: stepNN/<variant>/<case> or peer/<backend>/<case> is expected")
    try:
        case = parse_case(rest)
    except ValueError as problem:
        raise BadInput(f"{where}: name: {problem}") from problem
    run = Run(kernel, case, ms, error, counters)
    if ms is not None and "TFLOPS" in counters and not math.isclose(counters["TFLOPS"], run.tflops, rel_tol=0.02):
        raise BadInput(f"{where}: TFLOPS = {counters['TFLOPS']:.4g}, but the FLOPs of the name over real_time give {run.tflops:.4g}")
    return run


def read(paths):
    """Results of all files together. Raises BadInput."""
    results, gpu_from, seen = Results("", [], {}, {}), None, {}
    for path in paths:
        document = load_json(path)
        if not isinstance(document, dict):
            raise BadInput(f"{path}: an object with context and benchmarks is expected (--benchmark_format=json)")
        context = get(path, document, "context", dict, "an object")
        entries = get(path, document, "benchmarks", list, "a list")
        gpu = get(f"{path}: context", context, "gpu", str, "the GPU's name")
        if gpu_from and gpu != results.gpu:
            raise BadInput(f"{path}: measured on {gpu}, but {gpu_from} on {results.gpu}: results of one GPU at a time")
        results.gpu, gpu_from = gpu, gpu_from or path
        results.contexts.append(context)
        for index, entry in enumerate(entries):
            where = f"{path}: benchmarks[{index}]"
            if not isinstance(entry, dict):
                raise BadInput(f"{where}: {describe(entry)}: an object is expected")
            read_one = read_entry(where, entry)
            key = (read_one.kernel, read_one.case) if isinstance(read_one, Run) else read_one[0]
            if key in seen:
                raise BadInput(f"{where}: {entry['name']} stands already in {seen[key]}")
            seen[key] = where
            if isinstance(read_one, Run):
                results.runs[key] = read_one
            elif read_one[1] is not None:
                results.ceilings[read_one[0]] = read_one[1]
    if not results.runs:
        raise BadInput(f"{', '.join(paths)}: no case in {'it' if len(paths) == 1 else 'them'}")
    return results


def title_of(kernel):
    return PEERS.get(kernel, kernel)


def group_title(group):
    direction, dtype, head_dim, causal = group
    return f"{dtype}, d = {head_dim}{', causal' if causal else ''}{DIRECTIONS[direction]}"


def provenance(results):
    """The GPU and the software behind the numbers, in one line."""
    parts = [results.gpu]
    for key, name in (("driver", "driver"), ("cuda", "CUDA"), ("torch", "PyTorch"), ("cudnn", "cuDNN")):
        values = list(dict.fromkeys(str(c[key]) for c in results.contexts if key in c))
        if values:
            parts.append(f"{name} {' and '.join(values)}")
    dates = sorted({str(c["date"])[:10] for c in results.contexts if c.get("date")})
    return ", ".join(parts + ([" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []))
