#!/usr/bin/env python3
"""Tests of bench/report.py, bench/plots.py and of what bench/peers.py does without a GPU. Standard library only; the tests of the
plots are skipped where matplotlib is missing. The numbers of data/bench_fixture.json are made up, so that ratios come out round."""

import contextlib
import copy
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
BENCH = os.path.join(HERE, "..", "bench")
FIXTURE = os.path.join(HERE, "data", "bench_fixture.json")
sys.dont_write_bytecode = True
sys.path.insert(0, BENCH)

import cases  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import results  # noqa: E402

FULL = cases.Case(16, 16, 16, 1024, 1024, 128, "bf16", False)


def run_report(*words):
    """(exit status, standard output, standard error) of report.py."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = report.main(list(words))
        except SystemExit as end:  # argparse
            status = end.code
    return status, out.getvalue(), err.getvalue()


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with open(FIXTURE, encoding="utf-8") as file:
            self.text = file.read()
        self.document = json.loads(self.text)

    def file(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode())
        return path

    def rejected(self, *paths):
        """The message with which the files are refused; it must name one of them."""
        with self.assertRaises(results.BadInput) as caught:
            results.read(list(paths))
        self.assertTrue(any(path in str(caught.exception) for path in paths), str(caught.exception))
        return str(caught.exception)

    def entry(self, part):
        return next(entry for entry in self.document["benchmarks"] if part in entry["name"])


class Cases(unittest.TestCase):
    def test_names(self):
        self.assertEqual(FULL.name(), "fwd/bf16/d128/full/B16_H16_N1024")
        self.assertEqual(cases.grouped_heads()[0].name(), "fwd/bf16/d128/causal/B4_H32_KV8_N4096")
        other = cases.Case(2, 8, 1, 300, 517, 80, "f16", True, "bwd")
        self.assertEqual(other.name(), "bwd/f16/d80/causal/B2_H8_KV1_N300_M517")
        for case in [*cases.sweep(), *cases.quick(), other]:
            self.assertEqual(cases.parse_case(case.name()), case)

    def test_packed_batches(self):
        batch = cases.PackedCase(1, 2, 2, 9, 9, 16, "f16", True, "bwd", sequences=3, lengths=(5, 0, 4))
        self.assertEqual(batch.name(), "bwd/f16/d16/causal/B1_H2_N9_S3")
        self.assertEqual(batch.flops(), 2.5 * 0.5 * 4 * 2 * (25 + 16) * 16)
        self.assertEqual(batch.begins(), [0, 5, 5, 9])
        self.assertEqual(cases.parse_case(batch.name()).sequences, 3)
        lengths = cases.read_lengths(os.path.join(BENCH, "lengths", "sentences.txt"))
        self.assertEqual((len(lengths), sum(lengths), max(lengths)), (814, 25077, 151))
        chapters = cases.read_lengths(os.path.join(BENCH, "lengths", "chapters.txt"))
        self.assertEqual((len(chapters), sum(chapters)), (30, 25077))  # of the same text

    def test_names_that_are_none(self):
        for name in ("", "fwd", "fwd/bf16/d128/full/B16_H16", "fwd/fp8/d128/full/B1_H1_N1", "fwd/bf16/d128/both/B1_H1_N1",
                     "fwd/bf16/d128/full/B1_H1_N1/x", "fwd/bf16/d0/full/B1_H1_N1", "fwd/bf16/d8/full/B1_H1_KV0_N1",
                     "fwd/bf16/d8/full/B1_H1_N-1"):
            with self.subTest(name), self.assertRaises(ValueError):
                cases.parse_case(name)

    def test_flops(self):
        self.assertEqual(FULL.flops(), 4 * 16 * 16 * 1024 * 1024 * 128)
        self.assertEqual(cases.Case(1, 2, 1, 3, 5, 7, "f32", True).flops(), 4 * 2 * 3 * 5 * 7 / 2)
        self.assertEqual(cases.Case(1, 2, 2, 3, 5, 7, "f32", False, "bwd").flops(), 2.5 * 4 * 2 * 3 * 5 * 7)
        self.assertEqual(cases.Case(1, 2, 2, 3, 5, 7, "f32", True, "fwdbwd").flops(), 3.5 * 2 * 2 * 3 * 5 * 7)
        # Q, O, dO, dQ of 2 * 3 rows and K, V, dK, dV of 2 * 5, each of 7 elements; LSE.
        self.assertEqual(cases.Case(1, 2, 2, 3, 5, 7, "f16", True, "bwd").compulsory_bytes(), 2 * (4 * 6 + 4 * 10) * 7 + 4 * 6)

    def test_compulsory_bytes(self):
        case = cases.Case(2, 6, 3, 5, 7, 8, "bf16", False)
        q, kv, lse = 2 * 6 * 5 * 8 * 2, 2 * 3 * 7 * 8 * 2, 2 * 6 * 5 * 4
        self.assertEqual(case.compulsory_bytes(), 2 * q + 2 * kv + lse)

    def test_sweep(self):
        sweep = cases.sweep()
        self.assertEqual(len(sweep), len(set(sweep)))
        self.assertEqual(len(sweep), 2 * 2 * 2 * 6 + 1)
        for case in sweep[:-1]:
            self.assertEqual((case.batch * case.seq, case.heads * case.head_dim), (16384, 2048))
        self.assertLess(set(cases.quick()), set(sweep))


class Reading(Files):
    def test_fixture(self):
        read = results.read([FIXTURE])
        self.assertEqual(read.gpu, "NVIDIA Test")
        self.assertEqual(read.stages(), ["01 naive", "02 online_softmax", "03 shared_memory_tiling"])
        self.assertEqual(read.peers(), ["torch_flash", "torch_cudnn"])
        self.assertEqual(read.ceilings, {"copy": 4250.0, "bf16_matmul": 780.0})
        self.assertEqual(read.timed("01 naive", FULL).ms, 32)  # its name ends as Google Benchmark leaves it
        causal = cases.Case(16, 16, 16, 1024, 1024, 128, "bf16", True)
        self.assertAlmostEqual(read.timed("torch_cudnn", causal).ms, 0.2)  # given in us
        self.assertEqual(read.timed("01 naive", FULL).bytes_of("GB_per_s"), 16000e9 * 0.032)
        self.assertIsNone(read.timed("torch_cudnn", FULL).bytes_of("GB_per_s"))
        self.assertEqual(read.best_peer(FULL).kernel, "torch_cudnn")
        self.assertEqual(read.previous("03 shared_memory_tiling", FULL).kernel, "02 online_softmax")
        self.assertIsNone(read.previous("01 naive", FULL))

    def test_several_files(self):
        first, second = copy.deepcopy(self.document), copy.deepcopy(self.document)
        first["benchmarks"] = [e for e in first["benchmarks"] if e["name"].startswith("step")]
        second["benchmarks"] = [e for e in second["benchmarks"] if e["name"].startswith("peer")]
        paths = [self.file("a.json", first), self.file("b.json", second)]
        self.assertEqual(run_report("--table", *paths), run_report("--table", FIXTURE))

    def test_absent_counters(self):
        for entry in self.document["benchmarks"]:
            if "ceiling" not in entry["name"]:
                for key in results.COUNTERS:
                    entry.pop(key, None)
        status, out, _ = run_report("--table", self.file("a.json", self.document))
        self.assertEqual(status, 0)
        self.assertIn("17.18", out)  # TFLOPS come from the name and the time

    def test_truncated_anywhere(self):
        end = self.text.rindex("}")
        for length in [0, 1, *range(7, end, 97), end]:
            with self.subTest(length):
                self.rejected(self.file("cut.json", self.text[:length]))

    def test_damaged_bytes(self):
        self.assertIn("UTF-8", self.rejected(self.file("a.json", b"\xff" + self.text.encode())))
        self.assertIn("nested", self.rejected(self.file("a.json", "[" * 200000)))
        for text in ("[]", "3", "null", '"x"', '{"context": {}}', '{"benchmarks": []}', '{"context": [], "benchmarks": []}',
                     '{"context": {"gpu": "x"}, "benchmarks": {}}', '{"context": {"gpu": "x"}, "benchmarks": []}',
                     '{"context": {"gpu": 3}, "benchmarks": []}', '{"context": {}, "benchmarks": []}'):
            with self.subTest(text):
                self.rejected(self.file("a.json", text))
        self.rejected(os.path.join(self.folder, "none.json"))
        self.rejected(self.folder)

    def test_wrong_types(self):
        wrong = {
            "name": [None, 3, [], {}, "", "x", "step1/naive/fwd/bf16/d128/full/B1_H1_N1", "x/naive/fwd/bf16/d128/full/B1_H1_N1",
                     "step01/naive/fwd/bf16/d128/full/B1_H1"],
            "real_time": [None, "32", True, [], {}, -1, 0],
            "time_unit": [None, 3, "h", ""],
            "TFLOPS": [None, "4", True, [], -4, 4.0 * 1.05, 0],
            "GB_per_s": [None, "4", False, {}, -1],
            "error_occurred": [None, 1, "true"],
            "run_type": ["aggregate"],
        }
        for key, values in wrong.items():
            for value in values:
                with self.subTest(key=key, value=value):
                    document = copy.deepcopy(self.document)
                    document["benchmarks"][1][key] = value
                    message = self.rejected(self.file("a.json", document))
                    self.assertIn("benchmarks[1]", message)
                    self.assertIn("aggregate" if key == "run_type" else key, message)
        self.entry("torch_flash")["name"] = "peer/other/" + FULL.name()
        self.assertIn("unknown peer other", self.rejected(self.file("a.json", self.document)))
        self.document = json.loads(self.text)
        for entry in (None, 3, "x", []):
            document = copy.deepcopy(self.document)
            document["benchmarks"][2] = entry
            self.assertIn("benchmarks[2]", self.rejected(self.file("a.json", document)))
        for key in ("name", "real_time", "time_unit"):
            document = copy.deepcopy(self.document)
            del document["benchmarks"][0][key]
            self.assertIn(f"{key} is missing", self.rejected(self.file("a.json", document)))
        del self.entry("KV8_N4096")["real_time"]
        self.rejected(self.file("a.json", self.document))
        del self.document["benchmarks"][-1]["error_message"]
        self.rejected(self.file("a.json", self.document))

    def test_not_a_number(self):
        for word in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400):
            with self.subTest(word):
                self.rejected(self.file("a.json", self.text.replace('"real_time": 32.0', f'"real_time": {word}', 1)))
        self.assertIn("NaN", self.rejected(self.file("a.json", self.text.replace('"GB_per_s": 16000.0', '"GB_per_s": NaN', 1))))

    def test_duplicates(self):
        path = self.file("a.json", self.document)
        self.assertIn("stands already in", self.rejected(FIXTURE, path))
        self.document["benchmarks"].append(copy.deepcopy(self.document["benchmarks"][0]))
        self.document["benchmarks"][-1]["name"] = self.document["benchmarks"][-1]["name"].removesuffix("/iterations:1/manual_time")
        self.assertIn("benchmarks[0]", self.rejected(self.file("a.json", self.document)))

    def test_mixed_gpus(self):
        other = {"context": {**self.document["context"], "gpu": "NVIDIA Other"}, "benchmarks": []}
        message = self.rejected(FIXTURE, self.file("other.json", other))
        self.assertIn("NVIDIA Test", message)
        self.assertIn("NVIDIA Other", message)

    def test_exit_status(self):
        status, out, err = run_report("--table", self.file("a.json", "{"))
        self.assertEqual((status, out), (2, ""))
        self.assertIn("a.json", err)
        for words in ([], ["--table", "--markdown", FIXTURE], ["--short", FIXTURE], ["--rewrite", "x", FIXTURE],
                      ["--traffic", "x", FIXTURE], ["--plots", "x", "--ceiling", "fp32_tflops=-1", FIXTURE],
                      ["--plots", "x", "--ceiling", "speed=1", FIXTURE], ["--nonsense", FIXTURE]):
            with self.subTest(words):
                self.assertEqual(run_report(*words)[0], 2)

    def test_program(self):
        done = subprocess.run([sys.executable, os.path.join(BENCH, "report.py"), FIXTURE], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, run_report("--table", FIXTURE)[1]), done.stderr)


class Tables(Files):
    def test_arithmetic(self):
        out = run_report("--table", FIXTURE)[1].splitlines()
        self.assertEqual(out[0], "NVIDIA Test, driver 1.2.3, CUDA 13.0, 2026-01-02")
        full = out[out.index("bf16, d = 128"): out.index("bf16, d = 128, causal")]
        self.assertEqual(full[1].split()[-2:], ["flash", "cudnn"])

        def line(kernel, length):
            """The cells right of the kernel's name."""
            found = [text[len(kernel):].split() for text in full if text.startswith(kernel)]
            return next(cells for cells in found if cells[0] == str(length))

        # N, B, H, ms, TFLOPS, spread, x 01, x prev, roofline, flash, cudnn
        self.assertEqual(line("03 shared_memory_tiling", 1024), "1024 16 16 8.000 17.18 0.5% 4.00 2.00 12.5% 6.25% 3.12%".split())
        self.assertEqual(line("01 naive", 1024), "1024 16 16 32.00 4.295 0.5% 1.00 - 12.5% 1.56% 0.781%".split())
        self.assertEqual(line("03 shared_memory_tiling", 4096), "4096 4 16 160.0 3.436 0.5% 0.800 0.500 12.5% 1.00% -".split())
        self.assertEqual(line("PyTorch flash", 1024), "1024 16 16 0.5000 274.9 - 64.0 - - 100% 50.0%".split())

    def test_causal_counts_half(self):
        out = run_report("--table", FIXTURE)[1]
        causal = out[out.index("bf16, d = 128, causal"):].splitlines()
        self.assertEqual(next(line for line in causal if line.startswith("01 naive")).split()[-6:-3], ["2.147", "0.5%", "1.00"])
        self.assertTrue(any(line.split()[:5] == ["02", "online_softmax", "4096", "4", "32/8"] for line in causal))

    def test_refusals_are_listed(self):
        for words in (["--table"], ["--markdown"]):
            out = run_report(*words, FIXTURE)[1]
            self.assertIn("refused: no room", out)
            self.assertIn("No available kernel", out)
        self.assertIn(r"No available kernel \| 2", out)

    def test_markdown(self):
        out = run_report("--markdown", FIXTURE)[1]
        self.assertIn("| 1024 | 16 | 16 | 32.0 ms, 4.29 | 16.0 ms, 8.59, 2.00× | 8.00 ms, 17.2, 4.00×, 2.00× |", out)
        self.assertIn("| 1024 | 16 | 16 | 0.500 ms, 275 (6.25 %) | 0.250 ms, 550 (3.12 %) |", out)
        self.assertIn("| 4096 | 4 | 32/8 | – | 50.0 ms, 11.0 | – |", out)
        self.assertIn("device-to-device copy 4250 GB/s, bf16 matmul 780.0 TFLOPS", out)
        for block in out.split("\n\n"):
            widths = {line.count("|") - line.count("\\|") for line in block.splitlines() if line.startswith("|")}
            self.assertLessEqual(len(widths), 1, block)

    def test_short(self):
        out = run_report("--markdown", "--short", FIXTURE)[1].splitlines()
        self.assertEqual(out[-6:], [
            "|  | N = 1024 | N = 4096 | N = 1024, causal |",
            "|---|--:|--:|--:|",
            "| 01 naive | 4.29 | 4.29 | 2.15 |",
            "| 02 online_softmax | 8.59 (2.00×) | 6.87 (1.60×) | 3.44 (1.60×) |",
            "| 03 shared_memory_tiling | 17.2 (4.00×) | 3.44 (0.800×) | 6.87 (3.20×) |",
            "| best peer | 550 (128×), PyTorch cuDNN | 344 (80.0×), PyTorch flash | 344 (160×), PyTorch cuDNN |",
        ])

    def test_short_without_cases(self):
        self.document["benchmarks"] = [self.entry("KV8_N4096")]
        status, _, err = run_report("--markdown", "--short", self.file("a.json", self.document))
        self.assertEqual(status, 2)
        self.assertIn("--short", err)

    def test_numbers(self):
        for value, text in ((0, "0"), (0.0123456, "0.0123"), (1.005, "1.00"), (9.999, "10.0"), (12.345, "12.3"), (123.45, "123"),
                            (98765.4, "98765")):
            self.assertEqual(report.significant(value), text)


