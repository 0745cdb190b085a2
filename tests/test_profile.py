"""Tests of bench/profile_stage.py: ncu's CSV, the arithmetic, and whole runs with stand-ins for ncu and for a stage's program."""

import contextlib
import io
import json
import os
import stat
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench"))
import profile_stage as profile  # noqa: E402

UNITS = {"l1tex__t_sectors": "sector", "lts__t_sectors": "sector", "dram__bytes": "byte", "gpu__time_duration": "ns", "smsp__inst": "inst",
         "launch__registers": "register/thread", "launch__occupancy": "block", "sm__": "%"}
FIXED = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC"]
SCORES = ("void step01::scores<__nv_bfloat16, (int)2>(simt::TensorView<const T1, (int)4>, simt::TensorView<const T1, (int)4>, "
          "simt::TensorView<T1, (int)4>, float, workbook::Mask)")
SOFTMAX = "void step01::softmax<__nv_bfloat16>(simt::TensorView<const T1, (int)4>, simt::TensorView<T1, (int)4>)"


def metric_values(**given):
    """Text of each first-choice metric: 0, but for what is given by a quantity's key."""
    return {q.metrics[0]: given.get(q.key, "0") for q in profile.QUANTITIES}


def ncu_csv(launches, units=None):
    """A text as `ncu --csv --page raw` prints it. launches: (kernel, {metric: text})."""
    metrics = sorted(launches[0][1])
    unit_of = lambda metric: (units or {}).get(metric, next((u for prefix, u in UNITS.items() if metric.startswith(prefix)), ""))
    row = lambda cells: ",".join('"' + cell + '"' for cell in cells)
    lines = ["==PROF== Connected to process 4711 (/tmp/step01)", "==PROF== Profiling \"scores\" - 0: 0%....50%....100% - 7 passes",
             "==PROF== Disconnected from process 4711", row(FIXED + metrics), row([""] * len(FIXED) + [unit_of(m) for m in metrics])]
    for number, (kernel, values) in enumerate(launches):
        fixed = [str(number), "4711", "step01", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(128, 2, 1)", "0", "9.0"]
        lines.append(row(fixed + [values[m] for m in metrics]))
    return "\n".join(lines) + "\n"


TWO = [
    (SCORES, metric_values(l1_load_sectors="1,000", l1_store_sectors="100", dram_read_bytes="4,096", dram_write_bytes="64", seconds="3,000",
                           occupancy_percent="50.5", registers="40", blocks_by_registers="12", blocks_by_shared_memory="32",
                           blocks_by_warps="16", blocks_by_slots="32")),
    (SOFTMAX, metric_values(l1_load_sectors="500", l1_store_sectors="50", dram_read_bytes="1024", dram_write_bytes="0", seconds="1000",
                            occupancy_percent="10.5", registers="32", blocks_by_registers="16", blocks_by_shared_memory="32",
                            blocks_by_warps="16", blocks_by_slots="32")),
]


def run_of(emulated, **changes):
    """What a step program's --json prints, as far as it is used."""
    run = {"stage": "01", "variant": "01", "name": "naive", "status": "ok", "reason": None, "batch": 1, "heads": 2, "kv_heads": 2, "seq": 8,
           "kv_seq": 8, "head_dim": 64, "dtype": "bf16", "causal": False, "layout": "bhnd", "shared_memory_per_block": 232448,
           "device": "emulator" if emulated else "NVIDIA H200", "emulated": emulated, "predicted_on": "h200", "predicted_read": 47000,
           "predicted_written": 4000, "predicted_dram": 6000, "predicted_seconds": 1e-6,
           "requested_read": 47000 if emulated else None, "requested_written": 4000 if emulated else None,
           "sectors_read": 1500 if emulated else None, "sectors_written": 160 if emulated else None,
           "seconds": None if emulated else 5e-6, "repetitions": None if emulated else 100}
    return {**run, **changes}


class NcuCsv(unittest.TestCase):
    def test_launches_and_units(self):
        launches = profile.parse_ncu(ncu_csv(TWO))
        self.assertEqual([launch.kernel for launch in launches], ["scores", "softmax"])
        self.assertEqual(launches[0].values["l1_load_sectors"], 1000)
        self.assertEqual(launches[0].values["dram_read_bytes"], 4096)
        self.assertAlmostEqual(launches[0].values["seconds"], 3e-6)
        self.assertEqual(launches[0].grid, "(128, 2, 1)")
        self.assertEqual(launches[0].limit(), (12, "registers"))
        self.assertEqual(launches[1].limit(), (16, "registers"))

    def test_units_are_converted(self):
        launches = profile.parse_ncu(ncu_csv(TWO, {"dram__bytes_read.sum": "Kbyte", "gpu__time_duration.sum": "us"}))
        self.assertEqual(launches[0].values["dram_read_bytes"], 4096e3)
        self.assertAlmostEqual(launches[0].values["seconds"], 3e-3)

    def test_unknown_unit(self):
        with self.assertRaisesRegex(profile.Problem, "dram_read_bytes in 'furlong'; accepted units: 'byte'"):
            profile.parse_ncu(ncu_csv(TWO, {"dram__bytes_read.sum": "furlong"}))

    def test_second_name_of_a_metric(self):
        launches = [(kernel, {("dram__bytes_op_read.sum" if m == "dram__bytes_read.sum" else m): v for m, v in values.items()})
                    for kernel, values in TWO]
        self.assertEqual(profile.parse_ncu(ncu_csv(launches))[0].values["dram_read_bytes"], 4096)

    def test_what_was_not_measured_is_none(self):
        launches = [(kernel, {**values, "dram__bytes_read.sum": "n/a"}) for kernel, values in TWO]
        self.assertIsNone(profile.parse_ncu(ncu_csv(launches))[0].values["dram_read_bytes"])

    def test_what_is_needed_must_be_measured(self):
        launches = [(kernel, {**values, "gpu__time_duration.sum": "n/a"}) for kernel, values in TWO]
        with self.assertRaisesRegex(profile.Problem, "no value of gpu__time_duration.sum for kernel void step01::scores"):
            profile.parse_ncu(ncu_csv(launches))

    def test_numbers(self):
        sectors = profile.QUANTITIES[0]
        self.assertEqual(profile.convert("12,345,678", "sector", sectors), 12345678)
        self.assertEqual(profile.convert("1.5e3", "sector", sectors), 1500)
        for damaged in ("12.345.678", "1,23", "-5", "0x10", "many", "1 000", "nan", "inf"):
            with self.subTest(damaged), self.assertRaisesRegex(profile.Problem, "l1_load_sectors"):
                profile.convert(damaged, "sector", sectors)

    def test_damaged_text(self):
        text = ncu_csv(TWO)
        lines = text.splitlines()
        header = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
        for what, damaged, message in (
            ("nothing", "", "printed no CSV"),
            ("messages only", "\n".join(lines[:header]), "printed no CSV"),
            ("no launch", "\n".join(lines[:header + 2]), "no kernel launch"),
            ("no units", "\n".join(lines[:header + 1] + lines[header + 2:]), "row of units"),
            ("only names", lines[header], "row of units"),
            ("cut short", text[:-40], "damaged"),
            ("a field lost", text.replace('"(128, 2, 1)",', "", 1), f"line {header + 3} has"),
            ("another page", text.replace('"CC"', '"Metric Name"'), "row for each metric"),
            ("no kernel names", text.replace('"Kernel Name"', '"Kernel"'), "lacks the columns Kernel Name"),
            ("a column twice", text.replace('"CC"', '"Device"'), "two columns of one name: Device"),
            ("damaged ID", text.replace('"0","4711"', '"x","4711"'), "ID 'x'"),
        ):
            with self.subTest(what), self.assertRaisesRegex(profile.Problem, message):
                profile.parse_ncu(damaged)

    def test_messages_below_the_rows(self):
        self.assertEqual(len(profile.parse_ncu(ncu_csv(TWO) + "==WARNING== something\n")), 2)

    def test_kernel_names(self):
        self.assertEqual(profile.short_name(SCORES), "scores")
        self.assertEqual(profile.short_name("step04::detail::forward(int)"), "forward")
        self.assertEqual(profile.short_name("void other<int>(int)"), "void other<int>(int)")


class Arithmetic(unittest.TestCase):
    def setUp(self):
        self.launches = profile.parse_ncu(ncu_csv(TWO))

    def test_total(self):
        total = profile.total(self.launches)
        self.assertEqual(total["l1_load_sectors"], 1500)
        self.assertEqual(total["dram_read_bytes"], 5120)
        self.assertAlmostEqual(total["seconds"], 4e-6)
        self.assertAlmostEqual(total["occupancy_percent"], 40.5)  # 3 us of 50.5 and 1 us of 10.5
        self.assertIsNone(total["registers"])

    def test_total_of_something_unknown_is_unknown(self):
        self.launches[1].values["dram_read_bytes"] = None
        self.assertIsNone(profile.total(self.launches)["dram_read_bytes"])

    def test_atomics_and_async_copies(self):
        values = dict(self.launches[0].values, l1_atomic_sectors=7, l1_reduction_sectors=3, l1_async_copy_sectors=20)
        self.assertEqual(profile.l1_sectors(values), (1000 + 20 + 10, 100 + 10))
        values = dict(values, l1_atomic_sectors=None, l1_reduction_sectors=None, l1_async_copy_sectors=None)
        self.assertEqual(profile.l1_sectors(values), (1000, 100))

    def test_l2_counts_what_l1_asks_where_that_is_known(self):
        values = dict(self.launches[0].values, l2_read_sectors=9, l2_read_sectors_from_l1=5, l2_write_sectors=4,
                      l2_write_sectors_from_l1=None)
        self.assertEqual(profile.l2_sectors(values), (5, 4))

    def test_difference(self):
        self.assertEqual(profile.difference_percent(110, 100), 10)
        self.assertEqual(profile.difference_percent(98, 100), -2)
        self.assertEqual(profile.difference_percent(0, 0), 0)
        self.assertIsNone(profile.difference_percent(1, 0))

    def test_summary(self):
        result = profile.summarize(run_of(False), self.launches, run_of(True))
        self.assertEqual(result["case"], "step01/naive/fwd/bf16/d64/full/B1_H2_N8")
        self.assertEqual(result["measured"]["l1_read"], 48000)
        self.assertEqual(result["ledger"]["read"], 48000)
        self.assertEqual(result["difference_percent"]["read"], 0)
        self.assertEqual(result["difference_percent"]["written"], -6.25)  # 150 sectors of 160
        self.assertAlmostEqual(result["measured"]["dram_bytes_per_second"] * 4e-6, 5120 + 64)
        self.assertAlmostEqual(result["measured"]["l1_bytes_per_second"] * 4e-6, 32 * 1650)
        self.assertEqual(result["kernels"][0]["limited_by"], "registers")

    def test_table(self):
        text = profile.table(profile.summarize(run_of(False), self.launches, run_of(True)))
        read, written = [next(line.split() for line in text.splitlines() if line.split()[0] == word) for word in ("read", "written")]
        self.assertEqual(read, ["read", "47,000", "47,000", "48,000", "48,000", "+0.000%", "0", "5,120"])
        self.assertEqual(written, ["written", "4,000", "4,000", "5,120", "4,800", "-6.250%", "0", "64"])
        both = next(line.split() for line in text.splitlines() if line.split()[:1] == ["both"])
        self.assertEqual(both, ["both", "5,184", "6,000"])
        self.assertIn("12 registers", text)
        self.assertRegex(text, r"in total .* 40\.5% +0\.0% +4\.0 ")

    def test_table_without_a_ledger(self):
        text = profile.table(profile.summarize(run_of(False), self.launches, None))
        self.assertRegex(text, r"read +47,000 +n/a +n/a +48,000 +n/a")

    def test_markdown(self):
        result = profile.summarize(run_of(False, layout="bnhd"), self.launches, run_of(True, layout="bnhd"))
        self.assertIn("| step01/naive/fwd/bf16/d64/full/B1_H2_N8 bnhd | 48,000 | 48,000 | +0.000% | 5,120 | 4,800 | -6.250% | 0 | 5,120 "
                      "| 64 | 6,000 |", profile.agreement([result]))

    def test_case_name_with_other_keys(self):
        run = run_of(False, heads=4, kv_heads=1, kv_seq=17, causal=True)
        self.assertEqual(profile.case_name(run), "step01/naive/fwd/bf16/d64/causal/B1_H4_KV1_N8_M17")


class Arguments(unittest.TestCase):
    def test_cases_file(self):
        cases = profile.parse_cases("# comment\n\n01,02 --seq 8 --causal # more\n3 --seq 9\n", "file")
        self.assertEqual([(c.stage, c.options) for c in cases],
                         [("01", ["--seq", "8", "--causal"]), ("02", ["--seq", "8", "--causal"]), ("03", ["--seq", "9"])])

    def test_repository_cases(self):
        path = os.path.join(profile.ROOT, "bench", "profile_cases.txt")
        self.assertTrue(profile.parse_cases(profile.read_file(path, "--cases"), path))

    def test_bad_arguments(self):
        for words, message in (
            (["--seq", "8"], "a stage"),
            (["99"], "stage '99' does not exist; accepted: 01"),
            (["01", "--repeats", "3"], "--repeats"),
            (["01", "--output=x"], "--output"),
            (["01", "--ledger"], "--ledger: its value is missing"),
            (["01", "--cache-control", "some"], "--cache-control=some: all and none"),
            (["01", "--cases", "x"], "01: --cases takes"),
            (["--cases", "/nowhere/x"], "--cases=/nowhere/x"),
            (["--from", "x", "--cases", "y"], "--from takes"),
            (["01", "--ledger", __file__], "is not what --make-ledger writes"),
        ):
            with self.subTest(words):
                errors = io.StringIO()
                with contextlib.redirect_stderr(errors):
                    status = profile.main(words)
                self.assertEqual(status, 2)
                self.assertIn(message, errors.getvalue())

    def test_empty_cases(self):
        with self.assertRaisesRegex(profile.Problem, "holds no case"):
            profile.parse_cases("# nothing\n", "file")


# A stand-in for ncu: writes the CSV beside it into --log-file, runs the program, and can fail as ncu does.
FAKE_NCU = """#!{python}
import os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
with open(os.path.join(here, "calls"), "a") as calls: calls.write(" ".join(words) + "\\n")
for expected in (("--page", "raw"), ("--clock-control", "none"), ("--print-units", "base"), ("--kernel-name", "regex:step01::")):
    assert value(expected[0]) == expected[1], words
mode = open(os.path.join(here, "mode")).read()
program = words[words.index("--metrics") + 2:]
if mode == "unknown metric" and "dram__bytes_read.sum" in value("--metrics"):
    open(value("--log-file"), "w").write("==ERROR== Failed to find metric regex:^dram__bytes_read.sum(\\\\.sum)?$\\n")
    sys.exit(1)
if mode == "needed metric":
    open(value("--log-file"), "w").write("==ERROR== Failed to find metric gpu__time_duration.sum\\n")
    sys.exit(1)
result = subprocess.run(program)
if mode == "forbidden":
    open(value("--log-file"), "w").write("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\\n")
    sys.exit(1)
if mode == "nothing":
    open(value("--log-file"), "w").write("==WARNING== No kernels were profiled.\\n")
    sys.exit(0)
text = open(os.path.join(here, "csv")).read()
if mode == "unknown metric": text = text.replace("dram__bytes_read.sum", "dram__bytes_op_read.sum")
open(value("--log-file"), "w").write(text)
"""
# A stand-in for a stage's program: prints the run beside it, with one repetition where --max-seconds is given.
FAKE_STEP = """#!{python}
import json, os, sys
run = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "run")))
assert "--json" in sys.argv
if "--max-seconds" in sys.argv and run["repetitions"]:
    run["repetitions"] = 1 if float(sys.argv[sys.argv.index("--max-seconds") + 1]) < 2e-6 else 100
if "--bad" in sys.argv: print("step01: --bad=1: unknown", file=sys.stderr); sys.exit(2)
print(json.dumps(run))
sys.exit(3 if run["status"] == "refused" else 0)
"""


class WholeRuns(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write("ncu", FAKE_NCU.format(python=sys.executable), True)
        for build, run in (("gpu", run_of(False)), ("cpu", run_of(True))):
            self.write(f"{build}/steps/01_naive/step01", FAKE_STEP.format(python=sys.executable), True)
            self.write(f"{build}/steps/01_naive/run", json.dumps(run))
        self.write("csv", ncu_csv(TWO))
        self.write("mode", "")

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text, executable=False):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        if executable:
            os.chmod(self.path(name), stat.S_IRWXU)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def run_profile(self, *words):
        """(exit status, stdout, stderr)"""
        out, errors = io.StringIO(), io.StringIO()
        folders = ["--ncu", self.path("ncu"), "--programs", self.path("gpu"), "--emulator", self.path("cpu")]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = profile.main([*words, *folders])
        return status, out.getvalue(), errors.getvalue()

    def test_a_run(self):
        status, out, errors = self.run_profile("01", "--seq", "8", "--json", self.path("json"))
        self.assertEqual((status, errors), (0, ""))
        self.assertIn("-6.250%", out)
        result = json.loads(self.read("json"))
        self.assertEqual(result[0]["ledger"]["written"], 5120)
        self.assertIn("--variant 01 --max-seconds 1.001e-06", self.read("calls"))

    def test_ledger_from_a_file(self):
        cases = self.path("cases")
        self.write("cases", "01 --seq 8\n")
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(profile.main(["--make-ledger", self.path("ledger"), "--cases", cases, "--emulator", self.path("cpu")]), 0)
        os.remove(self.path("cpu/steps/01_naive/step01"))
        status, out, _ = self.run_profile("--cases", cases, "--ledger", self.path("ledger"))
        self.assertEqual(status, 0)
        self.assertIn("-6.250%", out)

    def test_another_problem_is_not_compared(self):
        self.write("ledger", json.dumps([run_of(True, seq=9)]))
        os.remove(self.path("cpu/steps/01_naive/step01"))
        status, out, errors = self.run_profile("01", "--ledger", self.path("ledger"))
        self.assertEqual(status, 1)
        self.assertIn("no ledger to compare with: --ledger does not hold it", errors)
        self.assertIn("48,000", out)  # what was measured is printed all the same

    def test_ledger_of_another_version(self):
        self.write("ledger", json.dumps([run_of(True, predicted_read=46000)]))
        status, _, errors = self.run_profile("01", "--ledger", self.path("ledger"))
        self.assertEqual(status, 1)
        self.assertIn("another version of the stage: it predicts 46000", errors)

    def test_record_and_from(self):
        _, out, _ = self.run_profile("01", "--record", self.path("record"))
        again = io.StringIO()
        with contextlib.redirect_stdout(again):
            status = profile.main(["--from", self.path("record"), "--emulator", self.path("cpu")])
        self.assertEqual((status, again.getvalue()), (0, out))

    def test_counters_not_permitted(self):
        self.write("mode", "forbidden")
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 1)
        for word in ("ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0", "sudo", "SYS_ADMIN"):
            self.assertIn(word, errors)

    def test_a_metric_of_another_name(self):
        self.write("mode", "unknown metric")
        status, out, errors = self.run_profile("01")
        self.assertEqual(status, 0)
        self.assertIn("ncu does not know dram__bytes_read.sum; dram__bytes_op_read.sum instead", errors)
        self.assertIn("5,120", out)
        self.assertEqual(len(self.read("calls").splitlines()), 2)

    def test_a_metric_that_is_needed(self):
        self.write("mode", "needed metric")
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 1)
        self.assertIn("does not know gpu__time_duration.sum, which is needed", errors)

    def test_no_kernel(self):
        self.write("mode", "nothing")
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 1)
        self.assertIn("No kernels were profiled", errors)

    def test_more_than_one_forward(self):
        self.write("gpu/steps/01_naive/run", json.dumps(run_of(False, predicted_seconds=1.0)))
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 1)
        self.assertIn("after 100 timed runs", errors)

    def test_wrong_and_refused(self):
        for state, expected in (("wrong", 1), ("refused", 3)):
            self.write("gpu/steps/01_naive/run", json.dumps(run_of(False, status=state, reason="because")))
            status, _, errors = self.run_profile("01")
            self.assertEqual(status, expected)
            self.assertIn("because", errors)

    def test_an_emulator_as_program(self):
        self.write("gpu/steps/01_naive/run", json.dumps(run_of(True)))
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 2)
        self.assertIn("this is the emulator", errors)

    def test_bad_option_of_the_program(self):
        status, _, errors = self.run_profile("01", "--bad")
        self.assertEqual(status, 2)
        self.assertIn("--bad=1: unknown", errors)

    def test_one_bad_case_does_not_stop_the_others(self):
        self.write("gpu/steps/02_online_softmax/step02", "#!/bin/sh\necho broken >&2\nexit 139\n", True)
        self.write("cases", "02 --seq 8\n01 --seq 8\n")
        status, out, errors = self.run_profile("--cases", self.path("cases"))
        self.assertEqual(status, 1)
        self.assertIn("exit status 139", errors)
        self.assertIn("-6.250%", out)

    def test_missing_program_and_ncu(self):
        os.remove(self.path("gpu/steps/01_naive/step01"))
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 2)
        self.assertIn("does not exist: build it", errors)
        os.remove(self.path("ncu"))
        status, _, errors = self.run_profile("01")
        self.assertEqual(status, 2)
        self.assertIn("--ncu=", errors)


if __name__ == "__main__":
    unittest.main()
