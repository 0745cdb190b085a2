"""The plots of bench/report.py. Needs matplotlib; imported only where plots are asked for.

Readable in grey and to colour-blind eyes: every series has a marker of its own or a line style, and each stage a colour of the Okabe-Ito
palette. The SVG of the same results is the same file, byte for byte, with one version of matplotlib.
"""

import math
import os
import re

from cases import PEERS
from results import ROOFS, BadInput, Results, get, group_title, load_json, number, provenance, title_of

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
except ImportError as error:
    raise BadInput(f"--plots needs matplotlib ({error}): python3 -m pip install matplotlib") from error

matplotlib.rcParams.update({
    "svg.hashsalt": "workbook", "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6,
    "axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 130, "hatch.linewidth": 0.6,
})

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
COLOURS = {"01": BLUE, "02": SKY, "03": GREEN, "04": ORANGE, "05": PURPLE, "06": VERMILION}  # of stages; others are black
MARKERS = "osD^vP<>XhpdH"  # one for each variant of all stages
PEER_STYLES = {"torch_math": ("#777777", (0, (1, 1.5)), "1"), "torch_efficient": (SKY, (0, (4, 1.5)), "2"),
               "torch_flash": (ORANGE, (0, (6, 1.5, 1, 1.5)), "3"), "torch_cudnn": (BLACK, (0, (5, 1)), "x"),
               "flash_attn2": (PURPLE, (0, (2, 1)), "4"), "flash_attn3": (GREEN, (0, (6, 1, 1, 1, 1, 1)), "+")}
KINDS = {  # of bytes: (label, colour, hatch), from what is asked for to what reaches HBM
    "requested_bytes": ("requested by threads (predicted)", "#ffffff", ""),
    "ledger_sector_bytes": ("32-byte sectors (emulator)", SKY, "...."),
    "l1tex_bytes": ("L1 (measured)", BLUE, ""),
    "l2_bytes": ("L2 (measured)", ORANGE, "////"),
    "dram_bytes": ("HBM (measured)", BLACK, ""),
    "tensor_level_bytes": ("HBM, each pass once (predicted)", "#cccccc", "\\\\\\\\"),
}


def style(results, kernel):
    """Arguments of a line of one kernel."""
    if kernel in PEERS:
        colour, dashes, marker = PEER_STYLES[kernel]
        return {"color": colour, "linestyle": dashes, "marker": marker, "linewidth": 1.2, "markersize": 7, "markeredgewidth": 1.4}
    marker = MARKERS[results.stages().index(kernel) % len(MARKERS)]
    return {"color": COLOURS.get(kernel[:2], BLACK), "linestyle": "-", "marker": marker, "linewidth": 1.8, "markersize": 6,
            "markeredgecolor": "white", "markeredgewidth": 0.7}


def plain(value, _=None):
    """A tick without exponent."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def length_axis(ax, lengths):
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:.0f}" if n < 1024 or n % 1024 else f"{n / 1024:.0f}K"))


def rate_axis(ax):
    """A logarithmic axis with 1, 2, 5 as ticks, or 1 alone over many decades."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    low, high = low / 1.15, high * 1.15
    steps = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [s * 10.0**e for e in range(-6, 9) for s in steps if low <= s * 10.0**e <= high]
    ax.set_ylim(low, high)
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(plain))


def sweep_groups(results, dtype):
    """{group: cases} of the forward passes of one type, one case a length: that with as many key heads as query heads and Nq = Nkv."""
    groups = {}
    for group, cases in results.groups().items():
        chosen = {}
        for case in cases:
            if case.heads == case.kv_heads and case.seq == case.kv_seq and (case.seq not in chosen or case.batch > chosen[case.seq].batch):
                chosen[case.seq] = case
        if group[0] == "fwd" and group[1] == dtype and chosen:
            groups[group] = list(chosen.values())
    return groups


def panels(count, height):
    """A figure with `count` panels in rows of two."""
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.3 * columns + 0.4, height * rows + 1.1), squeeze=False, sharey=True)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    return figure, list(axes.flat[:count])


