#!/usr/bin/env python3
"""Makes tables and plots of benchmark results: JSON files of Google Benchmark (of the stages and of bench/peers.py), one GPU.

    bench/report.py --table FILE...                       plain text
    bench/report.py --markdown [--short] FILE...          Markdown; --short: bf16, d = 128, three lengths
    bench/report.py --markdown [--short] --rewrite README.md FILE...   replace what stands between
                                  <!-- results begin --> and <!-- results end -->
    bench/report.py --markdown [--short] --check README.md FILE...     print a diff and exit 1 when it would change
    bench/report.py --plots DIR [--traffic profile.json] FILE...       SVG and PNG; needs matplotlib

Times are medians. TFLOPS count 4 B H Nq Nkv d FLOPs, half of it when causal; 2.5 times as much for a backward pass. "x 01" is the
speedup over stage 01 (of a backward pass: over stage 05's standard backward), "x prev" that over the stage (or variant) before.
Exit status: 0 done, 1 --check found a difference, 2 bad file, option or missing package.
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections import defaultdict

from cases import PEERS
from results import ROOFS, BadInput, group_title, provenance, read, title_of

BEGIN, END = "<!-- results begin -->", "<!-- results end -->"
SHORT_LENGTHS = (1024, 4096, 16384)

# Tables -----------------------------------------------------------------------------------------------------------------------


def significant(value, digits=3):
    """A number with `digits` significant digits and no exponent."""
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])  # of the rounded value: 9.999 is 10.0
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def size_title(case):
    """What tells a case from the others of its group."""
    heads = f"{case.heads}" if case.heads == case.kv_heads else f"{case.heads}/{case.kv_heads}"
    seq = f"{case.seq}" if case.seq == case.kv_seq else f"{case.seq}/{case.kv_seq}"
    return seq, f"{case.batch}", heads


def ratio(slower, faster):
    """How many times as fast `faster` is."""
    return "-" if slower is None or faster is None else significant(slower.ms / faster.ms)


def align(rows, left):
    """Columns of equal width; the first `left` ones to the left. A row whose first cell is empty is an empty line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        if row[0] == "":
            yield ""
            continue
        cells = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        yield "  ".join(cells).rstrip()


def plain_table(results):
    """Group by group and length by length, a line for each stage and each peer."""
    peers = results.peers()
    yield provenance(results)
    if peers:
        yield "Columns named after a peer: the kernel's speed in percent of that peer's."
    for group, cases in results.groups().items():
        yield ""
        yield f"{group_title(group)}"
        used = [key for key in peers if any(results.timed(key, case) for case in cases)]
        rows = [["kernel", "N", "B", "H", "ms", "TFLOPS", "spread", "x 01", "x prev", "roofline"]
                + [key.replace("torch_", "").replace("flash_attn", "FA") for key in used]]
        refusals = defaultdict(list)
        for case in cases:
            if len(rows) > 1:
                rows.append([""] * len(rows[0]))
            for kernel in results.stages() + peers:
                run = results.runs.get((kernel, case))
                if run is None:
                    continue
                if run.ms is None:
                    refusals[title_of(kernel), run.error].append(size_title(case)[0])
                    continue
                before = results.previous(kernel, case) if kernel not in PEERS else None
                spread, roofline = (f"{run.counters[key]:.1f}%" if key in run.counters else "-"
                                    for key in ("spread_percent", "roofline_percent"))
                of_peers = [f"{significant(100 * peer.ms / run.ms)}%" if (peer := results.timed(key, case)) else "-" for key in used]
                rows.append([title_of(kernel), *size_title(case), significant(run.ms, 4), significant(run.tflops, 4), spread,
                             ratio(results.baseline(case), run), ratio(before, run), roofline, *of_peers])
        if len(rows) > 1:
            yield from align(rows, 1)
        if refusals:
            yield "not timed:"
            for (kernel, reason), lengths in refusals.items():
                yield f"  {kernel}, N = {', '.join(lengths)}: {reason}"
    if results.ceilings:
        yield ""
        yield "ceilings: " + ceilings_text(results)


