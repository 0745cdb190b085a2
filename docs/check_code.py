#!/usr/bin/env python3
"""Holds the C++ that the Markdown files show to the sources.

Before each block of C++ a comment names the file that it is from, relative to the Markdown file, or says that it is from none:

    <!-- code: naive.cuh -->
    <!-- code: none -->

The lines of the block must stand in that file as they are, one after the other, but for the marks of exercises. A line "// ..." in the
block stands for any number of lines. With --fix a part that has drifted becomes what is now between its first and its last line.

A line of a paragraph must not begin with a number and a full stop, as in "than 60. So ...": Doxygen takes it for an item of a list.
"""

import argparse
import difflib
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:^<!-- code: (?P<source>[^\n]+) -->\n)?^```cpp\n(?P<code>.*?)^```$", re.M | re.S)
LEFT_OUT = re.compile(r"^[ \t]*// \.\.\.\n", re.M)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
ITEM_IN_PARAGRAPH = re.compile(r"(?<=\n)(?!\d+\. |[\s|>#<])[^\n]+\n(?P<line>\d+\. [^\n]*)")
MARK = re.compile(r"^[ \t]*// exercise \d\d\.\d+ (begin|end)$")


def find(lines, source, begin):
    """Where the lines stand in the source from line `begin` on, or -1."""
    return next((at for at in range(begin, len(source) - len(lines) + 1) if source[at : at + len(lines)] == lines), -1)


def nearest(lines, source):
    """Where as many lines of the source have the most words of them."""
    wanted, there = ([set(line.split()) for line in text] for text in (lines, source))
    return max(range(max(1, len(source) - len(lines) + 1)), key=lambda at: sum(len(a & b) for a, b in zip(wanted, there[at:])))


def held(code, path):
    """(the code as the file has it, differences, whether the former mends them all)."""
    numbered = [(n, line) for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if not MARK.match(line)]
    source = [line for _, line in numbered]
    begin, mended, differences = 0, True, []

    def now(part):
        nonlocal begin, mended
        lines = part.splitlines()
        at, end = find(lines, source, begin), 0
        if at < 0:
            at = find(lines[:1], source, begin)
            end = find(lines[-1:], source, at + 1) + 1 if at >= 0 and len(lines) > 1 else 0
            anchored = end > 0
            if not anchored:
                at = begin + nearest(lines, source[begin:])
                end = at + len(lines)
                mended = False
            differences.extend(difflib.unified_diff(lines, source[at:end], "shown", f"{path}:{numbered[min(at, len(source) - 1)][0]}", n=0, lineterm=""))
            if not anchored:
                return part
        begin = end or at + len(lines)
        return "".join(line + "\n" for line in source[at:begin])

    marks = [*LEFT_OUT.findall(code), ""]
    return "".join(now(part) + mark for part, mark in zip(LEFT_OUT.split(code), marks)), differences, mended


def check(markdown, fix=False):
    """(number of blocks, messages) of a Markdown file, which is rewritten where `fix` is."""
    text = markdown.read_text("utf-8")
    messages, pieces, end, blocks = [], [], 0, 0
    for block in BLOCK.finditer(text):
        blocks += 1
        where = f"{markdown}:{text.count(chr(10), 0, block.start('code'))}"
        code, source = block["code"], block["source"]
        path = markdown.parent / (source or "")
        if not source:
            messages.append(f"{where}: '<!-- code: FILE -->' is missing before ```cpp; '<!-- code: none -->' where it is from no file")
        elif source != "none" and not path.is_file():
            messages.append(f"{where}: code: {source}: no such file; a path relative to {markdown.parent}, or 'none', is accepted")
        elif source != "none":
            code, differences, mended = held(code, path)
            if differences and not (fix and mended):
                hint = "docs/check_code.py --fix mends it" if mended else "mend it by hand; this is what resembles it most"
                messages.append("\n".join([f"{where}: not as in {source}: {hint}", *differences]))
        pieces += [text[end : block.start("code")], code]
        end = block.end("code")
    prose = FENCED.sub(lambda fenced: "\n" * fenced[0].count("\n"), text)
    for item in ITEM_IN_PARAGRAPH.finditer("\n" + prose):
        where = f"{markdown}:{prose.count(chr(10), 0, item.start('line') - 1) + 1}"
        messages.append(f"{where}: '{item['line'][:40]}' would be an item of a list: break the line elsewhere")
    mended = "".join(pieces) + text[end:]
    if fix and mended != text:
        markdown.write_text(mended, "utf-8")
    return blocks, messages


def main():
    parser = argparse.ArgumentParser(description="Checks that the C++ in the Markdown files is that of the sources.")
    parser.add_argument("--fix", action="store_true", help="rewrite what has drifted, where its first and last lines are still there")
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE.md", help="all of the workbook, unless some are named")
    arguments = parser.parse_args()
    files = arguments.files
    if not files:
        found = [*ROOT.glob("*.md"), *(path for folder in ("common", "docs", "steps", "tests") for path in (ROOT / folder).rglob("*.md"))]
        # The blocks of exercises.md are gaps and faults: scripts/exercises.py checks them.
        files = sorted(pathlib.Path(os.path.relpath(path)) for path in found if path.name != "exercises.md")
    checked = [check(path, arguments.fix) for path in files]
    messages = [message for _, told in checked for message in told]
    for message in messages:
        print(message, file=sys.stderr)
    blocks = sum(count for count, _ in checked)
    print(f"{blocks} blocks of C++ in {len(files)} Markdown files: {'see above' if messages else 'as in the sources'}", file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
