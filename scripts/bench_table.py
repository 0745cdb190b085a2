#!/usr/bin/env python3
"""Turns the JSON lines that `scripts/gpu_check.sh --bench` collects into Markdown tables, one for each type, head
dimension and mask: median time, TFLOPS (4 B H N^2 d FLOPs, half of that when causal) and speedup over stage 01.

usage: scripts/bench_table.py RESULTS.jsonl > tables.md
"""
import argparse
import json
import sys
from collections import defaultdict


def read(path):
    """One dictionary for each run that was right and timed; the others are reported on stderr."""
    runs = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                run = json.loads(line)
            except json.JSONDecodeError as error:
                sys.exit(f"{path}:{number}: not JSON: {error}")
            if run["status"] == "ok" and run["seconds"]:
                runs.append(run)
            else:
                print(f"{path}:{number}: {run['variant']} {run['name']}: {run['status']}: {run['reason']}", file=sys.stderr)
    return runs


def cell(run, baseline):
    milliseconds = 1e3 * run["seconds"]
    text = f"{milliseconds:.{1 if milliseconds < 100 else 0}f} ms, {run['flops_per_second'] / 1e12:.2f}"
    if baseline and run is not baseline:
        text += f", {baseline['seconds'] / run['seconds']:.2f}×"
    return text


def tables(runs):
    groups = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        groups[run["dtype"], run["head_dim"], run["causal"]][run["seq"], run["batch"], run["heads"]][run["variant"]] = run
    variants = sorted({(run["variant"], run["name"]) for run in runs})
    for (dtype, head_dim, causal), sizes in sorted(groups.items()):
        yield f"### {dtype}, d = {head_dim}{', causal' if causal else ''}\n"
        yield "| N | B | H | " + " | ".join(f"{variant} {name}" for variant, name in variants) + " |"
        yield "|--:|--:|--:|" + "--:|" * len(variants)
        for (seq, batch, heads), by_variant in sorted(sizes.items()):
            baseline = by_variant.get("01")
            cells = [cell(by_variant[v], baseline) if v in by_variant else "–" for v, _ in variants]
            yield f"| {seq} | {batch} | {heads} | " + " | ".join(cells) + " |"
        yield ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="JSON lines, one object a run")
    print("\n".join(tables(read(parser.parse_args().results))))