def ceilings_text(results):
    units = {"copy": "GB/s"}
    names = {"copy": "device-to-device copy"}
    return ", ".join(f"{names.get(key, key.replace('_', ' '))} {significant(value, 4)} {units.get(key, 'TFLOPS')}"
                     for key, value in results.ceilings.items())


def markdown_row(cells):
    return "| " + " | ".join(cells) + " |"


def escape(text):
    """Text that Markdown shows as it is, on one line. An underscore within a word means nothing there."""
    return re.sub(r"([|<>*`\[\]\\]|\b_|_\b)", r"\\\1", " ".join(text.split()))


def long_markdown(results):
    """For each type, head dimension and mask a table of the stages and one of the peers."""
    stages, peers = results.stages(), results.peers()
    yield provenance(results) + "." + (f" Ceilings measured in the same way: {ceilings_text(results)}." if results.ceilings else "")
    if stages:
        yield ""
        backward = any(case.direction != "fwd" for case in results.cases())
        yield ("Stages: median time, TFLOPS, speedup over stage 01" + (" (backward: over standard backward)" if backward else "") +
               ", speedup over the stage before.")
    if peers:
        yield ""
        yield "Peers: median time, TFLOPS" + (", and in brackets the speed of the fastest stage in percent of theirs." if stages else ".")
    for group, cases in results.groups().items():
        yield ""
        yield f"### {group_title(group)}"
        ours = [k for k in stages if any((k, case) in results.runs for case in cases)]
        theirs = [k for k in peers if any((k, case) in results.runs for case in cases)]
        refusals = defaultdict(list)
        for kernels in (ours, theirs):
            if not kernels:
                continue
            yield ""
            yield markdown_row(["N", "B", "H", *map(escape, map(title_of, kernels))])
            yield "|" + "--:|" * (3 + len(kernels))
            for case in cases:
                if not any((k, case) in results.runs for k in kernels):
                    continue
                cells = list(size_title(case))
                fastest = min((run for k in ours if (run := results.timed(k, case))), key=lambda run: run.ms, default=None)
                for kernel in kernels:
                    run = results.timed(kernel, case)
                    if run is None:
                        if (kernel, case) in results.runs:
                            refusals[title_of(kernel), results.runs[kernel, case].error].append(size_title(case)[0])
                        cells.append("–")
                        continue
                    cell = f"{significant(run.ms)} ms, {significant(run.tflops)}"
                    if kernel in PEERS:
                        cell += f" ({significant(100 * run.ms / fastest.ms)} %)" if fastest else ""
                    else:
                        first, before = results.baseline(case), results.previous(kernel, case)
                        cell += f", {ratio(first, run)}×" if first and run is not first else ""
                        cell += f", {ratio(before, run)}×" if before and before is not first else ""
                    cells.append(cell)
                yield markdown_row(cells)
        if refusals:
            yield ""
            yield "Not timed:"
            for (kernel, reason), lengths in refusals.items():
                yield f"- {escape(kernel)}, N = {', '.join(lengths)}: {escape(reason)}"


def short_markdown(results):
    """Stages against lengths, bf16, d = 128, and the best peer."""
    chosen = [case for causal in (False, True) for n in SHORT_LENGTHS for case in results.cases()
              if (case.direction, case.dtype, case.head_dim, case.causal, case.seq, case.kv_seq) == ("fwd", "bf16", 128, causal, n, n)
              and case.heads == case.kv_heads]
    if len({(c.causal, c.seq) for c in chosen}) != len(chosen):
        raise BadInput("--short: more than one case of bf16, d = 128 has the same length and mask")
    if not chosen:
        raise BadInput(f"--short: no case of bf16, d = 128 with N = {', '.join(map(str, SHORT_LENGTHS))} in the files")
    yield f"TFLOPS, and in brackets the speedup over stage 01: bf16, d = 128, {chosen[0].batch * chosen[0].seq} tokens."
    yield provenance(results) + "."
    yield ""
    yield markdown_row(["", *(f"N = {c.seq}{', causal' if c.causal else ''}" for c in chosen)])
    yield "|---|" + "--:|" * len(chosen)
    for kernel in results.stages():
        cells = []
        for case in chosen:
            run, first = results.timed(kernel, case), results.baseline(case)
            speedup = f" ({ratio(first, run)}×)" if first and run and run is not first else ""
            cells.append(significant(run.tflops) + speedup if run else "–")
        if any(cell != "–" for cell in cells):
            yield markdown_row([escape(kernel), *cells])
    best = [results.best_peer(case) for case in chosen]
    if any(best):
        cells = ["–" if run is None else significant(run.tflops) + (f" ({ratio(first, run)}×)" if (first := results.baseline(case)) else "")
                 + f", {escape(title_of(run.kernel))}" for run, case in zip(best, chosen)]
        yield markdown_row(["best peer", *cells])