class Blocks(Files):
    def check_round_trip(self, *how):
        text = f"# Title\n\nbefore\n\n{report.BEGIN}\nold | text\n{report.END}\n\nafter\n"
        path = self.file("README.md", text)
        status, out, _ = run_report("--markdown", *how, "--check", path, FIXTURE)
        self.assertEqual(status, 1)
        self.assertIn("-old | text", out)
        self.assertIn("+| ", out)
        self.assertEqual(run_report("--markdown", *how, "--rewrite", path, FIXTURE), (0, "", ""))
        self.assertEqual(run_report("--markdown", *how, "--check", path, FIXTURE), (0, "", ""))
        with open(path, encoding="utf-8") as file:
            written = file.read()
        self.assertTrue(written.startswith(text[: text.index("old")]))
        self.assertTrue(written.endswith(text[text.index(report.END):]))
        self.assertIn(run_report("--markdown", *how, FIXTURE)[1], written)
        run_report("--markdown", *how, "--rewrite", path, FIXTURE)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read(), written)
        self.assertEqual(os.listdir(self.folder), ["README.md"])
        changed = self.file("README.md", written.replace("8.59", "8.60"))
        status, out, _ = run_report("--markdown", *how, "--check", changed, FIXTURE)
        self.assertEqual(status, 1)
        self.assertIn("8.60", out)

    def test_long(self):
        self.check_round_trip()

    def test_short(self):
        self.check_round_trip("--short")

    def test_markers(self):
        for text in ("", report.BEGIN, report.END, f"{report.END}\n{report.BEGIN}\n", f"{report.BEGIN}\n{report.BEGIN}\n{report.END}\n",
                     f"{report.BEGIN}\n{report.END}\n{report.END}\n"):
            for option in ("--rewrite", "--check"):
                with self.subTest(text=text, option=option):
                    path = self.file("README.md", text)
                    status, _, err = run_report("--markdown", option, path, FIXTURE)
                    self.assertEqual(status, 2)
                    self.assertIn("README.md", err)
                    with open(path, encoding="utf-8") as file:
                        self.assertEqual(file.read(), text)
        self.assertEqual(run_report("--markdown", "--check", os.path.join(self.folder, "none.md"), FIXTURE)[0], 2)


