#!/usr/bin/env python3
"""Draws which thread block visits which tile of the N x N scores, and when, from traces of runs on the emulator.

    build/cpu/steps/04_flash_attention_2/step04 --seq 256 --head-dim 64 --causal --trace 04.jsonl
    python3 docs/figures/draw_trace.py --output 04.svg 04.jsonl

./workbook trace does both. A tile is what a block has at a time: rows of Q and rows of K that it read between two barriers, or by one
copy of TMA. The picture shows head 0 of batch 0. Standard library only.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_figures import LINE, RED, SOFT, Svg  # noqa: E402

COLOURS = ("#dbe8f6", "#f7dfd6", "#dcefe0", "#f5ecd2", "#e6def2", "#d7eef0", "#f3dcea", "#e4e7eb")
SIDE, LEFT, TOP, BOTTOM, GAP = 320, 84, 104, 64, 90  # pixels; a panel is SIDE high and wide


class Unusable(Exception):
    """A trace that cannot be drawn; the message says why."""


def visits(touched, queries, keys):
    """The tiles of one block, in order: ((first query, last query), (first key, last key)).

    Of Q and K one stays while the other passes by: the one that the block reads first. What it reads of that at a stretch is one tile.
    @param touched [tensor, "read" or "write", first row, last row], as common/stage/table.hpp has it
    @param queries, keys rows of the head that is drawn; others are left out
    """
    stays, held, at_a_stretch, found = None, None, False, []
    for tensor, action, first, last in touched:
        if action != "read" or tensor not in ("Q", "K") or first >= (queries if tensor == "Q" else keys):
            continue
        stays = stays or tensor
        if tensor == stays:
            held = (min(held[0], first), max(held[1], last)) if at_a_stretch else (first, last)
        else:
            found.append((held, (first, last)) if stays == "Q" else ((first, last), held))
        at_a_stretch = tensor == stays
    return found


def panels_of(trace):
    """[(title, [(block index, its visits)])], a panel for each kernel that reads Q and K."""
    panels = {}
    for block in trace["blocks"]:
        tiles = visits(block["touched"], trace["seq"], trace["kv_seq"])
        if tiles:
            panels.setdefault(block["kernel"], []).append((tuple(block["block"]), tiles))
    if not panels:
        raise Unusable(f'{trace["variant"]} {trace["name"]}: no block read rows of Q and K of head 0')
    title = f'{trace["variant"]} {trace["name"]}'
    return [(title if len(panels) == 1 else f"{title}: {kernel}", blocks) for kernel, blocks in panels.items()]


def counted(number, thing):
    return f"{number} {thing}" + ("" if number == 1 else "s")


def draw_panel(s, x0, trace, title, blocks):
    """One panel with its upper left corner at (x0, TOP)."""
    y0, queries, keys = TOP, trace["seq"], trace["kv_seq"]
    across, down = SIDE / keys, SIDE / queries  # pixels a row
    s.text(x0 + SIDE / 2, 62, title, 15, bold=True)
    s.text(x0 + SIDE / 2, y0 - 22, f"keys 0 to {keys - 1}", 12, fill=SOFT)
    s.text(x0 - 68, y0 + SIDE / 2, f"queries 0 to {queries - 1}", 12, fill=SOFT, rotate=-90)
    s.rect(x0, y0, SIDE, SIDE, "#ffffff", LINE, 0)

    steps = []
    for n, (_, tiles) in enumerate(blocks):
        for step, ((i, i_last), (j, j_last)) in enumerate(tiles, 1):
            x, y, w, h = x0 + j * across, y0 + i * down, (j_last + 1 - j) * across, (i_last + 1 - i) * down
            s.rect(x, y, w, h, COLOURS[n % len(COLOURS)], LINE, 0)
            steps.append((str(step), x + w / 2, y + h / 2, min(14, int(h * 0.7), int(w / len(str(step)) * 1.4))))
    if trace["causal"]:  # query i sees keys up to i + keys - queries
        i, j = max(0, queries - keys), max(0, keys - queries)
        s.line(x0 + j * across, y0 + i * down, x0 + SIDE, y0 + SIDE, RED, 1.4, "4 3")
    for step, x, y, size in steps:
        if size >= 7:
            s.text(x, y + size * 0.36, step, size, bold=True)
    one_row_each = len({tiles[0][0] for _, tiles in blocks}) == len(blocks) and all(tiles[0][0] == tiles[-1][0] for _, tiles in blocks)
    if one_row_each and len(blocks) <= 16 and len({index[1:] for index, _ in blocks}) == 1:
        for index, (((first, last), _), *_) in blocks:
            s.text(x0 - 8, y0 + (first + last + 1) / 2 * down + 4, f"block {index[0]}", 11, "end", fill=SOFT)
    total = sum(len(tiles) for _, tiles in blocks)
    s.text(x0 + SIDE / 2, y0 + SIDE + 24, f"{counted(len(blocks), 'thread block')}, {counted(total, 'tile')} visited", 13)
    s.text(x0 + SIDE / 2, y0 + SIDE + 42, f"the longest block makes {counted(max(len(tiles) for _, tiles in blocks), 'step')}", 12, fill=SOFT)


def draw(traces):
    """An Svg with all traces side by side."""
    panels = [(trace, title, blocks) for trace in traces for title, blocks in panels_of(trace)]
    width = LEFT + len(panels) * SIDE + (len(panels) - 1) * GAP + 30
    names = ", ".join(title for _, title, _ in panels)
    s = Svg(width, TOP + SIDE + BOTTOM, f"Tiles visited by {names}",
            "The scores of one head, queries down and keys across: a colour for each thread block, numbers for the order of its tiles.")
    s.text(width / 2, 32, "One head. Colour: thread block; number: its step", 17 if len(panels) > 1 else 14, bold=True)
    for n, panel in enumerate(panels):
        draw_panel(s, LEFT + n * (SIDE + GAP), *panel)
    return s


def read(path):
    """The traces of a file. @raises Unusable"""
    traces = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            trace = json.loads(line)
            panels_of(trace)
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise Unusable(f"{path}, line {number}: no trace of a step program ({type(error).__name__}: {error})") from error
        traces.append(trace)
    if not traces:
        raise Unusable(f"{path}: empty; what --trace of a step program wrote is accepted")
    return traces


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="what --trace of step programs wrote")
    parser.add_argument("--output", required=True, metavar="FILE.svg")
    arguments = parser.parse_args()
    try:
        draw([trace for path in arguments.files for trace in read(path)]).save(Path(arguments.output).resolve())
    except (OSError, Unusable) as error:
        sys.exit(f"draw_trace: {error}")


if __name__ == "__main__":
    main()
