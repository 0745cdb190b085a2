"""What the benchmarks measure: the cases, their names and their FLOPs. The same as cases.hpp, for peers.py and report.py.

A name is stepNN/<variant>/<fwd|bwd|fwdbwd>/<type>/d<head dim>/<full|causal>/B<batch>_H<query heads>[_KV<heads>]_N<Nq>[_M<Nkv>], with
peer/<backend> in place of stepNN/<variant> for other people's kernels; bwd is the backward pass alone, fwdbwd both. _KV and _M stand
only where they differ from H and N. The name of a packed batch ends with _S<sequences>.
"""

import itertools
import re
from dataclasses import dataclass, fields, replace

DTYPES = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of an element
PEERS = {
    "torch_math": "PyTorch math",
    "torch_flash": "PyTorch flash",
    "torch_efficient": "PyTorch efficient",
    "torch_cudnn": "PyTorch cuDNN",
    "flash_attn2": "FlashAttention-2",
    "flash_attn3": "FlashAttention-3",
}
TOKENS = 16384  # batch * length of the standard sweep
HIDDEN = 2048  # query heads * head dimension of the standard sweep
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (1024, 4096)

_CASE = re.compile(
    r"(?P<direction>fwd|bwd|fwdbwd)/(?P<dtype>f32|f16|bf16)/d(?P<head_dim>\d+)/(?P<mask>full|causal)/"
    r"B(?P<batch>\d+)_H(?P<heads>\d+)(?:_KV(?P<kv_heads>\d+))?_N(?P<seq>\d+)(?:_M(?P<kv_seq>\d+))?(?:_S(?P<sequences>\d+))?"
)


@dataclass(frozen=True)
class Case:
    """One attention problem: Q (B, Hq, Nq, d), K and V (B, Hkv, Nkv, d)."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    kv_seq: int
    head_dim: int
    dtype: str
    causal: bool
    direction: str = "fwd"

    def shape_name(self):
        kv_heads = f"_KV{self.kv_heads}" if self.kv_heads != self.heads else ""
        kv_seq = f"_M{self.kv_seq}" if self.kv_seq != self.seq else ""
        return f"B{self.batch}_H{self.heads}{kv_heads}_N{self.seq}{kv_seq}"

    def name(self):
        return f"{self.direction}/{self.dtype}/d{self.head_dim}/{'causal' if self.causal else 'full'}/{self.shape_name()}"

    def flops(self):
        """As the FlashAttention papers count: 4 B H Nq Nkv d, half of it when causal; backward 2.5 times the forward."""
        forward = 4.0 * self.batch * self.heads * self.seq * self.kv_seq * self.head_dim
        return forward * (0.5 if self.causal else 1.0) * {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}[self.direction]

    def compulsory_bytes(self):
        """The fewest bytes that move. Forward: Q, K, V read once, O and the float32 LSE written once. Backward: Q, K, V, O, dO and LSE
        read once, dQ, dK and dV written once."""
        rows = self.batch * self.heads * self.seq
        keys = self.batch * self.kv_heads * self.kv_seq
        passes = {"fwd": 1, "bwd": 2, "fwdbwd": 3}[self.direction]  # Q and O, K and V; backward their gradients too
        lse = 4 * rows * (2 if self.direction == "fwdbwd" else 1)
        return passes * 2 * (rows + keys) * self.head_dim * DTYPES[self.dtype] + lse


@dataclass(frozen=True)
class PackedCase(Case):
    """A packed batch of sequences, as many queries as keys each: batch is 1, seq and kv_seq are all tokens. The name has the number of
    sequences and not their lengths, which are empty where a case is read from its name."""

    sequences: int = 0
    lengths: tuple = ()
    path: str = ""  # where they are from

    def shape_name(self):
        return f"{super().shape_name()}_S{self.sequences}"

    def flops(self):
        one = Case(*(getattr(self, field.name) for field in fields(Case)))
        return sum(replace(one, seq=length, kv_seq=length).flops() for length in self.lengths)

    def begins(self):
        """Where each sequence begins, and where the last ends: cu_seqlens."""
        return [0, *itertools.accumulate(self.lengths)]


def parse_case(text):
    """The case that `text` names. Raises ValueError."""
    match = _CASE.fullmatch(text)
    if not match:
        raise ValueError(f'"{text}" does not read <fwd|bwd|fwdbwd>/<f32|f16|bf16>/d<d>/<full|causal>/B<B>_H<H>[_KV<heads>]_N<N>[_M<Nkv>][_S<sequences>]')
    size = {key: int(match[key]) for key in ("batch", "heads", "seq", "head_dim")}
    case = Case(
        **size,
        kv_heads=int(match["kv_heads"] or size["heads"]),
        kv_seq=int(match["kv_seq"] or size["seq"]),
        dtype=match["dtype"],
        causal=match["mask"] == "causal",
        direction=match["direction"],
    )
    if min(*size.values(), case.kv_heads, case.kv_seq) < 1:
        raise ValueError(f'"{text}": every size must be 1 or more')
    return PackedCase(**vars(case), sequences=int(match["sequences"])) if match["sequences"] else case


def read_lengths(path):
    """The lengths in a file, one a line; lines that begin with # are comments. Raises OSError and ValueError."""
    with open(path, encoding="utf-8") as file:
        lengths = tuple(int(line) for line in file if not line.startswith("#"))
    if not lengths or min(lengths) < 0 or not max(lengths):
        raise ValueError("accepted are whole numbers from 0 on, one a line, and one above 0")
    return lengths


def _sweep_case(seq, head_dim, dtype, causal):
    return Case(TOKENS // seq, HIDDEN // head_dim, HIDDEN // head_dim, seq, seq, head_dim, dtype, causal)


def sweep():
    """16384 tokens and 2048 / d query heads, so that the FLOPs of a token grow with the length and all else stays; and grouped heads."""
    return [_sweep_case(seq, d, dtype, causal) for dtype in ("bf16", "f32") for d in (64, 128) for causal in (False, True)
            for seq in LENGTHS] + grouped_heads()


def quick():
    """Of the sweep, what tells most: bf16, d = 128, two lengths."""
    return [_sweep_case(seq, 128, "bf16", causal) for causal in (False, True) for seq in QUICK_LENGTHS]


def grouped_heads():
    """Four query heads share a head of K and V, as in today's language models."""
    return [Case(4, 32, 8, 4096, 4096, 128, "bf16", True)]


def decode():
    """One query a sequence against long caches of up to 2 GiB; and eight queries."""
    sizes = [(batch, 1, keys) for batch in (1, 16, 64, 128) for keys in (512, 2048, 8192, 32768, 131072) if batch * keys <= 16 * 32768]
    return [Case(batch, 32, 8, queries, keys, 128, "bf16", False) for batch, queries, keys in sizes + [(16, 8, 32768)]]
