#!/usr/bin/env python3
"""The learner's loop on a copy of the stages in a folder with a blank in its name. Building and running are stood in for by scripts; the
kernels themselves are tested by tests/wrong/test_exercises.cpp."""

import contextlib
import io
import json
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.dont_write_bytecode = True
CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT / "scripts"))
import exercises  # noqa: E402


class Loop(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.root = Path(self.temporary.name) / "a checkout"
        for folder in sorted((CHECKOUT / "steps").glob("[0-9][0-9]_*")):
            for path in [*folder.glob("*.cuh"), folder / "exercises.md"]:
                target = self.root / "steps" / folder.name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        self.file = self.root / "exercises/02/online_softmax.cuh"
        self.build = self.root / "build/cpu"
        self.cmake = self.script(self.root / "cmake", "exit 0")
        self.program("exit 0")

    def script(self, path, body):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def program(self, body):
        """What the check of stage 02 does."""
        self.script(self.build / "steps/02_online_softmax/exercise02", body)

    def run_loop(self, *words):
        """(exit status, stdout and stderr)"""
        arguments = ["workbook", "--root", str(self.root), *words]
        if words[0] == "check":
            arguments += ["--build", str(self.build), "--cmake", str(self.cmake)]
        out = io.StringIO()
        with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = exercises.main()
        return status, out.getvalue()

    def write(self, task_id, code):
        text = self.file.read_text()
        first, last = exercises.regions(text, "")[task_id]
        self.file.write_text(text[:first] + code + text[last:])

    def state(self):
        return json.loads((self.root / "exercises/progress.json").read_text())

    def overlay(self):
        return (self.build / "steps/02_online_softmax/exercise/kernels/02_online_softmax/online_softmax.cuh").read_text()

    # ---- start

    def test_start_empties_the_regions(self):
        status, out = self.run_loop("start", "02")
        self.assertEqual(status, 0)
        self.assertIn("exercises/02/online_softmax.cuh", out)
        text = self.file.read_text()
        for task_id in ("02.1", "02.2", "02.3", "02.4"):
            self.assertIn(f"// TODO {task_id}:", text)
            self.assertIn(f"// exercise {task_id} end", text)
        self.assertNotIn("fmaxf", text)

    def test_start_takes_the_ways_to_name_a_stage(self):
        for word in ("2", "step02", "02_online_softmax"):
            shutil.rmtree(self.root / "exercises", ignore_errors=True)
            self.assertEqual(self.run_loop("start", word)[0], 0)
            self.assertTrue(self.file.is_file())

    def test_start_never_overwrites(self):
        self.run_loop("start", "02")
        self.file.write_text("mine\n")
        status, out = self.run_loop("start", "02")
        self.assertEqual(status, 2)
        self.assertIn("exercises/02/online_softmax.cuh is there and stays as it is; --again", out)
        self.assertEqual(self.file.read_text(), "mine\n")

    def test_start_again_keeps_the_old_file(self):
        self.run_loop("start", "02")
        for number in (1, 2):
            self.file.write_text(f"mine {number}\n")
            self.assertEqual(self.run_loop("start", "02", "--again")[0], 0)
            self.assertIn("TODO 02.1", self.file.read_text())
        self.assertEqual(self.file.with_name("online_softmax.old1.cuh").read_text(), "mine 1\n")
        self.assertEqual(self.file.with_name("online_softmax.old2.cuh").read_text(), "mine 2\n")

    def test_bug_has_its_fault_and_no_markers(self):
        self.assertEqual(self.run_loop("start", "02.bug1")[0], 0)
        text = (self.root / "exercises/02/bug1/online_softmax.cuh").read_text()
        self.assertIn("float m = 0.0f, l = 0.0f;", text)
        self.assertNotIn("exercise 02", text)

    def test_what_does_not_exist(self):
        for words, message in [
            (("start", "09"), "stage '09' has no exercises; accepted: 01 02"),
            (("start", "two"), "'two' is no exercise: 02, 02.1 or 02.bug1 are accepted"),
            (("hint", "02.7"), "exercise '02.7' does not exist; stage 02 has 02.1 02.2 02.3 02.4 02.bug1 02.bug2"),
            (("start", "02.1"), "start takes a stage or a bug"),
            (("solution", "02"), "solution takes one exercise"),
            (("check", "02"), "exercises/02/online_softmax.cuh is not there: ./workbook start 02 makes it"),
            (("check", "02.bug2"), "bug2/online_softmax.cuh is not there: ./workbook start 02.bug2 makes it"),
            (("start",), "the following arguments are required: NN"),
        ]:
            status, out = self.run_loop(*words)
            self.assertEqual(status, 2, words)
            self.assertIn(message, out)

    # ---- check

    def test_nothing_is_written(self):
        self.run_loop("start", "02")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 2)
        self.assertIn("nothing is written yet in exercises/02/online_softmax.cuh: begin with 02.1", out)
        status, out = self.run_loop("check", "02.3")
        self.assertEqual(status, 2)
        self.assertIn("02.3 is still a TODO in exercises/02/online_softmax.cuh", out)

    def test_stage_stands_in_for_what_is_to_do(self):
        self.run_loop("start", "02")
        self.write("02.1", "    const int hkv = learners_own(h);\n")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 0)
        self.assertIn("still to do, and as the stage has them meanwhile: 02.2 02.3 02.4", out)
        self.assertIn("02.1: right\nnext: 02.2, The score of a key", out)
        self.assertIn("learners_own(h)", self.overlay())
        self.assertIn("const float m_new = fmaxf(m, s);", self.overlay())
        self.assertEqual(list(self.state()["done"]), ["02.1"])

    def test_learners_file_alone_when_all_is_written(self):
        self.run_loop("start", "02")
        for task_id in ("02.1", "02.2", "02.3", "02.4"):
            self.write(task_id, f"// mine {task_id}\n")
        self.run_loop("check", "02")
        self.assertEqual(self.overlay().split("\n", 1)[1], self.file.read_text())
        self.assertEqual(len(self.state()["done"]), 4)

    def test_one_region_alone(self):
        self.run_loop("start", "02")
        self.write("02.1", "// mine 02.1\n")
        self.write("02.3", "// mine 02.3\n")
        self.run_loop("check", "02.3")
        self.assertIn("// mine 02.3", self.overlay())
        self.assertNotIn("// mine 02.1", self.overlay())
        self.assertEqual(list(self.state()["done"]), ["02.3"])

    def test_compilers_speak_of_the_learners_lines(self):
        self.run_loop("start", "02")
        self.write("02.3", "// mine\n")
        self.run_loop("check", "02")
        number = None
        for line in self.overlay().splitlines():
            if line.startswith("#line "):
                number, name = line[6:].split(" ", 1)
                number = int(number)
                self.assertEqual(json.loads(name), str(self.file))
                continue
            if line == "// mine" or "exercise 02.4 end" in line:
                self.assertEqual(self.file.read_text().splitlines()[number - 1], line)
            number += 1

    def test_wrong(self):
        self.program("exit 1")
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 1)
        self.assertIn("Look at 02.1 (The key/value head). A hint: ./workbook hint 02.1", out)
        self.assertNotIn("02.1", self.state()["done"])

    def test_the_region_that_is_wrong_is_found(self):
        kernel = self.build / "steps/02_online_softmax/exercise/kernels/02_online_softmax/online_softmax.cuh"
        self.program(f"! grep -q wrong '{kernel}'")
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        self.write("02.2", "// wrong\n")
        self.write("02.3", "// mine\n")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 1)
        self.assertIn("Look at 02.2 (The score of a key). A hint", out)
        self.assertEqual(list(self.state()["done"]), ["02.1"])

    def test_regions_that_are_wrong_together(self):
        kernel = self.build / "steps/02_online_softmax/exercise/kernels/02_online_softmax/online_softmax.cuh"
        self.program(f"test $(grep -c mine '{kernel}') -lt 2")
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        self.write("02.2", "// mine\n")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 1)
        self.assertIn("Each region is right by itself", out)

    def test_does_not_compile(self):
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        self.script(self.cmake, f"echo '{self.root}/exercises/02/online_softmax.cuh:33:5: error: no'; echo '   33 |     x'; exit 1")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 1)
        self.assertIn("It does not compile:\n\nexercises/02/online_softmax.cuh:33:5: error: no\n   33 |     x\n", out)

    def test_no_end(self):
        self.program("exec sleep 60")
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        with mock.patch.object(exercises, "CHECK_SECONDS", 0.2):
            status, out = self.run_loop("check", "02")
        self.assertEqual(status, 1)
        self.assertIn("no end after 0.2 s: does every loop come to its end", out)

    def test_crash(self):
        self.program("kill -SEGV $$")
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 1)
        self.assertIn("ended by signal 11", out)

    def test_lost_markers(self):
        self.run_loop("start", "02")
        text = self.file.read_text()
        self.file.write_text(text.replace("        // exercise 02.3 end\n", ""))
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 2)
        self.assertIn("the line '// exercise 02.3 end' is missing", out)
        self.file.write_text(text.replace("// exercise 02.3 begin", "").replace("// exercise 02.3 end", ""))
        status, out = self.run_loop("check", "02")
        self.assertEqual(status, 2)
        self.assertIn("has no region 02.3 any more", out)

    def test_watch(self):
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")

        def save():
            self.write("02.2", "// mine\n")
            wait.side_effect = KeyboardInterrupt  # the next time

        with mock.patch.object(exercises, "wait_a_moment", side_effect=save) as wait:
            status, out = self.run_loop("check", "02", "--watch")
        self.assertEqual(status, 130)
        self.assertIn("02.1: right", out)
        self.assertIn("02.1 02.2: right", out)
        self.assertEqual(out.count("waiting for exercises/02/online_softmax.cuh to be saved"), 2)

    def test_bug_is_mended(self):
        self.run_loop("start", "02.bug1")
        status, out = self.run_loop("check", "02.bug1")
        self.assertEqual(status, 0)
        self.assertIn("02.bug1: found and mended", out)
        self.assertIn("float m = 0.0f", self.overlay())  # the learner's file, whatever the stand-in for the check says

    # ---- hint, solution, reset, progress

    def test_hints_one_at_a_time(self):
        texts = [self.run_loop("hint", "02.1")[1] for _ in range(3)]
        self.assertIn("Hint 1 of 2", texts[0])
        self.assertIn("several neighbouring query heads share one key/value head.", texts[0])
        self.assertNotIn("Hint 2", texts[0])
        self.assertIn("Hint 2 of 2", texts[1])
        self.assertIn("There are no more. ./workbook solution 02.1", texts[2])
        self.assertEqual(self.state()["hints"], {"02.1": 2})

    def test_links_are_paths(self):
        self.assertIn("(steps/02_online_softmax/README.md#why-it-is-right)", self.run_loop("hint", "02.3")[1])
        self.assertIn("(common/simt/warp.hpp)", self.run_loop("hint", "02.2")[1])

    def test_solution(self):
        self.assertIn("const int hkv = h / (Q.extent(1) / K.extent(1));", self.run_loop("solution", "02.1")[1])
        out = self.run_loop("solution", "02.bug1")[1]
        self.assertIn("-    float m = 0.0f, l = 0.0f;\n+    float m = -INFINITY, l = 0.0f;", out)

    def test_reset_one_region(self):
        self.run_loop("start", "02")
        self.write("02.1", "// mine 02.1\n")
        self.write("02.2", "// mine 02.2\n")
        self.assertEqual(self.run_loop("reset", "02.1")[0], 0)
        self.assertIn("TODO 02.1", self.file.read_text())
        self.assertIn("// mine 02.2", self.file.read_text())
        self.assertIn("// mine 02.1", self.file.with_name("online_softmax.old1.cuh").read_text())

    def test_progress(self):
        self.assertIn("0 of ", self.run_loop("progress")[1])
        self.run_loop("start", "02")
        self.write("02.1", "// mine\n")
        self.run_loop("check", "02")
        self.write("02.2", "// mine\n")
        out = self.run_loop("progress")[1]
        self.assertRegex(out, r"02\.1 +done")
        self.assertRegex(out, r"02\.2 +begun")
        self.assertRegex(out, r"02\.3 +to do")
        self.assertRegex(out, r"02\.bug1 +- ")
        self.assertIn("1 of ", out)

    def test_broken_state(self):
        (self.root / "exercises").mkdir()
        (self.root / "exercises/progress.json").write_text("{")
        status, out = self.run_loop("progress")
        self.assertEqual(status, 2)
        self.assertIn("exercises/progress.json is not JSON", out)

    # ---- what the texts must have

    def test_every_task_has_what_it_needs(self):
        for number in ("01", "02", "03", "04", "05", "06"):
            stage = exercises.Workbook(self.root).stage(number)
            for task in stage.tasks.values():
                with self.subTest(task.id):
                    self.assertGreaterEqual(len(task.hints), 2)
                    self.assertTrue(task.text)
                    if not task.is_bug:
                        for word in (f"// TODO {task.id}: ", "\n// In:  ", "\n// Out: "):
                            self.assertIn(word, task.stub)

    def test_a_fault_that_the_source_no_longer_holds(self):
        kernel = self.root / "steps/02_online_softmax/online_softmax.cuh"
        kernel.write_text(kernel.read_text().replace("float m = -INFINITY, l = 0.0f;", "float l = 0.0f, m = -INFINITY;"))
        status, out = self.run_loop("start", "02")
        self.assertEqual(status, 2)
        self.assertIn("what 02.bug1 replaces is in 0 kernels once", out)


if __name__ == "__main__":
    unittest.main()