def finish(figure, title, subtitle, handles, columns, path):
    """Title above and legend below the panels, and both files."""
    legend = (0.19 * math.ceil(len(handles) / columns) + 0.12) if handles else 0  # inches
    width, height = figure.get_size_inches()
    figure.tight_layout(rect=(0, legend / height, 1, 1 - 0.5 / height))
    figure.text(0.09 / width, 1 - 0.08 / height, title, fontsize=11, fontweight="bold", ha="left", va="top")
    figure.text(0.09 / width, 1 - 0.29 / height, subtitle, fontsize=8, color="#444444", ha="left", va="top")
    if handles:
        figure.legend(handles=handles, loc="lower center", ncol=columns, fontsize=8.5, handlelength=3.2, columnspacing=1.6)
    try:
        figure.savefig(path + ".svg", metadata={"Date": None})
        figure.savefig(path + ".png", metadata={"Software": None})
    except OSError as problem:
        raise BadInput(f"{path}: {problem.strerror}") from problem
    finally:
        plt.close(figure)
    return [path + ".svg", path + ".png"]


def against_length(results, dtype, folder, what):
    """TFLOPS of stages and peers, or the stages' speedup over stage 01, against N; a panel for each d and mask."""
    groups = sweep_groups(results, dtype)
    kernels = results.stages() + (results.peers() if what == "tflops" else [])
    shown, drawn = {}, []
    for group, cases in groups.items():
        lines = {}
        for kernel in kernels:
            points = [(case.seq, run, results.baseline(case)) for case in cases if (run := results.timed(kernel, case))]
            if what == "tflops":
                lines[kernel] = [(n, run.tflops) for n, run, _ in points]
            else:
                lines[kernel] = [(n, first.ms / run.ms) for n, run, first in points if first and run is not first]
        lines = {kernel: line for kernel, line in lines.items() if line}
        if lines:
            drawn.append((group, lines))
    if not drawn:
        return []
    figure, axes = panels(len(drawn), 2.8)
    lengths = sorted({n for _, lines in drawn for line in lines.values() for n, _ in line})
    for index, (ax, (group, lines)) in enumerate(zip(axes, drawn)):
        for kernel, line in lines.items():
            (shown[kernel],) = ax.plot(*zip(*line), **style(results, kernel))
        ax.set_title(group_title(group), loc="left")
        length_axis(ax, lengths)
        ax.set_xlabel("length N")
        if index % 2 == 0:
            ax.set_ylabel("TFLOPS" if what == "tflops" else "speedup over stage 01 (times)")
        if what == "speedup":
            ax.axhline(1, color="#222222", linewidth=1.2, zorder=1)
            ax.annotate("stage 01", (lengths[0], 1), xytext=(0, -3), textcoords="offset points", ha="left", va="top", fontsize=7.5)
    rate_axis(axes[0])  # the panels share it
    handles = [Line2D([], [], label=title_of(kernel), **style(results, kernel)) for kernel in kernels if kernel in shown]
    what_title = "Attention forward: " + ("TFLOPS against length" if what == "tflops" else "speedup over stage 01")
    return finish(figure, what_title, provenance(results), handles, 4, os.path.join(folder, f"{what}_{dtype}"))


def roofs(results, given):
    """{name: value} of the GPU's limits as its datasheet says: from options, then from the files' contexts."""
    found = dict(given)
    for context in results.contexts:
        for key in ROOFS:
            if key in context and key not in found:
                try:
                    found[key] = float(context[key])
                except (TypeError, ValueError) as error:
                    raise BadInput(f"context: {key} = {context[key]!r}: a number is expected") from error
                if not 0 < found[key] < math.inf:
                    raise BadInput(f"context: {key} = {context[key]!r}: a finite number above 0 is expected")
    return found


def representative(results, dtype):
    """The cases to look at closely: d = 128 if it is there, N = 4096 or the length nearest to it, full and causal."""
    chosen = []
    groups = sweep_groups(results, dtype)
    dims = [group[2] for group in groups]
    for group, cases in groups.items():
        if group[2] == (128 if 128 in dims else max(dims)):
            chosen.append(min(cases, key=lambda case: abs(math.log2(case.seq / 4096))))
    return chosen


