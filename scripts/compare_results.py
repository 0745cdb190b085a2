#!/usr/bin/env python3
"""Compares two result files of the stages' programs (--output): the same problem solved on two machines.

    scripts/compare_results.py RESULT.safetensors REFERENCE.safetensors

Both must hold the same problem, tensors (o and lse; dq, dk and dv of a backward pass; or all five), shapes and types. The machines add in another order and their exp and log differ in the last
bits, which now and then rounds a number the other way: so an element x may differ by 2 u (|x| + RMS), where RMS is that of the
tensor and u the distance from 1 to the next number of the type of o or dq (2^-17 for float32), and the RMS of all differences may be u / 4
times RMS. NaN is never right; infinities must be equal. Needs Python alone. Exit status: 0 agree, 1 differ, 2 bad file.
"""

import array
import json
import math
import struct
import sys


class BadFile(Exception):
    pass


def halves_to_floats(data):
    return [x[0] for x in struct.iter_unpack("<e", data)]


def bfloats_to_floats(data):
    bits = array.array("I", (x[0] << 16 for x in struct.iter_unpack("<H", data)))
    return array.array("f", bits.tobytes())


# Name of the type -> (decoder, distance from 1 to the next number)
TYPES = {
    "F32": (lambda data: array.array("f", data), 2.0**-23),
    "F16": (halves_to_floats, 2.0**-10),
    "BF16": (bfloats_to_floats, 2.0**-7),
}


# What the last forward and the last backward variant of a run leave in a file.
RESULTS = (("o", "lse"), ("dq", "dk", "dv"))


def read(path):
    """The result's tensors as {name: (type, shape, values)}, and the metadata."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        size = struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8 : 8 + size])
        tensors = {}
        names = [name for group in RESULTS if any(name in header for name in group) for name in group]
        if not names:
            raise BadFile(f"{path} holds neither o and lse nor dq, dk and dv")
        for name in names:
            entry = header[name]
            begin, end = entry["data_offsets"]
            decode, _ = TYPES[entry["dtype"]]
            values = decode(data[8 + size + begin : 8 + size + end])
            if not len(values) or len(values) != math.prod(entry["shape"]):
                raise BadFile(f"{path}: {name} has {len(values)} values; its shape says {math.prod(entry['shape'])}")
            tensors[name] = (entry["dtype"], entry["shape"], values)
        return tensors, header["__metadata__"]
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from error
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise BadFile(f"{path} is no result file of a stage: {error!r}") from error


def rms(values):
    values = [x for x in values if math.isfinite(x)]
    return math.sqrt(math.fsum(x * x for x in values) / len(values)) if values else 0.0


def compare(name, got, want, unit):
    """Prints the differences; returns whether all are allowed."""
    size = rms(want)
    differences = [0.0 if a == b else abs(a - b) for a, b in zip(got, want)]
    excess = [d / (2 * unit * (abs(b) + size)) if d else 0.0 for d, b in zip(differences, want)]
    # A NaN, or an infinity against a number, is over any bound.
    excess = [x if x == x and x != math.inf else math.inf for x in excess]
    excess = [math.inf if math.isnan(a) or math.isinf(a) != math.isinf(b) else x for x, a, b in zip(excess, got, want)]
    worst = max(range(len(excess)), key=excess.__getitem__)
    overall = rms(differences) / (unit / 4 * size) if size else 0.0
    right = excess[worst] <= 1 and overall <= 1
    print(f"{name}: largest difference {excess[worst]:.3f} of what is allowed (element {worst}: {got[worst]:.9g} and {want[worst]:.9g}), "
          f"RMS {overall:.3f} of what is allowed" + ("" if right else ": WRONG"))
    return right


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        (ours, about_us), (theirs, about_them) = read(sys.argv[1]), read(sys.argv[2])
        if about_us.get("problem") != about_them.get("problem"):
            raise BadFile(f"the problems differ: {about_us.get('problem')!r} and {about_them.get('problem')!r}")
        if list(ours) != list(theirs):
            raise BadFile(f"one holds {', '.join(ours)}, the other {', '.join(theirs)}")
        if about_us.get("d_o") != about_them.get("d_o"):
            raise BadFile(f"dO differs: {about_us.get('d_o')!r} and {about_them.get('d_o')!r}")
        for name in ours:
            if ours[name][:2] != theirs[name][:2]:
                raise BadFile(f"{name} differs in type or shape: {ours[name][:2]} and {theirs[name][:2]}")
    except BadFile as error:
        print(error, file=sys.stderr)
        return 2
    right = True
    for name in ours:
        of = "o" if name in ("o", "lse") else "dq"
        unit = max(TYPES[ours[of][0]][1], 2.0**-17)
        right &= compare(name, ours[name][2], theirs[name][2], unit)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
