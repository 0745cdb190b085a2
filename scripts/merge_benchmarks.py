#!/usr/bin/env python3
"""Puts Google Benchmark's JSON files of one machine into one, and says what they hold. The name of the host and the machine's
load, which say nothing about a GPU, are left out.

usage: scripts/merge_benchmarks.py FILE... --output FILE
Exit status: 0 done; 1 a case was wrong, failed or was not begun; 2 a file is not as it must be, or no case was timed.
"""
import argparse
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench"))
from results import NOT_OF_THE_GPU  # noqa: E402

SAME = ("gpu", "compute_capability", "driver", "cuda")  # what files must agree on to be put together
BAD = ("wrong", "failed", "skipped: not begun")  # how the reasons of cases begin that should have been timed


def stop(message):
    print(f"merge_benchmarks: {message}", file=sys.stderr)
    sys.exit(2)


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return content["context"], content["benchmarks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"{path}: {type(error).__name__}: {error}; the JSON that a program writes with --benchmark_out is accepted")


def merge(files):
    """files: (path, context, benchmarks). The context is the first file's."""
    first_path, first, _ = files[0]
    names, benchmarks = set(), []
    for path, context, entries in files:
        for key in SAME:
            if context.get(key) != first.get(key):
                stop(f"{path}: {key} is {context.get(key)!r}, but {first.get(key)!r} in {first_path}; files of one machine are accepted")
        for entry in entries:
            if entry["name"] in names:
                stop(f"{path}: {entry['name']} stands twice")
            names.add(entry["name"])
            benchmarks.append(entry)
    return {"context": {key: value for key, value in first.items() if key not in NOT_OF_THE_GPU}, "benchmarks": benchmarks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--output", required=True, metavar="FILE")
    options = parser.parse_args()
    merged = merge([(path, *read(path)) for path in options.files])
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(merged, file, indent=1)
        file.write("\n")
    reasons = [(entry["name"], entry.get("error_message", "")) for entry in merged["benchmarks"] if entry.get("error_occurred")]
    timed = len(merged["benchmarks"]) - len(reasons)
    bad = [(name, reason) for name, reason in reasons if reason.startswith(BAD)]
    for name, reason in bad:
        print(f"{name}: {reason}")
    print(f"{timed} cases right and timed, {len(reasons) - len(bad)} refused or skipped with a reason, {len(bad)} wrong, failed or not begun")
    sys.exit(1 if bad else 2 if timed == 0 else 0)


if __name__ == "__main__":
    main()