def roofline(results, dtype, folder, limits):
    """Measured TFLOPS against FLOPs per predicted byte: of HBM in one panel, of L1 (what the threads ask for) in the other."""
    sides = [("hbm_GB_per_s", "bandwidth_GB_s", "FLOPs per predicted HBM byte", "HBM"),
             ("GB_per_s", "l1_GB_s", "FLOPs per byte that threads request", "L1")]
    flat = [("tensor_tflops", "16-bit tensor cores")] if dtype != "f32" else []
    flat = [(limits[key], name) for key, name in [*flat, ("fp32_tflops", "FP32 units")] if key in limits]
    cases = representative(results, dtype)
    drawn = []
    for counter, bandwidth, label, name in sides:
        points = [(case, kernel, case.flops() / moved, run.tflops) for case in cases for kernel in results.stages() + results.peers()
                  if (run := results.timed(kernel, case)) and (moved := run.bytes_of(counter))]
        if points and bandwidth in limits and flat:
            drawn.append((points, limits[bandwidth], label, name))
    if not drawn:
        return []
    figure, axes = panels(len(drawn), 3.7)
    kernels = []
    for ax, (points, bandwidth, label, name) in zip(axes, drawn):
        top = max(rate for rate, _ in flat)
        xs = [x for _, _, x, _ in points] + [1e3 * rate / bandwidth for rate, _ in flat]
        low, high = min(xs) / 3, max(xs) * 4
        floor = min([y for *_, y in points]) / 3
        ax.set_xscale("log")
        ax.set_yscale("log")
        ridge = 1e3 * top / bandwidth
        ax.plot([low, ridge], [low * bandwidth / 1e3, top], color="#444444", linewidth=1.4)
        for rate, unit in flat:
            ax.plot([1e3 * rate / bandwidth, high], [rate, rate], color="#444444", linewidth=1.4)
            above = rate == top
            ax.annotate(f"{unit}, {rate:g} TFLOPS", (high, rate), xytext=(-2, 3 if above else -3), textcoords="offset points", ha="right",
                        va="bottom" if above else "top", fontsize=7.5)
        ceiling = results.ceilings
        if name == "HBM" and "copy" in ceiling:
            reach = [low, 1e3 * top / ceiling["copy"]]
            ax.plot(reach, [x * ceiling["copy"] / 1e3 for x in reach], color="#777777", linewidth=0.9, linestyle=(0, (3, 2)))
        matmul = ceiling.get("f32_matmul" if dtype == "f32" else "bf16_matmul")
        if matmul:
            ax.plot([1e3 * matmul / bandwidth, high], [matmul, matmul], color="#777777", linewidth=0.9, linestyle=(0, (3, 2)))
        for case, kernel, x, y in points:
            kernels.append(kernel)
            look = {**style(results, kernel), "linestyle": "none", "markersize": 9 if kernel in PEERS else 7.5}
            if case.causal and kernel not in PEERS:
                look.update(markerfacecolor="white", markeredgecolor=look["color"], markeredgewidth=1.4)
            elif case.causal:
                look.update(alpha=0.5)
            ax.plot([x], [y], **look)
        ax.set_xlim(low, high)
        ax.set_ylim(floor, top * 2.2)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(plain))
            axis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(label)
        ax.set_title(f"{name}, {bandwidth:,.0f} GB/s", loc="left")
    axes[0].set_ylabel("TFLOPS")
    handles = [Line2D([], [], label=title_of(k), **{**style(results, k), "linestyle": "none"}) for k in results.stages() + results.peers()
               if k in kernels]
    notes = [provenance(results)]
    if any(case.causal for points, *_ in drawn for case, *_ in points):
        notes.append("pale: causal")
    if results.ceilings:
        notes.append("dashed: measured ceilings")
    case = cases[0]
    return finish(figure, f"Roofline: {dtype}, d = {case.head_dim}, N = {case.seq}", "; ".join(notes), handles, 4,
                  os.path.join(folder, f"roofline_{dtype}"))


def both(where, table, key, read, written):
    """table[key][read] + table[key][written]; None where the table is null or lacks one of them."""
    sides = get(where, table, key, (dict, type(None)), "an object or null", optional=True) or {}
    values = [None if sides.get(side) is None else number(f"{where}: {key}", sides, side) for side in (read, written)]
    return None if None in values else sum(values)


