#!/usr/bin/env python3
"""Tests of bench/harness.cpp through a stub of a GPU, and of scripts/merge_benchmarks.py on what it writes.

usage: tests/test_bench_harness.py PROGRAM   (the target bench_stub)
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

STUB = ""
MERGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts", "merge_benchmarks.py")
SMALL = ("--batch", "2", "--heads", "4", "--kv-heads", "2", "--seq", "33", "--kv-seq", "50", "--head-dim", "16", "--causal")
NAME = "fwd/bf16/d16/causal/B2_H4_KV2_N33_M50"


class Harness(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = os.path.join(folder.name, "results.json")
        self.merged = os.path.join(folder.name, "merged.json")

    def run_stub(self, *options, **environment):
        return subprocess.run([STUB, *options], env={**os.environ, **environment}, capture_output=True, text=True, check=False)

    def results(self, *options, status=0, **environment):
        """The context, and the cases by name."""
        done = self.run_stub(*options, "--benchmark_out=" + self.file, **environment)
        self.assertEqual(done.returncode, status, done.stderr)

        def unique(pairs):
            keys = [key for key, _ in pairs]
            self.assertEqual(len(keys), len(set(keys)), keys)
            return dict(pairs)

        with open(self.file, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=unique)
        return content["context"], {case["name"]: case for case in content["benchmarks"]}

    def test_a_backward_variant_has_two_cases(self):
        _, cases = self.results(*SMALL, STUB_BACKWARD="1", STUB_SECONDS="0.002")
        shape = NAME.removeprefix("fwd/")
        self.assertEqual(list(cases), [f"step09/right/{NAME}", f"step09/back/bwd/{shape}", f"step09/back/fwdbwd/{shape}"])
        forward = 0.5 * 4 * 2 * 4 * 33 * 50 * 16
        alone, both = cases[f"step09/back/bwd/{shape}"], cases[f"step09/back/fwdbwd/{shape}"]
        self.assertAlmostEqual(alone["TFLOPS"], 2.5 * forward / 0.002 / 1e12)
        self.assertAlmostEqual(both["TFLOPS"], 3.5 * forward / 0.002 / 1e12)
        self.assertAlmostEqual(alone["saved_MiB"], 1 + 2 * 4 * 33 * 4 / 2**20)  # the stub's workspace, and LSE
        self.assertIn("predicted_ms", alone)
        self.assertNotIn("predicted_ms", both)
        self.assertLess(alone["rel_rms_error"], 0.02)

    def test_wrong_gradients_are_not_timed(self):
        _, cases = self.results(*SMALL, STUB_BACKWARD="1.5", status=1)
        for direction in ("bwd", "fwdbwd"):
            case = cases[f"step09/back/{direction}/" + NAME.removeprefix("fwd/")]
            self.assertTrue(case["error_occurred"])
            self.assertIn("wrong: dK: ", case["error_message"])

    def test_a_right_case_has_its_numbers(self):
        context, cases = self.results(*SMALL, WORKBOOK_COMMAND="as \"typed\"", STUB_SECONDS="0.002")
        self.assertEqual(context["gpu"], "NVIDIA H200")
        self.assertEqual(context["compute_capability"], "9.0")
        self.assertEqual(context["cuda"], "13.0")
        self.assertEqual(context["command"], 'as "typed"')
        self.assertTrue(context["driver"])
        self.assertEqual(list(cases), ["step09/right/" + NAME])
        case = cases["step09/right/" + NAME]
        self.assertEqual(case["run_type"], "iteration")
        self.assertEqual(case["time_unit"], "ms")
        self.assertAlmostEqual(case["real_time"], 2)
        self.assertEqual(case["repetitions"], 150)  # 0.3 s of them
        self.assertAlmostEqual(case["TFLOPS"], 0.5 * 4 * 2 * 4 * 33 * 50 * 16 / 0.002 / 1e12)
        self.assertEqual(case["extra_MiB"], 1)
        self.assertEqual(case["spread_percent"], 0)
        self.assertAlmostEqual(case["roofline_percent"], 100 * case["predicted_ms"] / 2)
        self.assertLess(case["rel_rms_error"], 0.01)

    def test_what_is_not_right_has_a_reason_and_no_time(self):
        _, cases = self.results(*SMALL, STUB_BAD="1", status=1)
        reasons = {name.split("/")[1]: case.get("error_message", "") for name, case in cases.items()}
        self.assertEqual(reasons.pop("right"), "")
        for variant, begin in (("wrong", "wrong: O"), ("unwritten", "wrong: O"), ("exhausted", "refused: "), ("too_large", "refused: "),
                               ("broken", "failed: CUDA: running a kernel")):
            self.assertTrue(reasons.pop(variant).startswith(begin), variant)
        self.assertFalse(reasons)
        for name, case in cases.items():
            self.assertEqual("TFLOPS" in case, name.startswith("step09/right"), name)

    def test_a_wrong_case_is_never_timed(self):
        done = self.run_stub(*SMALL, "--benchmark_filter=/wrong/", STUB_BAD="1")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("attend"), 1, "one run for the check and none for the clock")

    def test_refused_and_skipped_cases_do_not_fail(self):
        for status, begin, options, environment in (
            (3, "refused: causal: not causal is accepted", (), {"STUB_REFUSES": "1"}),
            (3, "skipped: not begun within --stop-after", ("--stop-after", "1e-9"), {}),
            (3, "skipped: a run takes 3 s, more than --max-seconds allows (2 s)", ("--max-seconds", "2"), {"STUB_SECONDS": "3"}),
            (3, "skipped: a run would take at least", ("--max-seconds", "1e-9"), {}),
        ):
            _, cases = self.results(*SMALL, *options, status=status, **environment)
            self.assertTrue(cases["step09/right/" + NAME]["error_message"].startswith(begin), cases)

    def test_exit_status(self):
        for status, message, options in (
            (3, "no usable GPU", ("--quick",)),
            (2, "--seq=0", ("--seq", "0")),
            (2, "--benchmark_nonsense", ("--benchmark_nonsense=1",)),
            (2, "json is accepted", ("--benchmark_out_format=csv",)),
            (2, "Failed to match", ("--benchmark_filter=nothing", "--seq", "8")),
            (0, "", ("--help",)),
            (0, "", ("--benchmark_list_tests",)),
        ):
            no_gpu = {"STUB_NO_GPU": "1"} if status == 3 or not message else {}
            done = self.run_stub(*options, **no_gpu)
            self.assertEqual(done.returncode, status, options)
            self.assertIn(message, done.stderr, options)

    def merge(self, *files):
        return subprocess.run([sys.executable, MERGE, *files, "--output", self.merged], capture_output=True, text=True, check=False)

    def test_merge(self):
        self.results(*SMALL)
        done = self.merge(self.file)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 cases right and timed, 0 refused", done.stdout)
        with open(self.merged, encoding="utf-8") as file:
            merged = json.load(file)
        self.assertEqual(merged["benchmarks"][0]["name"], "step09/right/" + NAME)
        self.assertNotIn("host_name", merged["context"])

        done = self.merge(self.file, self.merged)
        self.assertEqual(done.returncode, 2)
        self.assertIn("stands twice", done.stderr)

        merged["context"]["gpu"] = "another"
        merged["benchmarks"] = []
        with open(self.merged, "w", encoding="utf-8") as file:
            json.dump(merged, file)
        done = self.merge(self.file, self.merged)
        self.assertEqual(done.returncode, 2)
        self.assertIn("one machine", done.stderr)

        self.results(*SMALL, STUB_BAD="1", status=1)
        done = self.merge(self.file)
        self.assertEqual(done.returncode, 1)
        self.assertIn("1 cases right and timed, 2 refused or skipped with a reason, 3 wrong, failed or not begun", done.stdout)

        with open(self.file, "w", encoding="utf-8") as file:
            file.write('{"context": {')
        done = self.merge(self.file)
        self.assertEqual(done.returncode, 2)
        self.assertIn(self.file, done.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    STUB = os.path.abspath(sys.argv.pop(1))
    unittest.main()