class Peers(unittest.TestCase):
    def run_peers(self, *words):
        return subprocess.run([sys.executable, os.path.join(BENCH, "peers.py"), *words], capture_output=True, text=True)

    def test_list(self):
        names = self.run_peers("--list").stdout.splitlines()
        self.assertEqual(len(names), 24 * 6 + 24 * 2 + 6)  # bf16; f32, which only math and efficient do; grouped heads
        for name in names:
            self.assertIn(name.split("/")[1], cases.PEERS)
            cases.parse_case(name.split("/", 2)[2])
        self.assertEqual(set(self.run_peers("--sweep", "--gqa", "--quick", "--list").stdout.splitlines()), set(names))
        self.assertEqual(self.run_peers("--gqa", "--list", "--backends", "torch_flash").stdout,
                         "peer/torch_flash/fwd/bf16/d128/causal/B4_H32_KV8_N4096\n")
        self.assertEqual(len(self.run_peers("--decode", "--list", "--backends", "torch_flash").stdout.splitlines()), 15)
        self.assertEqual(self.run_peers("--seq", "7", "--kv-seq", "9", "--dtype", "f32", "--list", "--backends", "torch_cudnn").stdout,
                         "peer/torch_cudnn/fwd/f32/d128/full/B1_H16_N7_M9\n")

    def test_packed_batch(self):
        path = os.path.join(BENCH, "lengths", "chapters.txt")
        self.assertEqual(self.run_peers("--varlen", path, "--head-dim", "64", "--causal", "--list", "--backends", "torch_flash").stdout,
                         "peer/torch_flash/fwd/bf16/d64/causal/B1_H16_N25077_S30\n")
        for words, complaint in ((["--varlen", path, "--seq", "7"], "leave them out"), (["--varlen", path + "x"], "No such file"),
                                 (["--varlen", __file__], "invalid literal")):
            run = self.run_peers("--list", *words)
            self.assertEqual(run.returncode, 2)
            self.assertIn(complaint, run.stderr)

    def test_backward_cases_come_in_pairs(self):
        self.assertEqual(self.run_peers("--gqa", "--backward", "--list", "--backends", "torch_flash").stdout,
                         "peer/torch_flash/bwd/bf16/d128/causal/B4_H32_KV8_N4096\n"
                         "peer/torch_flash/fwdbwd/bf16/d128/causal/B4_H32_KV8_N4096\n")
        names = self.run_peers("--backward", "--list").stdout.splitlines()
        self.assertEqual(len(names), 2 * (24 * 6 + 24 * 2 + 6))
        self.assertEqual(len(self.run_peers("--seq", "7", "--dtype", "f32", "--backward", "--list").stdout.splitlines()), 12)

    def test_backward_kernels_tell_the_backend(self):
        for backend, kernel in {
            "torch_flash": "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<3>(pytorch_flash::Flash_bwd_params)",
            "torch_efficient": "fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<bf16>::Params)",
            "torch_cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_kernel0_0",
            "flash_attn2": "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128> >(Flash_bwd_params)",
            "flash_attn3": "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::Mainloop<2> > > >(Params)",
        }.items():
            self.assertEqual(peers.owner([kernel]), backend)

    def test_bad_options(self):
        for words, named in ((["--seq", "0"], '"0"'), (["--heads", "x"], '"x"'), (["--heads", "6", "--kv-heads", "4"], "divisors"),
                             (["--dtype", "fp8"], "fp8"), (["--backends", "a"], '"a"'), (["--max-seconds", "nan"], '"nan"'),
                             (["--repeats", "1"], '"1"'), (["--nonsense"], "--nonsense")):
            with self.subTest(words):
                done = self.run_peers(*words)
                self.assertEqual(done.returncode, 2)
                self.assertIn(named, done.stderr)

    def test_without_a_gpu(self):
        if importlib.util.find_spec("torch"):
            self.skipTest("PyTorch is installed")
        done = self.run_peers("--quick")
        self.assertEqual((done.returncode, done.stdout), (3, ""))
        self.assertIn("PyTorch", done.stderr)

    def test_repetitions(self):
        for seconds, n in ((1e-9, 200), (1e-3, 200), (0.01, 30), (0.05, 10), (0.2, 5), (0.6, 2), (100, 2)):
            self.assertEqual(peers.repetitions(seconds), n, seconds)

    def test_refusal_names_the_pinned_backend(self):
        warned = ["Memory efficient kernel not used because: (Triggered internally at /x/sdp_utils.cpp:1.)",
                  "Memory Efficient attention has been runtime disabled. (Triggered internally at /x:2.)",
                  "Flash attention kernel not used because: (Triggered internally at /x:3.)",
                  "Expected query, key and value to all be of dtype: {Half, BFloat16}. (Triggered internally at /x:4.)",
                  "Expected query, key and value to all be of dtype: {Half, BFloat16}. (Triggered internally at /x:4.)",
                  "CuDNN attention kernel not used because: (Triggered internally at /x:5.)", "CuDNN attention has been runtime disabled.",
                  "cuDNN says no"]
        self.assertEqual(peers.refusal("torch_flash", warned), ["Expected query, key and value to all be of dtype: {Half, BFloat16}."])
        self.assertEqual(peers.refusal("torch_cudnn", warned), ["cuDNN says no"])
        self.assertEqual(peers.refusal("torch_efficient", warned), [])
        self.assertEqual(peers.refusal("torch_flash", ["something else"]), ["something else"])
        self.assertEqual(peers.refusal("torch_math", []), [])

    def test_kernels_tell_the_backend(self):
        kernels = {
            "torch_flash": "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64, 4> >(Flash_fwd_params)",
            "torch_efficient": "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<bfloat16_t>::Params)",
            "torch_cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
            "torch_math": "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>(float*, float const*)",
            "flash_attn2": "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)",
            "flash_attn3": "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::Mainloop<2> > > >(Params)",
        }
        for backend, own in kernels.items():
            self.assertIsNone(peers.mismatch(backend, [own, "void at::native::elementwise_kernel<4>()"]), backend)
            for other, kernel in kernels.items():
                proof = other not in (backend, "torch_math") and (backend, other) != ("flash_attn3", "flash_attn2")
                self.assertEqual(peers.mismatch(backend, [kernel]) is not None, proof, (backend, other))
        self.assertEqual(peers.readable(kernels["torch_math"]), "softmax_warp_forward<float, float, float, 11, false, false>")

    def test_verify(self):
        other = cases.Case(16, 16, 16, 1024, 1024, 128, "bf16", True)
        names = {backend: [f"peer/{backend}/{case.name()}" for case in (FULL, other)] for backend in ("torch_flash", "torch_efficient")}
        entries = [peers.timed(name, 1.0, 0.0, 10, TFLOPS=1.0) for both in names.values() for name in both]
        done = {(backend, "bf16", "fwd"): [FULL, other] for backend in names}
        options = mock.Mock(wrong=0)
        own = {"torch_flash": "void pytorch_flash::flash_fwd_kernel<3>(int)", "torch_efficient": "cudnn_generated_sdpa"}
        with mock.patch.multiple(peers, inputs=lambda *_: (1, 2, 3), launcher=lambda backend, *_: backend, progress=lambda _: None,
                                 pinned=lambda _: contextlib.nullcontext(), profile=lambda launch: [own[launch]]):
            peers.verify(done, entries, options)
        self.assertEqual([entry.get("label") for entry in entries], ["pytorch_flash::flash_fwd_kernel<3>", None, None, None])
        self.assertEqual([entry.get("error_occurred") for entry in entries], [None, None, True, True])
        self.assertIn("torch_cudnn's cudnn_generated_sdpa", entries[3]["error_message"])
        self.assertEqual(options.wrong, 1)


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is missing")
class Plots(Files):
    def draw(self, name, *words):
        folder = os.path.join(self.folder, name)
        status, out, err = run_report("--plots", folder, *words)
        files = {}
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            with open(os.path.join(folder, name), "rb") as file:
                files[name] = file.read()
        return status, err, files

    def test_all(self):
        status, err, files = self.draw("a", FIXTURE)
        self.assertEqual(status, 0, err)
        names = {"speedup_bf16", "tflops_bf16", "roofline_bf16", "traffic_fwd_bf16_d128_full_B4_H16_N4096",
                 "traffic_fwd_bf16_d128_causal_B16_H16_N1024"}
        self.assertEqual(set(files), {f"{name}.{kind}" for name in names for kind in ("svg", "png")})
        for name, content in files.items():
            self.assertTrue(content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml"), name)
        self.assertEqual(self.draw("b", FIXTURE)[2], files)

    def test_traffic_file(self):
        entry = {"case": "step01/naive/fwd/bf16/d64/full/B1_H2_N512", "stage": "01", "name": "naive",
                 "predicted": {"read": 5, "written": 3, "dram": 4},
                 "measured": {"l1_read": 5, "l1_written": 3, "l2_read": 2, "l2_written": None}, "ledger": None}
        import plots

        found = plots.read_traffic(self.file("t.json", [entry, {**entry, "layout": "bnhd"}]))
        self.assertEqual(found["fwd/bf16/d64/full/B1_H2_N512"],
                         {"01 naive": {"requested_bytes": 8, "l1tex_bytes": 8, "tensor_level_bytes": 4}})
        self.assertEqual(list(found)[1], "fwd/bf16/d64/full/B1_H2_N512/bnhd")
        self.assertIn("traffic_fwd_bf16_d64_full_B1_H2_N512.svg", self.draw("a", "--traffic", self.file("t.json", [entry]), FIXTURE)[2])
        for wrong in ([], {}, [3], [entry, entry], [{**entry, "stage": 1}], [{**entry, "measured": 3}], [{**entry, "predicted": None}],
                      [{**entry, "predicted": {"read": "x", "written": 1}}]):
            with self.subTest(wrong):
                status, err, _ = self.draw("c", "--traffic", self.file("t.json", wrong), FIXTURE)
                self.assertEqual(status, 2)
                self.assertIn("t.json", err)

    def test_without_roofs(self):
        for key in ("bandwidth_GB_s", "l1_GB_s"):
            del self.document["context"][key]
        status, err, files = self.draw("a", self.file("a.json", self.document))
        self.assertEqual(status, 0)
        self.assertIn("no roofline of bf16", err)
        self.assertNotIn("roofline_bf16.svg", files)
        self.assertIn("roofline_bf16.svg", self.draw("b", "--ceiling", "bandwidth_GB_s=4800", self.file("a.json", self.document))[2])

    def test_bad_roof(self):
        self.document["context"]["bandwidth_GB_s"] = "fast"
        self.assertEqual(self.draw("a", self.file("a.json", self.document))[0], 2)


if __name__ == "__main__":
    unittest.main()