def read_traffic(path):
    """{case: {kernel: {kind: bytes}}} from what `workbook profile --json` writes."""
    document = load_json(path)
    if not isinstance(document, list) or not document:
        raise BadInput(f"{path}: a list of at least one object is expected")
    cases = {}
    for index, entry in enumerate(document):
        where = f"{path}: [{index}]"
        if not isinstance(entry, dict):
            raise BadInput(f"{where}: an object is expected")
        stage = get(where, entry, "stage", str, "the number of the stage as text")
        kernel = f"{stage} {get(where, entry, 'name', str, 'the name of the variant')}"
        case = re.sub(r"^step(\d\d|[a-z])/[^/]*/", "", get(where, entry, "case", str, "the name of the case"))
        if entry.get("layout", "bhnd") != "bhnd":
            case += f"/{get(where, entry, 'layout', str, 'the layout')}"
        predicted = get(where, entry, "predicted", dict, "an object with read, written and dram")
        kinds = {
            "requested_bytes": both(where, entry, "predicted", "read", "written"),
            "ledger_sector_bytes": both(where, entry, "ledger", "read", "written"),
            "l1tex_bytes": both(where, entry, "measured", "l1_read", "l1_written"),
            "l2_bytes": both(where, entry, "measured", "l2_read", "l2_written"),
            "dram_bytes": both(where, entry, "measured", "dram_read", "dram_written"),
            "tensor_level_bytes": number(f"{where}: predicted", predicted, "dram"),
        }
        if kernel in cases.setdefault(case, {}):
            raise BadInput(f"{where}: {kernel} of {case} stands there twice")
        cases[case][kernel] = {kind: value for kind, value in kinds.items() if value}
    return cases


def predicted_traffic(results):
    """The same from the benchmarks' rates, for the representative cases: what is predicted, nothing measured."""
    cases = {}
    for dtype in dict.fromkeys(case.dtype for case in results.cases()):
        for case in representative(results, dtype):
            for kernel in results.stages():
                if run := results.timed(kernel, case):
                    kinds = {"requested_bytes": run.bytes_of("GB_per_s"), "tensor_level_bytes": run.bytes_of("hbm_GB_per_s")}
                    kinds = {kind: value for kind, value in kinds.items() if value}
                    if kinds:
                        cases.setdefault(case.name(), {})[kernel] = kinds
    return cases


def bytes_title(value):
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} B"


def traffic(results, by_case, folder):
    """A figure a case: for each stage a bar for each kind of bytes that is known."""
    paths = []
    for case, kernels in by_case.items():
        kinds = [kind for kind in KINDS if any(kind in known for known in kernels.values())]
        if not kinds:
            continue
        count = sum(len(known) for known in kernels.values())
        figure, ax = plt.subplots(figsize=(7.6, 0.26 * count + 0.22 * len(kernels) + 1.6))
        y, ticks = 0.0, []
        values = [value for known in kernels.values() for value in known.values()]
        low, high = min(values) / 4, max(values)
        for kernel in sorted(kernels, key=lambda name: name[:2]):
            top = y
            for kind in kinds:
                if kind not in kernels[kernel]:
                    continue
                value = kernels[kernel][kind]
                _, colour, hatch = KINDS[kind]
                ax.barh(y, value - low, left=low, height=0.86, color=colour, edgecolor="#222222", linewidth=0.8, hatch=hatch)
                ax.annotate(bytes_title(value), (value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5)
                y += 1
            ticks.append(((top + y - 1) / 2, kernel))
            y += 0.8
        ax.set_yticks([position for position, _ in ticks], [kernel for _, kernel in ticks])
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xscale("log", base=2)
        ax.set_xlim(low, high * (high / low) ** 0.16)
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high * 1.5))
        step = max(1, math.ceil((last - first) / 6))
        ax.xaxis.set_major_locator(FixedLocator([2.0**e for e in range(first, last + 1, step)]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_title(value)))
        ax.set_xlabel("bytes, logarithmic")
        handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#222222", linewidth=0.8, hatch=hatch, label=label)
                   for label, colour, hatch in (KINDS[kind] for kind in kinds)]
        name = re.sub(r"[^A-Za-z0-9]+", "_", case).strip("_")
        subtitle = f"{case}; {provenance(results)}"
        paths += finish(figure, "Bytes moved by one forward pass", subtitle, handles, 3, os.path.join(folder, f"traffic_{name}"))
    return paths


def draw(results: Results, folder, traffic_file, given_roofs):
    """Draws all plots that the results allow. Yields the paths written, and lines about what was left out."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"{folder}: {problem.strerror}") from problem
    limits = roofs(results, given_roofs)
    by_case = read_traffic(traffic_file) if traffic_file else predicted_traffic(results)
    for dtype in dict.fromkeys(case.dtype for case in results.cases()):
        yield from against_length(results, dtype, folder, "speedup")
        yield from against_length(results, dtype, folder, "tflops")
        yield from roofline(results, dtype, folder, limits) or [
            f"no roofline of {dtype}: it needs --ceiling bandwidth_GB_s=... and fp32_tflops or tensor_tflops (or the same in a file's "
            "context), and the counters hbm_GB_per_s or GB_per_s"]
    yield from traffic(results, by_case, folder)