# A block of a file --------------------------------------------------------------------------------------------------------------


def read_block(path):
    """What stands before, between and after the markers."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: no UTF-8 text") from error
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise BadInput(f"{path}: {marker} stands there {text.count(marker)} times; once is expected")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if end < begin:
        raise BadInput(f"{path}: {END} stands before {BEGIN}")
    return text[:begin], text[begin:end], text[end:]


def rewrite(path, lines):
    before, _, after = read_block(path)
    temporary = path + ".tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(before + "\n" + "\n".join(lines) + "\n" + after)
        os.replace(temporary, path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error


def differences(path, lines):
    """A unified diff from the block of `path` to `lines`; empty where they are equal."""
    old = read_block(path)[1]
    new = "\n" + "\n".join(lines) + "\n"
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), path, "from the results", lineterm=""))


# Options ------------------------------------------------------------------------------------------------------------------------


def parse_options(words):
    parser = argparse.ArgumentParser(prog="bench/report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON of Google Benchmark")
    parser.add_argument("--table", action="store_true", help="print a plain-text table (so it is without any of these options)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--short", action="store_true", help="the short Markdown table")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rewrite", metavar="FILE.md", help="put the Markdown between the markers of this file instead")
    where.add_argument("--check", metavar="FILE.md", help="compare it with what stands there instead")
    parser.add_argument("--plots", metavar="DIR", help="draw the plots into this folder")
    parser.add_argument("--traffic", metavar="FILE.json", help="bytes counted and measured, as `workbook profile --json` writes them")
    parser.add_argument("--ceiling", action="append", default=[], metavar="NAME=NUMBER",
                        help=f"a roof of the roofline plot: {', '.join(ROOFS)}; default: the files' context")
    options = parser.parse_args(words)
    if options.table and options.markdown:
        parser.error("--table and --markdown: one of them")
    for name in ("short", "rewrite", "check"):
        if getattr(options, name) and not options.markdown:
            parser.error(f"--{name} goes with --markdown")
    for name in ("traffic", "ceiling"):
        if getattr(options, name) and not options.plots:
            parser.error(f"--{name} goes with --plots")
    options.roofs = {}
    for word in options.ceiling:
        key, _, value = word.partition("=")
        try:
            if key not in ROOFS or not 0 < float(value) < math.inf:
                raise ValueError
        except ValueError:
            parser.error(f'argument --ceiling: "{word}": NAME=NUMBER with a NAME of {", ".join(ROOFS)} is expected')
        options.roofs[key] = float(value)
    return options


def main(words):
    options = parse_options(words)
    try:
        results = read(options.files)
        if options.markdown:
            lines = list(short_markdown(results) if options.short else long_markdown(results))
            if options.rewrite:
                rewrite(options.rewrite, lines)
            elif options.check:
                difference = differences(options.check, lines)
                if difference:
                    print("\n".join(difference))
                    return 1
            else:
                print("\n".join(lines))
        elif options.table or not options.plots:
            print("\n".join(plain_table(results)))
        if options.plots:
            import plots

            for path in plots.draw(results, options.plots, options.traffic, options.roofs):
                print(path, file=sys.stderr)
    except BadInput as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
