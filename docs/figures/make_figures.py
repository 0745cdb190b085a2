#!/usr/bin/env python3
"""Draws the SVG figures of the chapters beside this file. Standard library only.

Every number in a figure is computed here from the constants below, so that a figure cannot drift from its formula, or read from a
recorded measurement.
Usage: python3 docs/figures/make_figures.py
"""

import json
import math
from pathlib import Path
from xml.sax.saxutils import escape

KIB, MIB, GIB = 2**10, 2**20, 2**30

# H200 SXM, from NVIDIA's datasheet and the CUDA programming guide (compute capability 9.0); rates are dense. L2 as the driver reports it.
SMS, CLOCK, FP32_LANES = 132, 1.98e9, 128
HBM_BANDWIDTH, FP32_RATE, BF16_RATE = 4.8e12, 67e12, 989e12
L2_BYTES, SHARED_PER_BLOCK = 60 * MIB, 227 * KIB
SHARED_BANDWIDTH = 128 * SMS * CLOCK  # 128 bytes a clock and SM
REGISTER_BANDWIDTH = SMS * FP32_LANES * 3 * 4 * CLOCK  # three 4-byte operands a lane and clock: what one FMA reads

# Ceilings measured on one H200: a bf16 and an fp32 matrix product, a device-to-device copy.
MEASURED_BF16, MEASURED_FP32, MEASURED_COPY = 779e12, 51e12, 4.249e12

INK, SOFT, PALE, LINE = "#1f2933", "#52606d", "#f2f4f7", "#9aa5b1"
BLUE, BLUE_PALE, RED, RED_PALE, GREEN_PALE, SAND = "#1f5fa8", "#dbe8f6", "#a63a1e", "#f7dfd6", "#dcefe0", "#f5ecd2"


