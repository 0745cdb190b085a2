#!/usr/bin/env python3
"""What docs/check_code.py finds in Markdown files, and what it mends."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs"))
import check_code  # noqa: E402

KERNEL = """\
    float m = -INFINITY, l = 0.0f;
    // exercise 02.3 begin
    for (int j = 0; j < Nkv; ++j) {
        m = fmaxf(m, s);
        l += p;
    }
    // exercise 02.3 end
    LSE(b, h, i) = m + logf(l);
"""


class Blocks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.markdown = Path(folder.name) / "README.md"
        (Path(folder.name) / "kernel.cuh").write_text(KERNEL)

    def check(self, code, comment="<!-- code: kernel.cuh -->\n", fix=False):
        """What is wrong with a block, and what it is afterwards."""
        before, after = f"# Chapter\n\nText:\n\n{comment}```cpp\n", "```\n\nMore text.\n"
        self.markdown.write_text(before + code + after)
        blocks, messages = check_code.check(self.markdown, fix)
        self.assertEqual(blocks, 1)
        text = self.markdown.read_text()
        self.assertTrue(text.startswith(before) and text.endswith(after), text)
        return "\n".join(messages), text[len(before) : -len(after)]

    def test_lines_of_the_source_hold_without_marks_of_exercises(self):
        self.assertEqual(self.check("    float m = -INFINITY, l = 0.0f;\n    for (int j = 0; j < Nkv; ++j) {\n")[0], "")

    def test_lines_may_be_left_out_where_the_block_says_so(self):
        self.assertEqual(self.check("    float m = -INFINITY, l = 0.0f;\n    // ...\n        l += p;\n    }\n")[0], "")
        self.assertIn("not as in kernel.cuh", self.check("    float m = -INFINITY, l = 0.0f;\n        l += p;\n    }\n")[0])

    def test_a_number_at_the_beginning_of_a_line_of_a_paragraph_is_told(self):
        def told(text):
            self.markdown.write_text(text)
            return check_code.check(self.markdown)[1]

        self.assertEqual(told("A list:\n\n1. one\n2. two,\n   and more\n3. three\n\n```\na\n4. b\n```\n"), [])
        found = told("# Title\n\nThe cache has\n60. So it is read.\n")
        self.assertEqual(len(found), 1)
        self.assertIn("README.md:4: '60. So it is read.' would be an item of a list", found[0])

    def test_parts_stand_in_the_order_of_the_source(self):
        self.assertIn("not as in", self.check("        l += p;\n    // ...\n        m = fmaxf(m, s);\n")[0])

    def test_a_drifted_line_is_shown_beside_that_of_the_source(self):
        told, code = self.check("        m = max(m, s);\n        l += p;\n")
        self.assertRegex(told, r"README.md:6: not as in kernel.cuh: mend it by hand[^$]*\n-        m = max\(m, s\);\n\+        m = fmaxf\(m, s\);")
        self.assertIn("kernel.cuh:4", told)
        self.assertEqual(code, "        m = max(m, s);\n        l += p;\n")

    def test_indentation_counts(self):
        self.assertIn("not as in", self.check("m = fmaxf(m, s);\n")[0])

    def test_fix_takes_what_is_between_the_first_and_the_last_line(self):
        drifted = "    for (int j = 0; j < Nkv; ++j) {\n        l = p;\n    }\n    // ...\n    LSE(b, h, i) = m + logf(l);\n"
        self.assertIn("--fix mends it", self.check(drifted)[0])
        mended = drifted.replace("        l = p;\n", "        m = fmaxf(m, s);\n        l += p;\n")
        self.assertEqual(self.check(drifted, fix=True), ("", mended))
        self.assertEqual(self.check(mended), ("", mended))

    def test_fix_leaves_what_it_cannot_place(self):
        drifted = "        m = max(m, s);\n        l += p;\n"
        told, code = self.check(drifted, fix=True)
        self.assertIn("by hand", told)
        self.assertEqual(code, drifted)

    def test_each_block_says_where_it_is_from(self):
        self.assertIn("'<!-- code: FILE -->' is missing", self.check("        l += p;\n", comment="")[0])
        self.assertIn("other.cuh: no such file", self.check("        l += p;\n", comment="<!-- code: other.cuh -->\n")[0])
        self.assertEqual(self.check("anything\n", comment="<!-- code: none -->\n")[0], "")


if __name__ == "__main__":
    unittest.main()
