"""Tests of docs/figures/draw_trace.py: which tiles a trace shows, and what is drawn of them."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

FIGURES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs", "figures")
sys.path.insert(0, FIGURES)
import draw_trace  # noqa: E402


def read(tensor, first, last):
    return [tensor, "read", first, last]


def trace(blocks, **more):
    """A trace of 4 x 4 rows; blocks: what each one touched."""
    return {"stage": "90", "variant": "90a", "name": "example", "direction": "fwd", "batch": 1, "heads": 1, "kv_heads": 1, "seq": 4, "kv_seq": 4,
            "head_dim": 8, "dtype": "f32", "causal": False, **more,
            "blocks": [{"kernel": "kernel", "block": [n, 0, 0], "touched": touched} for n, touched in enumerate(blocks)]}


KEYS_OUTSIDE = [read("K", 0, 1), read("V", 0, 1), read("Q", 0, 1), ["O", "write", 0, 1], read("Q", 2, 3),
                read("K", 2, 3), read("V", 2, 3), read("Q", 0, 1), ["O", "write", 0, 1], read("Q", 2, 3)]
QUERIES_OUTSIDE = [[read("Q", 0, 1), read("K", 0, 1), read("V", 0, 1), read("K", 2, 3), read("V", 2, 3), ["O", "write", 0, 1]],
                   [read("Q", 2, 3), read("K", 0, 1), read("V", 0, 1), read("K", 2, 3), read("V", 2, 3), ["O", "write", 2, 3]]]


class Visits(unittest.TestCase):
    def test_keys_outside(self):
        self.assertEqual(draw_trace.visits(KEYS_OUTSIDE, 4, 4), [((0, 1), (0, 1)), ((2, 3), (0, 1)), ((0, 1), (2, 3)), ((2, 3), (2, 3))])

    def test_queries_outside(self):
        self.assertEqual(draw_trace.visits(QUERIES_OUTSIDE[1], 4, 4), [((2, 3), (0, 1)), ((2, 3), (2, 3))])

    def test_what_is_read_at_a_stretch_is_one_tile(self):
        touched = [read("Q", 0, 1), read("Q", 2, 3), read("K", 0, 1), read("V", 0, 1), read("K", 2, 3)]
        self.assertEqual(draw_trace.visits(touched, 4, 4), [((0, 3), (0, 1)), ((0, 3), (2, 3))])

    def test_other_heads_are_left_out(self):
        touched = [read("Q", 4, 5), read("K", 0, 1), read("K", 4, 5)]
        self.assertEqual(draw_trace.visits(touched, 4, 4), [])

    def test_writes_are_no_visits(self):
        self.assertEqual(draw_trace.visits([read("Q", 0, 1), ["K", "write", 0, 1]], 4, 4), [])


class Drawing(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def draw(self, *texts):
        """(exit status, stderr) of the script for files with these texts."""
        files = []
        for n, text in enumerate(texts):
            files.append(self.path(f"{n}.jsonl"))
            with open(files[-1], "w", encoding="utf-8") as file:
                file.write(text)
        done = subprocess.run([sys.executable, os.path.join(FIGURES, "draw_trace.py"), "--output", self.path("out.svg"), *files],
                              capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def shapes(self):
        """(tiles as (x, y, width, height, colour), texts) of the picture."""
        root = ElementTree.parse(self.path("out.svg")).getroot()
        space = "{http://www.w3.org/2000/svg}"
        rects = [tuple(r.get(k) for k in ("x", "y", "width", "height", "fill")) for r in root.iter(space + "rect")]
        return [r for r in rects if r[4] in draw_trace.COLOURS], [t.text for t in root.iter(space + "text")]

    def test_panels_side_by_side(self):
        both = json.dumps(trace([KEYS_OUTSIDE])) + "\n" + json.dumps(trace(QUERIES_OUTSIDE, variant="90b")) + "\n"
        self.assertEqual(self.draw(both), (0, ""))
        tiles, texts = self.shapes()
        self.assertEqual(len(tiles), 8)
        left, right = tiles[:4], tiles[4:]
        self.assertEqual(len({t[4] for t in left}), 1)
        self.assertEqual([t[4] for t in right], [draw_trace.COLOURS[n] for n in (0, 0, 1, 1)])
        half = str(draw_trace.SIDE // 2)
        self.assertEqual({t[2:4] for t in tiles}, {(half, half)})
        self.assertLess(max(float(t[0]) for t in left), min(float(t[0]) for t in right))
        steps = [t for t in texts if t in ("1", "2", "3", "4")]
        self.assertEqual(steps, ["1", "2", "3", "4", "1", "2", "1", "2"])
        for words in ("90a example", "90b example", "1 thread block, 4 tiles visited", "2 thread blocks, 4 tiles visited",
                      "the longest block makes 2 steps"):
            self.assertIn(words, texts)

    def test_several_kernels_have_a_panel_each(self):
        both = trace([KEYS_OUTSIDE, *QUERIES_OUTSIDE])
        both["blocks"][0]["kernel"] = "first"
        self.assertEqual(self.draw(json.dumps(both) + "\n"), (0, ""))
        _, texts = self.shapes()
        self.assertIn("90a example: first", texts)
        self.assertIn("90a example: kernel", texts)

    def test_what_cannot_be_drawn(self):
        for text, why in (("", "empty; what --trace of a step program wrote is accepted"),
                          ("nonsense\n", "line 1: no trace of a step program"),
                          ('{"stage": "90"}\n', "line 1: no trace of a step program"),
                          (json.dumps(trace([[read("Q", 0, 1)]])) + "\n", "90a example: no block read rows of Q and K of head 0")):
            with self.subTest(why):
                status, said = self.draw(text)
                self.assertEqual(status, 1)
                self.assertIn(why, said)
                self.assertTrue(said.startswith("draw_trace: "), said)
                self.assertFalse(os.path.exists(self.path("out.svg")))


if __name__ == "__main__":
    unittest.main()