class Svg:
    """Collects shapes; coordinates are pixels, y grows downwards."""

    def __init__(self, width, height, title, description):
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            "<defs>"
            + "".join(
                f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
                f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
                for name, colour in (("ink", INK), ("blue", BLUE), ("red", RED))
            )
            + "</defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="14" fill="#ffffff" stroke="{LINE}"/>',
        ]

    def rect(self, x, y, w, h, fill="#ffffff", stroke=INK, rx=6, dash=None, width=1.2):
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{width}"{dashed}/>'
        )

    def text(self, x, y, words, size=14, anchor="middle", bold=False, fill=INK, italic=False, rotate=None):
        style = (' font-weight="700"' if bold else "") + (' font-style="italic"' if italic else "")
        turned = f' transform="rotate({rotate} {x:g} {y:g})"' if rotate is not None else ""
        words = words.replace("  ", "\u2003")  # SVG folds runs of spaces; an em space stays
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{style}{turned}>{escape(words)}</text>'
        )

    def line(self, x1, y1, x2, y2, stroke=INK, width=1.5, dash=None, head=None):
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        marker = f' marker-end="url(#{head})"' if head else ""
        self.parts.append(
            f'<line x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}" stroke="{stroke}" stroke-width="{width}"{dashed}{marker}/>'
        )

    def path(self, d, stroke=INK, width=1.5, fill="none", dash=None, head=None):
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        marker = f' marker-end="url(#{head})"' if head else ""
        self.parts.append(f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{width}"{dashed}{marker}/>')

    def dot(self, x, y, r=4.5, fill=INK):
        self.parts.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{r}" fill="{fill}"/>')

    def save(self, name):
        path = Path(__file__).resolve().parent / name
        path.write_text("\n".join(self.parts + ["</svg>", ""]), encoding="utf-8")


def terabytes(bandwidth):
    return f"{bandwidth / 1e12:.1f} TB/s" if bandwidth < 1e14 else f"{bandwidth / 1e12:.0f} TB/s"


def bytes_text(count):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


def memory_hierarchy():
    s = Svg(860, 520, "Memory hierarchy of an H200",
            "Registers, shared memory and L1, L2 and HBM with sizes, bandwidths and FLOPs per byte; link widths are to scale.")
    s.text(430, 32, "Memory hierarchy of one H200: where a byte can live, and what it costs", 17, bold=True)
    s.text(430, 53, "the grey links are as wide as their bandwidth (L2 excepted)", 13, fill=SOFT)

    s.rect(40, 70, 520, 264, PALE, LINE, 10, "6 4")
    s.text(52, 90, f"one SM (the chip has {SMS})", 13, "start", fill=SOFT, italic=True)
    levels = [
        (100, 44, 380, "FP32 units and tensor cores", "", "#ffffff"),
        (190, 48, 380, "Registers", "256 KiB an SM, 33 MiB in all", GREEN_PALE),
        (274, 48, 380, "Shared memory / L1", "256 KiB an SM, 33 MiB in all (227 KiB a block)", BLUE_PALE),
        (366, 48, 520, "L2 cache", "60 MiB, shared by all SMs", SAND),
        (452, 48, 520, "HBM3e", "141 GB", RED_PALE),
    ]
    for y, h, w, name, size, fill in levels:
        x = 300 - w / 2
        s.rect(x, y, w, h, fill)
        if size:
            s.text(300, y + 20, name, 14, bold=True)
            s.text(300, y + 38, size, 13)
        else:
            s.text(300, y + h / 2 + 5, name, 14, bold=True)

    # A bandwidth of 5 TB/s is one pixel wide.
    widest = REGISTER_BANDWIDTH / 5e12
    s.rect(300 - widest / 2, 144, widest, 46, "#7b8794", "none", 0)
    s.rect(300 - SHARED_BANDWIDTH / 5e12 / 2, 238, SHARED_BANDWIDTH / 5e12, 36, "#7b8794", "none", 0)
    s.line(300, 322, 300, 366, "#7b8794", 2, "4 3")
    s.line(300, 414, 300, 452, "#7b8794", HBM_BANDWIDTH / 5e12)

    def price(bandwidth):
        return f"{FP32_RATE / bandwidth:.2g} FP32", f"{BF16_RATE / bandwidth:.2g} bf16 tensor"

    s.text(702, 90, "bandwidth", 14, bold=True)
    s.text(702, 108, "FLOPs the chip can do per byte moved", 12, fill=SOFT)
    rows = [(172, terabytes(REGISTER_BANDWIDTH), REGISTER_BANDWIDTH, "3 operands a lane and clock"),
            (262, terabytes(SHARED_BANDWIDTH), SHARED_BANDWIDTH, "128 bytes a clock and SM")]
    for y, label, bandwidth, note in rows:
        s.text(702, y - 16, label, 16, bold=True)
        s.text(702, y + 2, note, 12, fill=SOFT)
        f, t = price(bandwidth)
        s.text(702, y + 20, f"{f}  ·  {t}", 13)
    s.text(702, 342, "not published", 16, bold=True)
    s.text(702, 360, "(A100: 5120 bytes a clock, 7.2 TB/s)", 12, fill=SOFT)
    s.text(702, 430, terabytes(HBM_BANDWIDTH), 16, bold=True)
    s.text(702, 448, f"a copy reaches {MEASURED_COPY / 1e12:.2f}", 12, fill=SOFT)
    f, t = f"{FP32_RATE / HBM_BANDWIDTH:.0f} FP32", f"{BF16_RATE / HBM_BANDWIDTH:.0f} bf16 tensor"
    s.text(702, 466, f"{f}  ·  {t}", 13)
    for y in (166, 256, 344, 433):
        s.line(324 if y != 166 else 350, y, 566, y, LINE, 1, "2 4")
    s.save("memory_hierarchy.svg")


def growth():
    d, element = 128, 2
    s = Svg(820, 470, "Growth of S against Q", "Log-log chart: bytes of S and of Q of one head, bf16, against sequence length.")
    s.text(410, 32, "Only the middle grows: one head, d = 128, 2-byte elements", 17, bold=True)
    left, right, top, bottom = 90, 690, 60, 400
    n_low, n_high, b_low, b_high = 7, 16, 14, 34  # powers of two

    def x(n):
        return left + (math.log2(n) - n_low) / (n_high - n_low) * (right - left)

    def y(b):
        return bottom - (math.log2(b) - b_low) / (b_high - b_low) * (bottom - top)

    s.rect(left, top, right - left, bottom - top, "#ffffff", LINE, 0)
    for p in range(n_low, n_high + 1):
        s.line(x(2**p), bottom, x(2**p), bottom + 5, LINE)
        s.text(x(2**p), bottom + 20, str(2**p), 12)
    for p in range(b_low, b_high + 1, 4):
        s.line(left, y(2**p), right, y(2**p), "#e4e7eb", 1)
        s.text(left - 8, y(2**p) + 4, bytes_text(2**p), 12, "end")
    s.text((left + right) / 2, bottom + 44, "sequence length N", 13)
    s.text(24, (top + bottom) / 2, "bytes", 13, rotate=-90)

    for limit, name, at, anchor in ((SHARED_PER_BLOCK, "shared memory of a block, 227 KiB", right - 8, "end"),
                                    (L2_BYTES, "L2 of an H200, 60 MiB", left + 8, "start")):
        s.line(left, y(limit), right, y(limit), SOFT, 1.3, "7 5")
        s.text(at, y(limit) + (16 if anchor == "end" else -6), name, 12, anchor, fill=SOFT)

    lengths = [2**p for p in range(n_low, n_high + 1)]
    q = [(x(n), y(n * d * element)) for n in lengths]
    scores = [(x(n), y(n * n * element)) for n in lengths]
    for points, colour, dash in ((q, BLUE, "9 4"), (scores, RED, None)):
        s.path("M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in points), colour, 2.6, dash=dash)
        for a, b in points:
            s.dot(a, b, 4, colour)
    s.text(right + 10, scores[-1][1] + 5, "S = N × N", 14, "start", bold=True, fill=RED)
    s.text(right + 10, q[-1][1] + 5, "Q = N × d", 14, "start", bold=True, fill=BLUE)

    for n in (4096, 16384):
        s.line(x(n), y(n * n * element) + 7, x(n), y(n * d * element) - 7, INK, 1.3, None, "ink")
        s.text(x(n) + 7, (y(n * n * element) + y(n * d * element)) / 2 + 14, f"{n // d} ×", 14, "start", bold=True)
    s.save("s_against_q.svg")


def three_round_trips():
    batch, heads, length, d, element = 2, 8, 4096, 64, 4
    rows = batch * heads * length
    small, big = rows * d * element, rows * length * element
    s = Svg(900, 440, "Three round trips of standard attention",
            "Tensors in HBM on top, three kernels on the chip below, with the bytes each arrow moves.")
    s.text(450, 30, "Standard attention: three kernels, and S and P cross the bus twice each", 17, bold=True)
    s.text(450, 50, f"B = {batch}, H = {heads}, N = {length}, d = {d}, float32", 13, fill=SOFT)

    s.rect(20, 64, 860, 118, RED_PALE, LINE, 10)
    s.text(34, 84, "HBM", 14, "start", bold=True)
    s.rect(20, 286, 860, 92, BLUE_PALE, LINE, 10)
    s.text(34, 306, "chip", 14, "start", bold=True)

    tensors = {  # name: (centre x, width, bytes)
        "Q": (92, 46, small), "K": (152, 46, small), "S": (300, 110, big), "P": (535, 110, big), "V": (670, 46, small), "O": (808, 46, small)}
    for name, (cx, w, size) in tensors.items():
        tall = 84 if size == big else 44
        s.rect(cx - w / 2, 172 - tall, w, tall, "#ffffff", INK, 4)
        s.text(cx, 172 - tall / 2 - 1, name, 17, bold=True)
        s.text(cx, 172 - tall / 2 + 15, bytes_text(size), 11, fill=SOFT)
    kernels = (("scores", "S = scale · Q Kᵀ", 172), ("softmax", "P = softmax(S)", 418), ("values", "O = P V", 690))
    for name, formula, cx in kernels:
        s.rect(cx - 90, 312, 180, 54, "#ffffff", INK, 6)
        s.text(cx, 333, name, 14, bold=True)
        s.text(cx, 353, formula, 14)

    def read(x1, x2, size, dx=6, anchor="start"):
        wide = 4 if size == big else 1.4
        s.line(x1, 174, x2, 309, BLUE, wide, "9 4", "blue")
        s.text((x1 + x2) / 2 + dx, 238, f"read {bytes_text(size)}", 12, anchor, fill=BLUE)

    def write(x1, x2, size, dx=6, anchor="start"):
        wide = 4 if size == big else 1.4
        s.line(x1, 311, x2, 176, RED, wide, None, "red")
        s.text((x1 + x2) / 2 + dx, 262, f"write {bytes_text(size)}", 12, anchor, fill=RED)

    read(92, 112, small, -8, "end")
    read(152, 150, small)
    write(236, 272, big)
    read(332, 372, big, 8)
    write(462, 506, big, 10)
    read(566, 630, big, 8)
    read(670, 690, small, 8)
    write(744, 800, small, 10)
    total = 4 * big + 4 * small
    s.text(450, 404, f"S and P: 4 × {bytes_text(big)} = {bytes_text(4 * big)}.   Q, K, V and O: 4 × {bytes_text(small)} = {bytes_text(4 * small)}.   "
           f"Total {bytes_text(total)}, {total / (4 * small):.0f} times what Q, K, V and O need.", 13)
    s.text(450, 425, "dashed: read;  solid: written;  thick: N × N elements", 12, fill=SOFT)
    s.save("three_round_trips.svg")


def online_softmax():
    blocks = [[1, 3], [2, 0], [5, 4], [1, 2]]
    values = [[1, 2], [3, 4], [5, 6], [7, 8]]
    s = Svg(900, 470, "Online softmax", "One row of scores in four blocks; the state m, l, O after each block and the factor that rescales it.")
    s.text(450, 30, "Online softmax: one row of S, streamed over the keys two at a time", 17, bold=True)
    s.text(450, 50, "the state is a maximum m, a sum l and an unnormalised output O; one scalar α brings all of the past to the new maximum", 13, fill=SOFT)

    m, total, out = -math.inf, 0.0, 0.0
    step, first, w = 196, 81, 150
    for b, (scores, vs) in enumerate(zip(blocks, values)):
        x = first + b * step
        s.rect(x, 74, w, 80, BLUE_PALE, LINE, 8)
        s.text(x + w / 2, 92, f"keys {2 * b + 1}, {2 * b + 2}", 12, fill=SOFT)
        s.text(x + w / 2, 115, f"s = {scores[0]}, {scores[1]}", 15, bold=True)
        s.text(x + w / 2, 140, f"v = {vs[0]}, {vs[1]}", 14)

        new = max(m, *scores)
        alpha = math.exp(m - new)
        grew = b > 0 and new > m
        p = [math.exp(score - new) for score in scores]
        total = alpha * total + sum(p)
        out = alpha * out + sum(a * v for a, v in zip(p, vs))
        m = new
        s.line(x + w / 2, 156, x + w / 2, 184, INK, 1.5, None, "ink")
        s.rect(x, 186, w, 62, RED_PALE if grew else "#ffffff", RED if grew else INK, 6, None, 2.4 if grew else 1.2)
        s.text(x + w / 2, 208, "first block" if b == 0 else "new maximum" if grew else "same maximum", 12, fill=SOFT)
        s.text(x + w / 2, 232, f"α = {alpha:.3f}" if 0 < alpha < 1 else f"α = {alpha:.0f}", 17, bold=True)
        s.line(x + w / 2, 250, x + w / 2, 280, INK, 1.5, None, "ink")
        s.rect(x, 282, w, 88, GREEN_PALE, INK, 8)
        s.text(x + w / 2, 304, f"m = {m}", 15)
        s.text(x + w / 2, 330, f"l = {total:.3f}", 15)
        s.text(x + w / 2, 356, f"O = {out:.3f}", 15)
        if b + 1 < len(blocks):
            s.path(f"M{x + w} 326 C{x + w + 30} 326 {x + step - 34} 217 {x + step - 3} 217", INK, 1.6, head="ink")
    flat_s, flat_v = sum(blocks, []), sum(values, [])
    weights = [math.exp(v - max(flat_s)) for v in flat_s]
    direct = sum(a * v for a, v in zip(weights, flat_v)) / sum(weights)
    assert math.isclose(direct, out / total, rel_tol=1e-12)
    s.text(450, 404, "each step:   m′ = max(m, max s)     α = exp(m − m′)     p = exp(s − m′)     l ← α l + Σ p     O ← α O + Σ p v", 14)
    s.text(450, 432, f"at the end, one division:  O / l = {out:.3f} / {total:.3f} = {out / total:.3f}", 15, bold=True)
    s.text(450, 454, "softmax over the whole row at once gives the same number", 13, fill=SOFT)
    s.save("online_softmax.svg")


def flash1_loops():
    s = Svg(900, 560, "FlashAttention-1 loops",
            "K and V blocks in the outer loop, Q blocks in the inner loop; O, l, m are rewritten in every pass; shared memory in four quarters.")
    s.text(450, 30, "FlashAttention-1: K and V outside, Q inside", 17, bold=True)
    s.text(450, 50, "pass j keeps one block of K and V on the chip and walks down all of Q", 13, fill=SOFT)

    cols, rows, cell_w, cell_h, x0, y0 = 4, 5, 88, 46, 150, 130
    for j in range(cols):
        x = x0 + j * cell_w
        now = j == 1
        s.rect(x + 4, y0 - 48, cell_w - 8, 36, BLUE_PALE if now else "#ffffff", BLUE if now else LINE, 4, None, 2.4 if now else 1.2)
        s.text(x + cell_w / 2, y0 - 25, "K, V (j)" if now else f"K, V {('(1)', '', '(3)', '(Tc)')[j]}", 13, bold=now)
    for i in range(rows):
        y = y0 + i * cell_h
        now = i == 2
        s.rect(x0 - 94, y + 4, 80, cell_h - 8, SAND if now else "#ffffff", INK if now else LINE, 4, None, 2.0 if now else 1.2)
        s.text(x0 - 54, y + cell_h / 2 + 5, ("Q (1)", "Q (2)", "Q (i)", "…", "Q (Tr)")[i], 13, bold=now)
        for j in range(cols):
            done = j < 1 or (j == 1 and i < 2)
            here = j == 1 and i == 2
            s.rect(x0 + j * cell_w, y, cell_w, cell_h, RED_PALE if here else "#e4e7eb" if done else "#ffffff", LINE, 0, "3 3")
            if here:
                s.text(x0 + (j + 0.5) * cell_w, y + cell_h / 2 + 5, "S (i, j)", 13, bold=True)
        x = x0 + cols * cell_w + 46
        s.rect(x, y + 4, 108, cell_h - 8, SAND if now else "#ffffff", INK if now else LINE, 4, None, 2.0 if now else 1.2)
        s.text(x + 54, y + cell_h / 2 + 5, ("O, l, m (1)", "O, l, m (2)", "O, l, m (i)", "…", "O, l, m (Tr)")[i], 13, bold=now)
    xs = x0 + 1.5 * cell_w
    s.line(xs - 32, y0 + 8, xs - 32, y0 + rows * cell_h - 8, BLUE, 2.4, None, "blue")
    s.text(xs + 8, y0 + rows * cell_h - 20, "inner: i", 12, fill=BLUE)
    s.line(x0 + 6, y0 + rows * cell_h + 16, x0 + cols * cell_w - 6, y0 + rows * cell_h + 16, BLUE, 2.4, None, "blue")
    s.text(x0 + cols * cell_w / 2, y0 + rows * cell_h + 36, "outer: j = 1 … Tc passes", 13, fill=BLUE)
    yi, xo = y0 + 2.5 * cell_h, x0 + cols * cell_w + 44
    s.line(xo, yi - 7, x0 + 2 * cell_w + 4, yi - 7, BLUE, 1.6, "7 4", "blue")
    s.line(x0 + 2 * cell_w + 4, yi + 8, xo - 1, yi + 8, RED, 2.2, None, "red")
    s.text(xo - 62, yi - 13, "read", 12, fill=BLUE)
    s.text(xo - 62, yi + 22, "write", 12, fill=RED)
    s.text(x0 + cols * cell_w + 100, y0 - 28, "in HBM", 13, fill=SOFT)
    s.text(x0 - 54, y0 - 28, "in HBM", 13, fill=SOFT)

    tx = 694
    s.text(tx, 140, "per pass", 14, "start", bold=True)
    for k, words in enumerate(("Q read: N d", "O read and written: 2 N d", "l, m read and written: 4 N")):
        s.text(tx, 164 + 22 * k, words, 13, "start")
    s.text(tx, 246, "in all", 14, "start", bold=True)
    for k, words in enumerate(("K, V read once: 2 N d", "Tc = N / Bc = 4 N d / M", "total ≈ 2 N d +", "Tc (3 N d + 4 N)")):
        s.text(tx, 270 + 22 * k, words, 13, "start")
    s.text(tx, 360, "S never leaves the chip", 13, "start", italic=True, fill=SOFT)

    y = 446
    s.text(60, y - 14, "shared memory, M elements, in quarters", 14, "start", bold=True)
    quarters = (("K (j)", "Bc × d = M / 4", BLUE_PALE), ("V (j)", "Bc × d = M / 4", BLUE_PALE),
                ("Q (i)", "Br × d ≤ M / 4", SAND), ("S (i, j)", "Br × Bc ≤ M / 4", RED_PALE))
    for k, (name, shape, fill) in enumerate(quarters):
        s.rect(60 + 195 * k, y, 195, 54, fill, INK, 0)
        s.text(60 + 195 * (k + 0.5), y + 23, name, 15, bold=True)
        s.text(60 + 195 * (k + 0.5), y + 43, shape, 13)
    s.text(450, y + 80, "Bc = M / 4d makes K and V a quarter each; Br = min(Bc, d) keeps Q and S within the other two", 14)
    s.text(450, y + 100, "(O, l and m of the block travel through registers)", 13, fill=SOFT)
    s.save("flash1_loops.svg")


def roofline():
    s = Svg(860, 500, "Roofline of an H200 with standard attention on it",
            "Measured ceilings; whole-algorithm intensities of standard attention and of its softmax kernel.")
    s.text(430, 30, "Roofline of one H200 from measured ceilings", 17, bold=True)
    s.text(430, 50, "where standard attention (three kernels, N = 4096) falls", 13, fill=SOFT)
    left, right, top, bottom = 84, 826, 74, 420
    i_low, i_high, p_low, p_high = -1, 12, -0.5, 10.2  # powers of two: FLOP per byte, TFLOPS

    def x(i):
        return left + (math.log2(i) - i_low) / (i_high - i_low) * (right - left)

    def y(t):
        return bottom - (math.log2(t) - p_low) / (p_high - p_low) * (bottom - top)

    s.rect(left, top, right - left, bottom - top, "#ffffff", LINE, 0)
    for p in range(i_low, i_high + 1):
        s.line(x(2.0**p), bottom, x(2.0**p), bottom + 5, LINE)
        s.text(x(2.0**p), bottom + 20, "½" if p == -1 else str(2**p), 12)
    for p in range(0, 11, 2):
        s.line(left, y(2**p), right, y(2**p), "#e4e7eb", 1)
        s.text(left - 8, y(2**p) + 4, str(2**p), 12, "end")
    s.text((left + right) / 2, bottom + 44, "arithmetic intensity, FLOPs per byte of HBM traffic", 13)
    s.text(30, (top + bottom) / 2, "TFLOPS", 13, rotate=-90)

    bandwidth = MEASURED_COPY / 1e12
    roofs = ((MEASURED_BF16 / 1e12, f"bf16 tensor cores, {MEASURED_BF16 / 1e12:.0f} TFLOPS", RED),
             (MEASURED_FP32 / 1e12, f"FP32 units, {MEASURED_FP32 / 1e12:.0f} TFLOPS", BLUE))
    ridge = roofs[0][0] / bandwidth
    s.line(x(0.5), y(0.5 * bandwidth), x(ridge), y(roofs[0][0]), INK, 2.6)
    for rate, name, colour in roofs:
        s.line(x(rate / bandwidth), y(rate), right, y(rate), colour, 2.6)
        s.text(right - 8, y(rate) - 8, name, 13, "end", bold=True, fill=colour)
        s.line(x(rate / bandwidth), y(rate), x(rate / bandwidth), bottom, colour, 1, "3 4")
        s.text(x(rate / bandwidth) + 5, bottom - 8, f"{rate / bandwidth:.0f}", 13, "start", fill=colour)
    s.text(x(2.6), y(2.6 * bandwidth) - 14, f"HBM, {MEASURED_COPY / 1e9:.0f} GB/s", 13, "end", bold=True)

    length = 4096

    def intensity(d, element):
        return d / element / (1 + d / length)

    for d in (64, 128):
        i = intensity(d, 2)
        t = min(roofs[0][0], i * bandwidth)
        s.dot(x(i), y(t), 6, RED)
        s.text(x(i) - 10, y(t) - 8, f"bf16, d = {d}", 13, "end", fill=RED)
        i = intensity(d, 4)
        t = min(roofs[1][0], i * bandwidth)
        s.rect(x(i) - 5, y(t) - 5, 10, 10, BLUE, BLUE, 0)
        s.text(x(i) - (14 if d == 64 else -12), y(t) + 22, f"fp32, d = {d}" if d == 64 else f"d = {d}", 13, "start", fill=BLUE)
    i = 5 / (2 * 2)
    s.dot(x(i), y(i * bandwidth), 5, INK)
    s.text(x(i) + 10, y(i * bandwidth) + 16, "softmax kernel, bf16", 13, "start")
    fused = length / 2 * 1.0  # 4 N^2 d FLOPs over 4 N d elements of 2 bytes
    s.line(x(fused), y(roofs[0][0]) + 46, x(fused), y(roofs[0][0]) + 6, RED, 1.6, None, "red")
    s.text(x(fused) + 24, y(roofs[0][0]) + 64, "bf16 without S and P in HBM", 13, "end", fill=RED)
    s.text(430, 484, "left of its dashed ridge a kernel waits for bytes; right of it, for arithmetic", 13, fill=SOFT)
    s.save("roofline.svg")


def finish_times(lengths, sms):
    """Greedy schedule: each block, in the given order, on the SM that is free first. Returns (SM, start, length) a block."""
    free, placed = [0] * sms, []
    for length in lengths:
        sm = free.index(min(free))
        placed.append((sm, free[sm], length))
        free[sm] += length
    return placed


def flash2_loops():
    side, cell_w, cell_h, y0 = 4, 62, 42, 134
    s = Svg(940, 500, "Loops of stage 03 and of stage 04",
            "The N by N grid of one head: stage 03 walks it in columns with one thread block, 04a has a thread block for each row of tiles.")
    s.text(470, 30, "One head, N × N scores in tiles: whose they are, and in which order", 17, bold=True)
    panels = ((112, "stage 03: one thread block, column after column", "O, l, m"), (582, "04a: a thread block for each row of tiles", "O, LSE"))
    for x0, title, kept in panels:
        swapped = x0 > 300
        s.text(x0 + side * cell_w / 2, 66, title, 15, bold=True)
        for j in range(side):
            s.text(x0 + (j + 0.5) * cell_w, y0 - 26, f"K, V ({j + 1})", 13)
        for i in range(side):
            y = y0 + i * cell_h
            s.text(x0 - 12, y + cell_h / 2 + (-2 if swapped else 5), f"Q ({i + 1})", 13, "end")
            if swapped:
                s.text(x0 - 12, y + cell_h / 2 + 14, f"block {i}", 12, "end", fill=SOFT)
            for j in range(side):
                fill = (BLUE_PALE, "#ffffff")[(i if swapped else j) % 2]
                s.rect(x0 + j * cell_w, y, cell_w, cell_h, fill, LINE, 0)
                s.text(x0 + (j + 0.5) * cell_w, y + cell_h / 2 + 5, str((j if swapped else j * side + i) + 1), 14, bold=True)
            s.rect(x0 + side * cell_w + 26, y + 5, 66, cell_h - 10, SAND, INK, 4)
            s.text(x0 + side * cell_w + 59, y + cell_h / 2 + 5, kept, 13)
            if swapped:
                s.line(x0 + 6, y + cell_h - 7, x0 + side * cell_w - 8, y + cell_h - 7, BLUE, 1.8, None, "blue")
                s.line(x0 + side * cell_w + 2, y + cell_h / 2, x0 + side * cell_w + 24, y + cell_h / 2, RED, 2, None, "red")
        if not swapped:
            for j in range(side):
                x = x0 + (j + 1) * cell_w - 10
                s.line(x, y0 + 6, x, y0 + side * cell_h - 6, BLUE, 1.8, None, "blue")
            for i in range(side):
                y = y0 + (i + 0.5) * cell_h
                s.line(x0 + side * cell_w + 24, y - 6, x0 + side * cell_w + 2, y - 6, BLUE, 1.6, "5 3", "blue")
                s.line(x0 + side * cell_w + 2, y + 6, x0 + side * cell_w + 24, y + 6, RED, 2, None, "red")
        s.text(x0 + side * cell_w + 59, y0 - 26, "in HBM", 13, fill=SOFT)
        s.text(x0 + side * cell_w / 2 + 20, y0 + side * cell_h + 24,
               "O, l, m stay in registers; one write at the end" if swapped else
               "between columns O, l, m are written (solid) and read (dashed)", 13)

        step, lane, top = 18, 24, 360
        blocks = [side] * side if swapped else [side * side]
        for sm in range(side):
            s.text(x0 - 12, top + sm * lane + 15, f"SM {sm}", 13, "end")
            s.line(x0, top + sm * lane + lane - 1, x0 + side * side * step, top + sm * lane + lane - 1, "#e4e7eb", 1)
        for block, (sm, start, length) in enumerate(finish_times(blocks, side)):
            for n in range(length):
                s.rect(x0 + (start + n) * step, top + sm * lane + 2, step, lane - 5, (BLUE_PALE, "#ffffff")[(block if swapped else n // side) % 2],
                       LINE, 0)
                s.text(x0 + (start + n + 0.5) * step, top + sm * lane + 15, str(n + 1), 10)
        if not swapped:
            s.text(x0 + side * side * step / 2, top + 2.5 * lane + 6, "idle, unless there are other heads", 13, italic=True, fill=SOFT)
        s.line(x0, top + side * lane + 10, x0 + side * side * step, top + side * lane + 10, INK, 1.3, None, "ink")
        s.text(x0 + side * side * step / 2, top + side * lane + 28, "time, in tiles", 12, fill=SOFT)
    s.line(470, 56, 470, 484, LINE, 1, "4 4")
    s.save("flash2_loops.svg")


def causal_tiles():
    side, cell, x0, y0 = 8, 36, 126, 108
    sms, step, lane, tx = 4, 25, 25, 590
    visited = side * (side + 1) // 2
    s = Svg(940, 470, "Causal tiles and their schedule",
            "Tiles of one head under a causal mask: visited, masked or not visited, and the blocks on four SMs, longest or shortest first.")
    s.text(470, 30, f"04b, causal, {side} blocks of rows: {visited} of {side * side} tiles are visited, {side} of them masked", 17, bold=True)
    s.text(x0 + side * cell / 2, 66, "blocks of keys; the number is the step of the thread block", 13)
    s.text(tx + 6 * step, 66, f"blocks start in order, one at a time on each of {sms} SMs", 13)
    for j in range(side):
        s.text(x0 + (j + 0.5) * cell, y0 - 10, str(j), 12, fill=SOFT)
    for i in range(side):
        y = y0 + i * cell
        s.text(x0 - 10, y + cell / 2 - 1, f"rows {i}", 13, "end")
        s.text(x0 - 10, y + cell / 2 + 13, f"block {side - 1 - i}", 11, "end", fill=SOFT)
        for j in range(side):
            x = x0 + j * cell
            s.rect(x, y, cell, cell, BLUE_PALE if j <= i else "#ffffff", LINE, 0)
            if j < i:
                s.text(x + cell / 2, y + cell / 2 + 5, str(j + 1), 13, bold=True)
            elif j == i:
                s.path(f"M{x} {y} h{cell} v{cell} z", INK, 1, SOFT)
                s.text(x + 11, y + cell - 6, str(j + 1), 13, bold=True)
            else:
                s.dot(x + cell / 2, y + cell / 2, 1.6, SOFT)
    y = y0 + side * cell + 22
    legend = ((96, "no mask"), (196, "diagonal: computed whole,"), (410, "not visited"))
    s.rect(legend[0][0], y, 16, 16, BLUE_PALE, LINE, 0)
    s.rect(legend[1][0], y, 16, 16, BLUE_PALE, LINE, 0)
    s.path(f"M{legend[1][0]} {y} h16 v16 z", INK, 1, SOFT)
    s.rect(legend[2][0], y, 16, 16, "#ffffff", LINE, 0)
    s.dot(legend[2][0] + 8, y + 8, 1.6, SOFT)
    for x, words in legend:
        s.text(x + 22, y + 13, words, 12, "start")
    s.text(legend[1][0] + 22, y + 28, "dark half set to −∞", 12, "start")

    lengths = list(range(1, side + 1))
    ideal = visited / sms
    for top, title, order in ((112, "longest first: the kernel's order", lengths[::-1]), (296, "shortest first", lengths)):
        placed = finish_times(order, sms)
        end = max(start + length for _, start, length in placed)
        s.text(tx - 44, top - 14, title, 15, "start", bold=True)
        for sm in range(sms):
            s.text(tx - 10, top + sm * lane + 17, f"SM {sm}", 13, "end")
        for sm, start, length in placed:
            s.rect(tx + start * step, top + sm * lane + 2, length * step, lane - 4, SAND if length > side / 2 else "#ffffff", INK, 3)
            s.text(tx + (start + length / 2) * step, top + sm * lane + 17, f"rows {length - 1}" if length > 1 else "0", 12)
        s.line(tx + ideal * step, top - 4, tx + ideal * step, top + sms * lane + 6, RED, 1.4, "5 3")
        s.line(tx, top + sms * lane + 10, tx + 12.6 * step, top + sms * lane + 10, INK, 1.3, None, "ink")
        s.text(tx, top + sms * lane + 30, f"done after {end} steps", 13, "start", bold=True)
        s.text(tx + 12.6 * step, top + sms * lane + 30, f"dashed: {visited} / {sms} = {ideal:g}", 12, "end", fill=RED)
    s.save("causal_tiles.svg")


SHOWN_LANE = 5
FRAGMENT_W, FRAGMENT_H = 34, 17


def fragment(s, x0, y0, columns, fills, vertical=False, rows=None, names=None):
    """Boxes of a fragment: the lane that holds each pair of elements. A pair is two columns, or (vertical, operand B) two rows."""
    for i in range(8 if vertical else 16):
        for j in range(columns):
            g, t = (j, i % 4) if vertical else (i % 8, j % 4)
            lane = 4 * g + t
            h = FRAGMENT_H * (2 if vertical else 1)
            half = (i >= 4, False) if vertical else (i >= 8, j >= 4)
            shown = lane == SHOWN_LANE
            x, y = x0 + j * FRAGMENT_W, y0 + i * h
            s.rect(x, y, FRAGMENT_W, h, INK if shown else fills[2 * half[1] + half[0]], LINE, 0, None, 0.8)
            s.text(x + FRAGMENT_W / 2, y + h / 2 + 4, str(lane), 11, bold=shown, fill="#ffffff" if shown else INK)
        if rows is not False:
            label = f"{2 * i}-{2 * i + 1}" if vertical else str(i)
            s.text(x0 - 5, y0 + (i + 0.5) * (2 if vertical else 1) * FRAGMENT_H + 4, label, 10, "end", fill=SOFT)
    for j in range(columns):
        name = names[j] if names else str(j) if vertical else f"{2 * j}-{2 * j + 1}"
        s.text(x0 + (j + 0.5) * FRAGMENT_W, y0 - 5, name, 10, fill=SOFT)
    for bx in range(0, columns, columns if vertical else 4):
        for by in (0, 8):
            s.rect(x0 + bx * FRAGMENT_W, y0 + by * FRAGMENT_H, (columns if vertical else 4) * FRAGMENT_W, 8 * FRAGMENT_H, "none", INK, 0, None, 2)


def mma_fragments():
    s = Svg(984, 484, "Fragments of mma.m16n8k16",
            "Which lane holds which elements of A, B and D. A box is one pair of elements, the number in it the lane; lane 5 is dark.")
    s.text(492, 30, "mma.m16n8k16: D (16 × 8) += A (16 × 16) · B (16 × 8), in the registers of one warp", 17, bold=True)
    s.text(492, 51, f"a box is two neighbouring elements, the number in it the lane that holds them; lane = 4g + t; dark: lane {SHOWN_LANE} "
           f"(g = {SHOWN_LANE // 4}, t = {SHOWN_LANE % 4})", 13, fill=SOFT)
    y0, ax, bx, dx, half = 120, 52, 408, 752, 4 * FRAGMENT_W
    bottom = y0 + 16 * FRAGMENT_H
    fragment(s, ax, y0, 8, (BLUE_PALE, SAND, GREEN_PALE, RED_PALE))
    fragment(s, bx, y0, 8, (BLUE_PALE, SAND), vertical=True)
    fragment(s, dx, y0, 4, (BLUE_PALE, SAND))
    for x, w, name in ((ax, 8, "A: 16 × 16, 16 bits"), (bx, 8, "B: 16 × 8, 16 bits"), (dx, 4, "D: 16 × 8, float32")):
        s.text(x + w * FRAGMENT_W / 2, bottom + 46, name, 14, bold=True)
    for k, x in enumerate((ax, ax + half)):
        s.text(x + half / 2, y0 - 22, f"a[{2 * k}]", 13, bold=True)
        s.text(x + half / 2, bottom + 20, f"a[{2 * k + 1}]", 13, bold=True)
    for x, names in ((bx + 8 * FRAGMENT_W + 8, ("b0", "b1")), (dx + half + 8, ("d[0], d[1]", "d[2], d[3]"))):
        s.text(x, y0 + 4 * FRAGMENT_H + 5, names[0], 13, "start", bold=True)
        s.text(x, y0 + 12 * FRAGMENT_H + 5, names[1], 13, "start", bold=True)
    s.text(bx - 52, y0 + 8 * FRAGMENT_H + 6, "·", 26, bold=True)
    s.text(dx - 40, y0 + 8 * FRAGMENT_H + 6, "→", 22, bold=True)
    s.text(492, bottom + 68, "a row of D lies in four lanes;  D has the pattern of one half of A", 13)
    s.save("mma_fragments.svg")


def s_to_p():
    s = Svg(960, 466, "Accumulators of S as an operand of P V",
            "Two neighbouring accumulators of S hold, lane for lane, what the A operand of the next product holds.")
    s.text(480, 30, "Two accumulators of S, side by side, are the A operand of P · V", 17, bold=True)
    s.text(480, 51, f"each lane needs only what it has: it rounds its own pairs to 16 bits; dark: lane {SHOWN_LANE}", 13, fill=SOFT)
    y0, half = 126, 4 * FRAGMENT_W
    left, right = 82, 598
    bottom = y0 + 16 * FRAGMENT_H
    keys = [f"{2 * j}-{2 * j + 1}" for j in range(8)]
    fragment(s, left, y0, 4, (BLUE_PALE, SAND), names=keys[:4])
    fragment(s, left + half + 12, y0, 4, (GREEN_PALE, RED_PALE), rows=False, names=keys[4:])
    fragment(s, right, y0, 8, (BLUE_PALE, SAND, GREEN_PALE, RED_PALE), names=keys)
    for x, name in ((left, "s[n]"), (left + half + 12, "s[n + 1]")):
        s.text(x + half / 2, y0 - 22, f"{name}[0], [1]", 13, bold=True)
        s.text(x + half / 2, bottom + 20, f"{name}[2], [3]", 13, bold=True)
    for k in range(2):
        s.text(right + (k + 0.5) * half, y0 - 22, f"p[{2 * k}]", 13, bold=True)
        s.text(right + (k + 0.5) * half, bottom + 20, f"p[{2 * k + 1}]", 13, bold=True)
    s.text(left + half + 6, bottom + 44, "S, float32: 16 rows, keys 8n … 8n + 15", 14, bold=True)
    s.text(right + half, bottom + 44, "P, f16 or bf16: A operand, 16 × 16", 14, bold=True)
    s.line(394, y0 + 8 * FRAGMENT_H, 560, y0 + 8 * FRAGMENT_H, INK, 2.2, None, "ink")
    s.text(476, y0 + 8 * FRAGMENT_H - 12, "exp, then pack", 13)
    s.text(476, y0 + 8 * FRAGMENT_H + 20, "no lane changes", 13)
    s.save("s_to_p.svg")


def swizzle():
    wanted, w, h, y0 = 2, 44, 27, 118
    s = Svg(940, 498, "Swizzle of a tile in shared memory",
            "Eight rows of eight chunks over the eight bank groups, plain and swizzled; reading one chunk of each row takes eight passes or one.")
    s.text(470, 30, "ldmatrix reads one chunk of 16 bytes from each of eight rows", 17, bold=True)
    s.text(470, 51, f"d = 64: a row is eight chunks; the number is c, the place of the chunk in its row of the matrix; dark: c = {wanted}", 13, fill=SOFT)
    for x0, title, place in ((82, "plain: chunk c at place c", lambda r, c: c), (552, "swizzled: chunk c of row r at place c XOR r", lambda r, c: c ^ r)):
        s.text(x0 + 4 * w, 82, title, 15, bold=True)
        hits = [0] * 8
        for r in range(8):
            s.text(x0 - 8, y0 + (r + 0.5) * h + 5, f"row {r}", 12, "end")
            for c in range(8):
                at = place(r, c)
                hits[at] += c == wanted
                s.rect(x0 + at * w, y0 + r * h, w, h, INK if c == wanted else (BLUE_PALE, "#ffffff")[c % 2], LINE, 0, None, 1)
                s.text(x0 + (at + 0.5) * w, y0 + (r + 0.5) * h + 5, str(c), 13, bold=c == wanted, fill="#ffffff" if c == wanted else INK)
        for group in range(8):
            s.text(x0 + (group + 0.5) * w, y0 - 8, f"{4 * group}-{4 * group + 3}", 11, fill=SOFT)
        s.text(x0 - 8, y0 - 8, "banks", 11, "end", fill=SOFT)
        base = y0 + 8 * h + 98
        s.line(x0, base, x0 + 8 * w, base, INK, 1.3)
        for group in range(8):
            for n in range(hits[group]):
                s.rect(x0 + group * w + 8, base - 10 * (n + 1), w - 16, 9, INK, INK, 0)
            s.text(x0 + (group + 0.5) * w, base + 16, str(hits[group]), 13, bold=hits[group] > 0)
        passes = max(hits)
        s.text(x0 - 8, base + 16, "reads", 12, "end")
        s.text(x0 + 4 * w, base + 42, f"{passes} passes: the same four banks each time" if passes > 1 else "1 pass: all 32 banks at once", 14, bold=True)
    s.save("swizzle.svg")


def backward_tiles():
    s = Svg(900, 560, "The backward pass that computes P again",
            "A thread block keeps a block of K and V, with dK and dV in registers, while blocks of queries pass by.")
    s.text(450, 32, "Stage 05b: one block of keys stays, all queries that see it pass by", 17, bold=True)
    s.text(450, 54, "what has the size of one tile is made, used and dropped; nothing of size N × N is stored", 13, fill=SOFT)

    # What streams in, for each block of queries.
    s.text(110, 100, "from HBM or L2,", 13, fill=SOFT)
    s.text(110, 117, "for each block i", 13, fill=SOFT)
    rows = (("Q (i)", "Br × d", SAND), ("dO (i)", "Br × d", SAND), ("LSE (i)", "Br", GREEN_PALE), ("D (i)", "Br", GREEN_PALE))
    for k, (name, shape, fill) in enumerate(rows):
        y = 136 + 62 * k
        s.rect(50, y, 120, 48, fill)
        s.text(110, y + 22, name, 15, bold=True)
        s.text(110, y + 40, shape, 12, fill=SOFT)
        s.line(170, y + 24, 246, y + 24, INK, 1.6, None, "ink")

    # The chip.
    s.rect(250, 84, 400, 372, PALE, LINE, 12)
    s.text(450, 108, "one thread block: block j of the keys", 14, bold=True)
    s.rect(270, 124, 170, 56, BLUE_PALE)
    s.text(355, 148, "K (j), V (j)", 15, bold=True)
    s.text(355, 168, "loaded once, Bc × d each", 12, fill=SOFT)
    steps = ("S = Q (i) K (j)ᵀ", "P = exp(scale · S − LSE (i))", "dP = dO (i) V (j)ᵀ", "dS = P ∘ (dP − D (i))")
    for k, words in enumerate(steps):
        y = 196 + 44 * k
        s.rect(270, y, 250, 36, RED_PALE if k % 2 else "#ffffff")
        s.text(395, y + 23, words, 14)
        if k < 3:
            s.line(395, y + 36, 395, y + 43, INK, 1.2)
    s.text(532, 219, "1st product", 12, "start", fill=SOFT)
    s.text(532, 263, "P again", 12, "start", fill=SOFT)
    s.text(532, 307, "2nd", 12, "start", fill=SOFT)
    s.rect(270, 384, 360, 56, BLUE_PALE)
    s.text(450, 407, "dV (j) += Pᵀ dO (i)   dK (j) += dSᵀ Q (i)", 13, bold=True)
    s.text(450, 428, "3rd and 4th; stay in registers to the end", 12, fill=SOFT)

    # What goes out.
    s.line(520, 346, 690, 346, RED, 1.8, None, "red")
    s.rect(694, 318, 160, 56, RED_PALE, RED)
    s.text(774, 341, "dQ (i) += dS K (j)", 14, bold=True)
    s.text(774, 361, "5th: float32 atomics", 12, fill=SOFT)
    s.line(630, 412, 690, 412, BLUE, 1.8, None, "blue")
    s.rect(694, 388, 160, 48, BLUE_PALE, BLUE)
    s.text(774, 410, "dK (j), dV (j)", 14, bold=True)
    s.text(774, 428, "written once", 12, fill=SOFT)

    # Before and after.
    s.text(774, 150, "before", 13, bold=True)
    s.text(774, 170, "D = rowsum(dO ∘ O)", 13)
    s.text(774, 188, "dQ_acc = 0", 13)
    s.text(774, 222, "after", 13, bold=True)
    s.text(774, 242, "dQ = scale · dQ_acc", 13)

    length, d, element = 4096, 128, 2
    square, row = length * length * element, length * d * element
    standard = 7 * square + 10 * row + 2 * 4 * length
    again = 9 * row + 3 * 4 * length + 4 * 4 * length * d
    s.text(450, 492, f"one head, N = {length}, d = {d}, 2 bytes an element", 14, bold=True)
    s.text(450, 514, f"held from forward to backward: P, {square / MIB:.0f} MiB, against LSE, {4 * length / KIB:.0f} KiB", 14)
    s.text(450, 536, f"through HBM in the backward pass: {standard / MIB:.0f} MiB against {again / MIB:.0f} MiB; "
                     "products: 4 against 5", 14)
    s.save("backward_tiles.svg")


def backward_turn():
    warps, split, keys, queries, d = 8, 2, 128, 64, 128  # 05c at d = 128
    keys_warp, queries_warp, columns_warp = keys // (warps // split), queries // split, d // split
    columns_dq = d * queries // 32 // warps
    across = d // columns_dq
    fills = {0: BLUE_PALE, 1: RED_PALE}
    s = Svg(960, 814, "A turn of 05c",
            "Which warp holds which part of the scores, of dK and dV and of dQ, and what warps 0 and 1 exchange through shared memory.")
    s.text(480, 32, f"One turn of 05c at d = {d}: {queries} queries pass by {keys} keys, {warps} warps", 17, bold=True)
    s.text(480, 53, f"the number is the warp; warps 0 and 1 share {keys_warp} keys", 13, fill=SOFT)

    # Who holds what: one pixel a key, query or column.
    def grid(x0, y0, rows, columns, h, w, warp_at, title, names, note):
        wide = columns * w
        s.text(x0 + wide / 2, y0 - 30, title, 15, bold=True)
        s.text(x0 + wide / 2, y0 - 10, names[1], 12, fill=SOFT)
        s.text(x0 - 10, y0 + rows * h / 2, names[0], 12, rotate=-90, fill=SOFT)
        for r in range(rows):
            for c in range(columns):
                warp = warp_at(r, c)
                s.rect(x0 + c * w, y0 + r * h, w, h, fills.get(warp, "#ffffff"), INK, 0)
                s.text(x0 + (c + 0.5) * w, y0 + (r + 0.5) * h + 5, str(warp), 14, bold=warp < 2)
        for k, words in enumerate(note):
            s.text(x0 + wide / 2, y0 + rows * h + 20 + 17 * k, words, 12)

    grid(136, 120, keys // keys_warp, split, keys_warp, 1.6 * queries_warp, lambda r, c: split * r + c,
         "Sᵀ, dPᵀ, Pᵀ, dSᵀ", (f"{keys} keys", f"{queries} queries"), ("in registers; Pᵀ and dSᵀ", "also in shared memory"))
    grid(416, 120, keys // keys_warp, split, keys_warp, columns_warp, lambda r, c: split * r + c,
         "dK and dV", (f"{keys} keys", f"{d} columns"), ("in registers,", "from the first turn to the last"))
    grid(716, 152, queries // 32, across, 32, columns_dq, lambda r, c: across * r + c,
         "dQ", (f"{queries} queries", f"{d} columns"), ("made and added", "to dQ_acc at once"))

    # What the pair does, top to bottom; shared memory in the middle.
    left, middle, right, w = 34, 372, 654, 272
    def barrier(y, words):
        s.rect(left, y, right + w - left, 26, INK, INK, 4)
        s.text(480, y + 18, words, 13, bold=True, fill="#ffffff")

    top = 330
    s.text(left + w / 2, top, "warp 0", 15, bold=True)
    s.text(480, top, "shared memory", 15, bold=True)
    s.text(right + w / 2, top, "warp 1", 15, bold=True)
    barrier(top + 12, "barrier: Q, dO, LSE and D of this turn are there; the turn before is over. The next copies start.")

    y = top + 52
    s.rect(middle, y, 216, 48, SAND)
    s.text(480, y + 20, "K, V;  Q, dO of the turn", 14, bold=True)
    s.text(480, y + 38, "and LSE, D", 12, fill=SOFT)
    for x, warp in ((left, 0), (right, 1)):
        own = f"queries {warp * queries_warp} to {(warp + 1) * queries_warp - 1}"
        columns = f"columns {warp * columns_warp} to {(warp + 1) * columns_warp - 1}"
        s.rect(x, y, w, 48, fills[warp])
        s.text(x + w / 2, y + 20, "Sᵀ = K Qᵀ    dPᵀ = V dOᵀ", 14, bold=True)
        s.text(x + w / 2, y + 38, f"{keys_warp} keys, {own}", 12, fill=SOFT)
        s.rect(x, y + 60, w, 48, fills[warp])
        s.text(x + w / 2, y + 80, "Pᵀ = 2^(c Sᵀ − LSE)", 14, bold=True)
        s.text(x + w / 2, y + 98, "dSᵀ = Pᵀ ∘ (dPᵀ − D)", 14, bold=True)
        s.rect(x, y + 120, w, 48, fills[warp])
        s.text(x + w / 2, y + 140, "dV += Pᵀ dO    dK += dSᵀ Q", 14, bold=True)
        s.text(x + w / 2, y + 158, f"{own}, {columns}", 12, fill=SOFT)
        s.line(x + w / 2, y + 48, x + w / 2, y + 58, INK, 1.3)
        s.line(x + w / 2, y + 108, x + w / 2, y + 118, INK, 1.3)
    for inner, edge in ((middle, left + w), (middle + 216, right)):
        s.line(inner, y + 24, edge, y + 24, BLUE, 1.7, None, "blue")
        s.line(edge, y + 84, inner, y + 84, RED, 1.7, None, "red")
    s.rect(middle, y + 60, 108, 48, BLUE_PALE)
    s.rect(middle + 108, y + 60, 108, 48, RED_PALE)
    s.text(480, y + 140, "written for the other warp (P, dS)", 12, fill=SOFT)
    s.text(480, y + 157, "and for dQ (dS)", 12, fill=SOFT)
    for k in range(2):
        s.text(middle + 54 + 108 * k, y + 80, "Pᵀ, dSᵀ", 14, bold=True)
        s.text(middle + 54 + 108 * k, y + 98, f"of warp {k}", 12, fill=SOFT)

    y2 = y + 184
    barrier(y2, "barrier: P and dS are whole")
    y3 = y2 + 40
    for k, warp in enumerate((1, 0)):
        s.rect(middle + 108 * k, y3, 108, 48, fills[warp])
        s.text(middle + 54 + 108 * k, y3 + 20, "Pᵀ, dSᵀ", 14, bold=True)
        s.text(middle + 54 + 108 * k, y3 + 38, f"of warp {warp}", 12, fill=SOFT)
    s.rect(middle, y3 + 60, 216, 48, SAND)
    s.text(480, y3 + 80, "dSᵀ of all warps;  K", 14, bold=True)
    s.text(480, y3 + 98, f"all {keys} keys", 12, fill=SOFT)
    for x, warp in ((left, 0), (right, 1)):
        other = 1 - warp
        s.rect(x, y3, w, 48, fills[warp])
        s.text(x + w / 2, y3 + 20, "dV += Pᵀ dO    dK += dSᵀ Q", 14, bold=True)
        s.text(x + w / 2, y3 + 38, f"queries {other * queries_warp} to {(other + 1) * queries_warp - 1}, "
               f"columns {warp * columns_warp} to {(warp + 1) * columns_warp - 1}", 12, fill=SOFT)
        s.rect(x, y3 + 60, w, 48, fills[warp])
        s.text(x + w / 2, y3 + 80, "dQ = dS K", 14, bold=True)
        s.text(x + w / 2, y3 + 98, f"queries 0 to 31, columns {warp * columns_dq} to {(warp + 1) * columns_dq - 1}", 12, fill=SOFT)
        s.line(x + w / 2, y3 + 48, x + w / 2, y3 + 58, INK, 1.3)
        s.line(x + w / 2, y3 + 108, x + w / 2, y3 + 132, RED, 1.8, None, "red")
    for inner, edge in ((middle, left + w), (middle + 216, right)):
        s.line(inner, y3 + 24, edge, y3 + 24, BLUE, 1.7, None, "blue")
        s.line(inner, y3 + 84, edge, y3 + 84, BLUE, 1.7, None, "blue")
    s.rect(left, y3 + 134, right + w - left, 50, SAND)
    s.text(480, y3 + 155, "dQ_acc in global memory: float32, in the order of the lanes", 14, bold=True)
    s.text(480, y3 + 173, "each red of a warp adds 4 · 32 numbers, 512 bytes side by side", 12, fill=SOFT)
    s.save("backward_turn.svg")


def hopper_timeline():
    """Recorded by bench/watch_step06; of each part the first and the last block of keys may be cut off."""
    recorded = json.loads((Path(__file__).resolve().parents[1] / "results/h200/2026-11-30-timeline-06c.json").read_text(encoding="utf-8"))
    waits, multiplies, has_s, has_p, has_o, stored = range(6)
    s = Svg(960, 610, "06c: who does what when", "Two spans of the same block on an H200: the beginning of a tile of Q, and the step from one tile to the next.")
    spans = (0, "the first blocks of keys of a tile", 3300, 19300), (1, "from one tile of Q to the next", 512000, 528000)
    left, width, lane = 120, 810, 42
    for part, words, begin, end in spans:
        top = 46 + part * 268
        x = lambda clock: left + (min(max(clock, begin), end) - begin) / (end - begin) * width
        s.text(left, top - 12, words, 15, "start", True)
        for tick in range(0, 9):
            at = left + tick * width / 8
            s.line(at, top, at, top + 4 * lane + 20, LINE, 0.8)
            s.text(at, top + 4 * lane + 36, f"{tick * (end - begin) // 8:,}", 12, fill=SOFT)
        for w, events in enumerate(recorded["warpgroups"]):
            y, marks = top + 8 + w * (lane + 4), events[part]
            s.text(left - 12, y + 20, f"warpgroup {w}", 13, "end")
            for n in range(len(marks[0])):
                def bar(a, b, dy, h, fill):
                    if a is not None and b is not None and b > begin and a < end:
                        s.rect(x(a), y + dy, x(b) - x(a), h, fill, INK, 0, width=0.6)
                bar(marks[waits][n], marks[multiplies][n], 0, 18, RED_PALE)
                bar(marks[multiplies][n], marks[has_s][n], 0, 18, BLUE)
                bar(marks[has_s][n], marks[has_p][n], 0, 18, SAND)
                issued = marks[multiplies][n + 1] if n + 1 < len(marks[0]) and not marks[stored][n] else marks[has_p][n]
                bar(issued, marks[has_o][n], 22, 12, BLUE_PALE)
                bar(marks[has_o][n] if marks[stored][n] else None, marks[stored][n], 0, 18, GREEN_PALE)
        y = top + 8 + 3 * (lane + 4)
        s.text(left - 12, y + 16, "producer", 13, "end")
        for tile, colour in enumerate((BLUE, RED)):
            for at in recorded["producer"][part][tile]:
                if at is not None and begin <= at <= end:
                    s.line(x(at), y + 2, x(at), y + 22, colour, 2)
    y = 590
    for at, words, fill in ((120, "Q Kᵀ", BLUE), (210, "softmax", SAND), (315, "waits for its turn", RED_PALE), (470, "P V under way", BLUE_PALE),
                            (610, "O goes out", GREEN_PALE)):
        s.rect(at, y - 12, 16, 13, fill, INK, 0, width=0.6)
        s.text(at + 22, y, words, 12, "start")
    s.text(724, y, "loads begin: K blue, V red; clocks", 12, "start")
    s.save("hopper_timeline.svg")


def split_kv():
    splits, tiles, cell = 4, 4, 44
    width = splits * tiles * cell
    s = Svg(940, 430, "Split-KV decoding", "The keys of one key/value head in four splits, each read by a thread block, whose parts a second kernel merges.")
    x0, y0 = 150, 92
    s.text(470, 32, "One key/value head: four query heads with one query each, and a long cache", 17, bold=True)
    s.text(x0 - 14, y0 + 22, "Q (4 heads)", 13, "end")
    s.text(x0 - 14, y0 + 40, "rows of a tile", 12, "end", fill=SOFT)
    for n in range(splits):
        left = x0 + n * tiles * cell
        s.text(left + tiles * cell / 2, y0 - 14, f"split {n + 1}: a thread block", 13)
        for t in range(tiles):
            last = n == splits - 1 and t == tiles - 1
            s.rect(left + t * cell, y0, cell * (0.5 if last else 1), 56, (BLUE_PALE, "#ffffff")[n % 2], LINE, 0)
            if not last:
                s.text(left + (t + 0.5) * cell, y0 + 33, "K, V", 12)
        s.line(left + 8, y0 + 68, left + tiles * cell - (30 if n == splits - 1 else 12), y0 + 68, BLUE, 1.8, None, "blue")
        middle = left + tiles * cell / 2
        s.line(middle, y0 + 78, middle, y0 + 112, RED, 2, None, "red")
        s.rect(middle - 62, y0 + 116, 124, 40, SAND, INK, 4)
        s.text(middle, y0 + 141, f"O{n + 1}, m{n + 1}, l{n + 1}", 14)
        s.line(middle, y0 + 158, x0 + width / 2 + (n - 1.5) * 60, y0 + 206, BLUE, 1.6, None, "blue")
    s.text(x0 - 14, y0 + 33 + 40, "keys", 12, "end", fill=SOFT)
    s.text(x0 - 14, y0 + 134, "parts, in float32", 13, "end")
    s.text(x0 - 14, y0 + 151, "written and read", 12, "end", fill=SOFT)
    s.rect(x0 + width / 2 - 245, y0 + 210, 490, 62, "#ffffff", INK, 6)
    s.text(x0 + width / 2, y0 + 235, "second kernel: a block for each row", 14, bold=True)
    s.text(x0 + width / 2, y0 + 257, "m = max mₛ    l = Σ exp(mₛ − m) lₛ    O = Σ exp(mₛ − m) Oₛ / l", 13)
    s.line(x0 + width / 2, y0 + 274, x0 + width / 2, y0 + 304, RED, 2, None, "red")
    s.text(x0 + width / 2, y0 + 322, "O, LSE", 14)
    s.save("split_kv.svg")


def packed_batch():
    lengths, unit, height = (3, 1, 7, 2, 4), 22, 26
    colours = (BLUE_PALE, SAND, "#ffffff", SAND, BLUE_PALE)
    s = Svg(940, 430, "A packed batch", "Five sequences padded to the longest, the same packed without gaps, and the table of their tiles, longest first.")
    s.text(160, 32, "padded: 35 places for 17 tokens", 15, bold=True)
    for n, length in enumerate(lengths):
        y = 50 + n * (height + 6)
        s.text(40, y + 18, f"{n}", 13, "end", fill=SOFT)
        s.rect(50, y, max(lengths) * unit, height, "#ffffff", LINE, 0)
        s.rect(50, y, length * unit, height, colours[n], INK, 0)
    x0, y0 = 330, 82
    s.text(x0 + 280, 32, "packed: the sequences one after the other", 15, bold=True)
    x = x0
    for n, length in enumerate(lengths):
        s.rect(x, y0, length * 33, height + 8, colours[n], INK, 0)
        s.text(x + length * 33 / 2, y0 + 22, f"{n}", 13)
        x += length * 33
    s.text(x0 - 14, y0 + 22, "tokens", 13, "end")
    total = 0
    for length in (0, *lengths):
        total += length
        s.line(x0 + total * 33, y0 + height + 8, x0 + total * 33, y0 + height + 18, INK, 1.2)
        s.text(x0 + total * 33, y0 + height + 34, f"{total}", 13)
    s.text(x0 - 14, y0 + height + 34, "cu_seqlens", 13, "end")
    # Tiles of two rows; work in blocks of two keys, without a mask.
    tiles = [(-(-length // 2), n, row) for n, length in enumerate(lengths) for row in range(0, length, 2)]
    tiles.sort(key=lambda tile: -tile[0])
    left, top, step = 76, 278, 78
    s.text(470, top - 26, "the table, with tiles of two rows: a thread block for each tile and head, longest first", 15, bold=True)
    for k, (work, n, row) in enumerate(tiles):
        s.rect(left + k * step, top, step - 8, 44, colours[n], INK, 4)
        s.text(left + k * step + (step - 8) / 2, top + 19, f"sequence {n}", 11)
        s.text(left + k * step + (step - 8) / 2, top + 36, f"row {row}", 12)
        for b in range(work):
            s.rect(left + k * step + 10, top + 56 + 16 * b, step - 28, 12, BLUE_PALE, BLUE, 0)
    s.text(left - 10, top + 68, "blocks", 12, "end", fill=SOFT)
    s.text(left - 10, top + 83, "of keys", 12, "end", fill=SOFT)
    s.save("packed_batch.svg")


if __name__ == "__main__":
    memory_hierarchy()
    growth()
    three_round_trips()
    online_softmax()
    flash1_loops()
    roofline()
    flash2_loops()
    causal_tiles()
    mma_fragments()
    s_to_p()
    swizzle()
    backward_tiles()
    backward_turn()
    hopper_timeline()
    split_kv()
    packed_batch()
