#!/usr/bin/env python3
"""Times other people's attention kernels on the cases of the benchmarks: PyTorch's scaled_dot_product_attention with each backend
pinned, flash_attn (FlashAttention-2) and flash_attn_interface (FlashAttention-3) where they are installed. Measures the GPU's
ceilings too: a device-to-device copy and matrix products.

Each output is compared with a float64 reference on sampled rows before it is timed. A backend that refuses a case is recorded as
an error with PyTorch's reason; nothing falls back to another backend, and a profile of one case for each backend and type says
which kernels ran. Inputs are random normal, by default in memory as (B, H, N, d). Times are medians of CUDA-event timings, queued
without waiting. With --beside the workbook's own kernels are timed in between, case by case, so that the card is as warm for both.
With --backward it times gradients instead: the backward pass alone (torch.autograd.grad on a graph that is kept), and a forward with
the backward pass after it. dQ, dK and dV are compared with float64 likewise.

Writes the JSON that Google Benchmark writes; bench/report.py reads it. Needs PyTorch 2.5 or later and a GPU.
Exit status: 0 measured (refusals are recorded), 1 an output was wrong, another kernel ran, or the run was stopped (what was measured
is written), 2 bad option, 3 no GPU or package.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import inspect
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings

from cases import DTYPES, PEERS, Case, PackedCase, decode, grouped_heads, quick, read_lengths, sweep
from results import NOT_OF_THE_GPU

# Largest relative RMS error of a row of O. A row is an average of V with rounded weights, so its relative error is a few times
# the type's rounding unit at every length; a wrong mask or scale is of order 1. f32 leaves room for TF32 tensor cores.
ALLOWED = {"f32": 2e-3, "f16": 5e-3, "bf16": 3e-2}
# Of all sampled rows of dQ, dK or dV together: single rows may cancel to nothing.
ALLOWED_GRADIENTS = {"f32": 4e-3, "f16": 5e-3, "bf16": 4e-2}
SDPA = {
    "torch_math": "MATH",
    "torch_flash": "FLASH_ATTENTION",
    "torch_efficient": "EFFICIENT_ATTENTION",
    "torch_cudnn": "CUDNN_ATTENTION",
}
# How PyTorch heads the reasons why a backend cannot be used.
REASONS = {"torch_flash": "flash attention kernel not used", "torch_efficient": "memory efficient kernel not used",
           "torch_cudnn": "cudnn attention kernel not used"}
PACKAGES = {"flash_attn2": "flash_attn", "flash_attn3": "flash_attn_interface"}
# Whose a kernel is, by its name; the first pattern that fits. cuDNN's names also hold "flash", FlashAttention-3's "flash::".
OWNERS = (
    ("torch_cudnn", re.compile("cudnn", re.I)),
    ("torch_efficient", re.compile("fmha_cutlass|PyTorchMemEff|Attention(Backward)?Kernel", re.I)),
    ("torch_flash", re.compile("pytorch_flash", re.I)),
    ("flash_attn3", re.compile("FlashAttn(Fwd|Bwd)Sm[89]0|enable_sm90", re.I)),
    ("flash_attn2", re.compile("flash_(fwd|bwd)", re.I)),
)

torch = None  # imported by main(), so that --list and --help need no PyTorch


class Refused(Exception):
    """A backend does not do a case; the message says why."""


class Stopped(BaseException):
    """The program was told to end; what was measured is written all the same. No Exception, so that nothing takes it for a refusal."""


class Skipped(Exception):
    """A case takes longer than was allowed."""


class Wrong(Exception):
    """A backend gave a wrong result, or another kernel than the pinned one ran."""


def progress(text):
    print(text, file=sys.stderr, flush=True)


def first_line(error):
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


# Calls ------------------------------------------------------------------------------------------------------------------------


def pinned(backend):
    """A context in which PyTorch may use `backend` alone; no restriction for kernels that are not PyTorch's."""
    if backend not in SDPA:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, SDPA[backend]))


def launcher(backend, case, q, k, v):
    """A function without arguments that runs the kernel and returns O (B, H, N, d). To be called within pinned(backend).
    flash_attn takes (B, N, H, d) with any strides: it gets the same memory."""
    if isinstance(case, PackedCase):
        return packed_launcher(backend, case, q, k, v)
    if backend in SDPA:
        if case.causal and case.seq != case.kv_seq:
            raise Refused(f"is_causal of PyTorch is aligned to the top left, the cases here to the bottom right: equal only for "
                          f"Nq = Nkv; given {case.seq} and {case.kv_seq}")
        grouped = {"enable_gqa": True} if case.kv_heads != case.heads else {}
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, **grouped)

    function = importlib.import_module(PACKAGES[backend]).flash_attn_func
    views = [x.transpose(1, 2) for x in (q, k, v)]

    def launch():
        # Where gradients are asked for, each graph has views of its own.
        output = function(*([x.transpose(1, 2) for x in (q, k, v)] if q.requires_grad else views), causal=case.causal)
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)  # some versions give (O, LSE)

    return launch


def packed_launcher(backend, case, q, k, v):
    """As launcher(), by the functions that take cu_seqlens: of PyTorch varlen_attn, whose kernel is FlashAttention-2's."""
    begins = torch.tensor(case.begins(), dtype=torch.int32, device=q.device)
    longest = max(case.lengths)
    if backend == "torch_flash":
        try:
            function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        except (ImportError, AttributeError):
            raise Refused("no torch.nn.attention.varlen in this PyTorch") from None
        if case.heads != case.kv_heads:
            raise Refused(f"varlen_attn takes one number of heads; given {case.heads} and {case.kv_heads}")
        by_flag = "is_causal" in inspect.signature(function).parameters  # versions differ
        mask = {"is_causal": case.causal} if by_flag else {"window_size": (-1, 0 if case.causal else -1)}
    elif backend in PACKAGES:
        function, mask = importlib.import_module(PACKAGES[backend]).flash_attn_varlen_func, {"causal": case.causal}
    else:
        raise Refused("takes no cu_seqlens")

    def launch():
        output = function(*(x[0].transpose(0, 1) for x in (q, k, v)), begins, begins, longest, longest, **mask)
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)[None]

    return launch


def hidden_keys(case, rows):
    """Which keys these query rows do not see: (rows, Nkv), or None where they see all."""
    keys = torch.arange(case.kv_seq, device=rows.device)[None, :]
    if isinstance(case, PackedCase):
        begins = torch.tensor(case.begins(), device=rows.device)
        ends = torch.searchsorted(begins, rows, right=True)  # of each row's sequence
        hidden = (keys < begins[ends - 1][:, None]) | (keys >= begins[ends][:, None])
        return hidden | (keys > rows[:, None]) if case.causal else hidden
    return keys > rows[:, None] + case.kv_seq - case.seq if case.causal else None


def task(backend, case, layout, q, k, v):
    """(what is timed, its checked results) of a case: a function without arguments, and O, or (dQ, dK, dV) and dO. To be called where
    first_run() may be; what is timed is to be called within pinned(backend)."""
    if case.direction == "fwd":
        launch = launcher(backend, case, q, k, v)
        return launch, first_run(backend, launch)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    forward = launcher(backend, case, *leaves)
    output = first_run(backend, forward)
    generator = torch.Generator(device=q.device).manual_seed(1)
    d_o = in_memory(case, q.device, case.heads, case.seq, layout, generator)

    def backward():
        return torch.autograd.grad(output, leaves, d_o, retain_graph=True)

    def both():
        return torch.autograd.grad(forward(), leaves, d_o)

    return (backward if case.direction == "bwd" else both), (first_run(backend, backward), d_o)


def first_run(backend, launch):
    """What the first call gives. Raises Refused with the reasons that the backend gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with pinned(backend):
                return launch()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
            torch.cuda.synchronize()  # raises where the GPU itself failed, which is no refusal
            reasons = refusal(backend, [str(w.message) for w in caught])
            raise Refused("; ".join([first_line(error)] + reasons)) from error


def refusal(backend, messages):
    """From PyTorch's warnings, those under the heading of `backend`; all but the headings where it has none."""
    reasons, heading, found = [], None, False
    for message in messages:
        text = re.sub(r"\s*\(Triggered internally at .*", "", message, flags=re.S).strip()
        if "not used because" in text:
            heading = text.lower()
            found = found or heading.startswith(REASONS.get(backend, "\0"))
        elif "runtime disabled" not in text:  # the others are: that is what pinning does
            reasons.append((heading, text))
    own = [text for heading, text in reasons if not found or (heading or "").startswith(REASONS[backend])]
    return list(dict.fromkeys(own))


# Check ------------------------------------------------------------------------------------------------------------------------


def in_memory(case, device, heads, seq, layout, generator):
    """A random normal tensor (B, heads, seq, d) that lies in memory as `layout` says."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    shape = (case.batch, heads, seq, case.head_dim) if layout == "bhnd" else (case.batch, seq, heads, case.head_dim)
    x = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
    return x if layout == "bhnd" else x.transpose(1, 2)


def inputs(case, options):
    """Q, K, V (B, H, N, d): random normal, packed in the layout that was asked for."""
    generator = torch.Generator(device=options.device).manual_seed(0)
    return tuple(in_memory(case, options.device, heads, seq, options.layout, generator)
                 for heads, seq in ((case.heads, case.seq), (case.kv_heads, case.kv_seq), (case.kv_heads, case.kv_seq)))


def check(case, q, k, v, output):
    """The largest relative RMS error of 64 rows of `output` against float64: the first, the last and others of eight heads.
    Raises Wrong when it is more than ALLOWED."""
    if tuple(output.shape) != tuple(q.shape) or output.dtype != q.dtype:
        raise Wrong(f"O is {tuple(output.shape)} of {output.dtype}; expected {tuple(q.shape)} of {q.dtype}")
    step = max(1, (case.batch * case.heads) // 8)
    worst = 0.0
    for index in range(0, case.batch * case.heads, step)[:8]:
        b, h = divmod(index, case.heads)
        kv_head = h // (case.heads // case.kv_heads)
        rows = sorted({0, case.seq - 1, *((index * 7919 + j * 104729) % case.seq for j in range(6))})
        i = torch.tensor(rows, device=q.device)
        S = q[b, h, i].double() @ k[b, kv_head].double().T / math.sqrt(case.head_dim)  # (rows, Nkv)
        hidden = hidden_keys(case, i)
        if hidden is not None:
            S.masked_fill_(hidden, -math.inf)
        expected = torch.softmax(S, dim=-1).nan_to_num(0.0) @ v[b, kv_head].double()  # a row that sees no key is 0
        got = output[b, h, i].double()
        error = (got - expected).square().mean(dim=-1).sqrt()
        relative = error / expected.square().mean(dim=-1).sqrt().clamp_min(1e-30)
        relative = torch.where(error == 0, torch.zeros_like(error), relative)
        for row, value in zip(rows, relative.tolist()):
            if not value <= ALLOWED[case.dtype]:  # also NaN
                raise Wrong(f"relative RMS error {value:.3g} in O({b}, {h}, {row}); {ALLOWED[case.dtype]:g} is allowed")
            worst = max(worst, value)
    return worst


def expected_gradients(case, q, k, v, d_o, b, kv_head, keys):
    """Of one head of K and V in float64: dQ (heads of the group, Nq, d), and of the `keys` dK and dV (keys, d)."""
    group, scale = case.heads // case.kv_heads, 1 / math.sqrt(case.head_dim)
    K, V = k[b, kv_head].double(), v[b, kv_head].double()
    dQ, dK, dV = [], 0, 0
    for h in range(kv_head * group, (kv_head + 1) * group):
        parts = []
        for begin in range(0, case.seq, 1024):  # so that a few rows of S are there at a time
            Q, dO = (x[b, h, begin:begin + 1024].double() for x in (q, d_o))
            S = scale * Q @ K.T
            hidden = hidden_keys(case, torch.arange(begin, begin + len(Q), device=q.device))
            if hidden is not None:
                S.masked_fill_(hidden, -math.inf)
            P = torch.softmax(S, dim=-1).nan_to_num(0.0)  # a row that sees no key has no part
            dP = dO @ V.T
            dS = P * (dP - (P * dP).sum(dim=-1, keepdim=True))
            parts.append(scale * dS @ K)
            dK = dK + scale * dS[:, keys].T @ Q
            dV = dV + P[:, keys].T @ dO
        dQ.append(torch.cat(parts))
    return torch.stack(dQ), dK, dV


def check_gradients(case, q, k, v, d_o, gradients):
    """The largest relative RMS error of dQ, dK and dV against float64, over two heads of K and V: all rows of dQ, 64 of dK and dV.
    Raises Wrong when one is more than ALLOWED_GRADIENTS."""
    for name, gradient, of in zip(("dQ", "dK", "dV"), gradients, (q, k, v)):
        if tuple(gradient.shape) != tuple(of.shape) or gradient.dtype != of.dtype:
            raise Wrong(f"{name} is {tuple(gradient.shape)} of {gradient.dtype}; expected {tuple(of.shape)} of {of.dtype}")
    keys = torch.tensor(sorted({0, case.kv_seq - 1, *(j * 104729 % case.kv_seq for j in range(62))}), device=q.device)
    group, errors = case.heads // case.kv_heads, {"dQ": [0.0, 0.0], "dK": [0.0, 0.0], "dV": [0.0, 0.0]}
    for index in sorted({0, case.batch * case.kv_heads - 1}):
        b, kv_head = divmod(index, case.kv_heads)
        wanted = expected_gradients(case, q, k, v, d_o, b, kv_head, keys)
        dQ, dK, dV = gradients
        got = dQ[b, kv_head * group:(kv_head + 1) * group], dK[b, kv_head, keys], dV[b, kv_head, keys]
        for name, want, have in zip(errors, wanted, got):
            errors[name][0] += (have.double() - want).square().sum().item()
            errors[name][1] += want.square().sum().item()
    worst = 0.0
    for name, (squares, size) in errors.items():
        value = math.sqrt(squares / max(size, 1e-300)) if squares else 0.0
        if not value <= ALLOWED_GRADIENTS[case.dtype]:  # also NaN
            raise Wrong(f"relative RMS error {value:.3g} in {name}; {ALLOWED_GRADIENTS[case.dtype]:g} is allowed")
        worst = max(worst, value)
    return worst


# Time -------------------------------------------------------------------------------------------------------------------------


def repetitions(seconds):
    """How often a run that takes `seconds` is repeated: for 0.3 s, and 10 times where that takes no more than 1 s; 2 to 200 times."""
    run = max(seconds, 1e-6)
    return max(2, min(200, max(math.ceil(0.3 / run), min(10, math.ceil(1.0 / run)))))


def measure(function, max_seconds, repeats=None):
    """Times `function` with CUDA events after a warm-up, the repetitions queued without waiting. Returns (median, spread,
    repetitions): ms, (p90 - p10) / median. Raises Refused when one run takes more than `max_seconds`."""

    def event():
        return torch.cuda.Event(enable_timing=True)

    start, stop = event(), event()
    start.record()
    function()
    stop.record()
    stop.synchronize()
    seconds = start.elapsed_time(stop) / 1e3
    if seconds > max_seconds:
        raise Skipped(f"a run takes {seconds:.3g} s, more than --max-seconds allows ({max_seconds:g} s)")
    n = repeats or repetitions(seconds)
    marks = [event() for _ in range(n + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    marks[-1].synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
    median, deciles = statistics.median(times), statistics.quantiles(times, n=10, method="inclusive")
    return median, (deciles[8] - deciles[0]) / median, n


def entry(name, **values):
    return {"name": name, "run_name": name, "run_type": "iteration", "repetitions": 1, "repetition_index": 0, "threads": 1, **values}


def timed(name, median, spread, repetitions, **counters):
    fields = {"iterations": 1, "real_time": median, "cpu_time": 0.0, "time_unit": "ms", "spread_percent": 100 * spread, **counters}
    return entry(name, **{**fields, "repetitions": repetitions})


def failed(name, reason):
    return entry(name, error_occurred=True, error_message=reason)


def run_case(backend, case, tensors, options):
    """The entry of one case: checked, then timed. An error of the GPU itself ends the program: nothing after it would run."""
    name = f"peer/{backend}/{case.name()}"
    q, k, v = tensors
    try:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        launch, results = task(backend, case, options.layout, q, k, v)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        if case.direction == "fwd":
            extra -= results.numel() * results.element_size()
            error = check(case, q, k, v, results)
        else:  # O and dO are beside the gradients
            gradients, d_o = results
            extra -= sum(x.numel() * x.element_size() for x in (*gradients, d_o, d_o))
            error = check_gradients(case, q, k, v, d_o, gradients)
            del gradients, d_o
        del results
        with pinned(backend):
            median, spread, n = measure(launch, options.max_seconds, options.repeats)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return failed(name, "refused: out of memory: " + first_line(error))
    except (Refused, Skipped, Wrong) as error:
        options.wrong += isinstance(error, Wrong)
        return failed(name, f"{type(error).__name__.lower()}: {error}")
    counters = {"TFLOPS": case.flops() / median / 1e9, "extra_MiB": max(extra, 0) / 2**20, "rel_rms_error": error}
    if backend != "torch_math":  # a fused kernel's traffic is at best the compulsory one
        counters["hbm_GB_per_s"] = case.compulsory_bytes() / median / 1e6
    return timed(name, median, spread, n, **counters)


def copy_ceiling(name, options):
    """A device-to-device copy of 4 GiB, or of a quarter of the free memory; both directions count."""
    size = min(4 * 2**30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    target.copy_(source)
    median, spread, n = measure(lambda: target.copy_(source), options.max_seconds, options.repeats)
    return timed(name, median, spread, n, GB_per_s=2 * size / median / 1e6, label=f"{size / 2**30:.3g} GiB, read and written")


def matmul_ceiling(name, options, dtype, n=8192):
    """A matrix product of random normal n x n matrices."""
    a, b = (torch.randn(n, n, device=options.device, dtype=dtype) for _ in range(2))
    torch.matmul(a, b)
    median, spread, count = measure(lambda: torch.matmul(a, b), options.max_seconds, options.repeats)
    return timed(name, median, spread, count, TFLOPS=2.0 * n**3 / median / 1e9, label=f"{n} x {n} x {n}")


def ceilings(options):
    """What the GPU does at best: an entry each."""
    for name, make in (("peer/ceiling_copy", copy_ceiling),
                       ("peer/ceiling_bf16_matmul", lambda *given: matmul_ceiling(*given, torch.bfloat16)),
                       ("peer/ceiling_f32_matmul", lambda *given: matmul_ceiling(*given, torch.float32))):
        try:
            yield make(name, options)
        except torch.OutOfMemoryError as error:
            yield failed(name, "refused: out of memory: " + first_line(error))
        except Skipped as error:
            yield failed(name, f"skipped: {error}")
        torch.cuda.empty_cache()


# The workbook's own kernels ---------------------------------------------------------------------------------------------------


def beside(case, options):
    """The entries of `case` in the JSON that the benchmark program of --beside writes when it is asked for that case alone."""
    names = f"^step[0-9a-z]+/({options.variants})/{re.escape(case.name())}/"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "case.json")
        command = [options.beside, f"--benchmark_filter={names}", f"--benchmark_out={path}", f"--max-seconds={options.max_seconds:g}"]
        ran = subprocess.run(command + case_options(case), capture_output=True, text=True)
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except (OSError, ValueError):
            reason = first_line(ran.stderr) if ran.stderr.strip() else "it wrote no results"
            raise Wrong(f"{options.beside}: exit status {ran.returncode}: {reason}") from None
    options.wrong += ran.returncode == 1
    options.own_context = {**document["context"], **options.own_context}
    return document["benchmarks"]


def case_options(case):
    """The options by which a benchmark program gets that case alone."""
    sizes = {"batch": case.batch, "heads": case.heads, "kv-heads": case.kv_heads, "seq": case.seq, "kv-seq": case.kv_seq,
             "head-dim": case.head_dim, "dtype": case.dtype}
    if isinstance(case, PackedCase):
        sizes = {"lengths": case.path, **{name: sizes[name] for name in ("heads", "kv-heads", "head-dim", "dtype")}}
    return [f"--{name}={value}" for name, value in sizes.items()] + ["--causal"] * case.causal


# Which kernel ran ---------------------------------------------------------------------------------------------------------------


def profile(function):
    """Names of the kernels that `function` runs, the longest-running first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as result:
        function()
        torch.cuda.synchronize()
    durations = {}
    for event in result.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            durations[event.name] = durations.get(event.name, 0) + event.time_range.elapsed_us()
    return sorted(durations, key=durations.get, reverse=True)


def readable(kernel):
    """A kernel's name without its return type and parameters, cut to a sensible length."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.sub(r"\(.*$", "", name)[:100]


def owner(kernels):
    """The backend whose kernel is among `kernels`, "torch_math" when none is."""
    for backend, pattern in OWNERS:
        if any(pattern.search(kernel) for kernel in kernels):
            return backend
    return "torch_math"


def mismatch(backend, kernels):
    """Why `kernels` cannot be those of `backend`; None where they can. A name that no pattern knows is no proof of anything."""
    found = owner(kernels)
    expected = {backend}
    if backend == "flash_attn3":
        expected.add("flash_attn2")  # older releases name their kernels alike
    if found in expected or (found == "torch_math" and backend != "torch_math"):
        return None
    return f"wrong: another kernel than the pinned one ran: {found}'s {readable(kernels[0])}"


def verify(done, entries, options):
    """Profiles one case for each backend, type and direction (the first that was timed) and labels its entry with the kernels. Where they
    are another backend's, all entries of those become errors. After all timings: the profiler slows launches."""
    for (backend, dtype, direction), cases in done.items():
        case, label = cases[0], None
        try:
            tensors = inputs(case, options)
            launch = launcher(backend, case, *tensors) if direction == "fwd" else task(backend, case, options.layout, *tensors)[0]
            with pinned(backend):
                kernels = profile(launch)
        except Exception as error:  # the profiler may be missing rights or a library: the times stand, without names
            progress(f"{backend} {dtype}: kernel names not read: {first_line(error)}")
            continue
        if not kernels:
            progress(f"{backend} {dtype}: kernel names not read: the profiler saw none")
            continue
        label = "; ".join(readable(kernel) for kernel in kernels[:4])
        reason = mismatch(backend, kernels)
        progress(f"{backend} {dtype}: {label}")
        for index, old in enumerate(entries):
            names = {f"peer/{backend}/{c.name()}" for c in cases}
            if reason and old["name"] in names:
                entries[index] = failed(old["name"], reason)
            elif old["name"] == f"peer/{backend}/{case.name()}":
                old["label"] = label
        if reason:
            progress(f"{backend} {dtype}: {reason}")
            options.wrong += 1


# Program ------------------------------------------------------------------------------------------------------------------------


def driver_version():
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown: nvidia-smi does not answer"


def context(command, missing):
    """As Google Benchmark's, with its custom entries; no name of the host."""
    cudnn = torch.backends.cudnn.version()
    major, minor = torch.cuda.get_device_capability()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "executable": "bench/peers.py",
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "cudnn": "none" if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{backend: f"not measured: {why}" for backend, why in missing.items()},
        **{backend: str(getattr(importlib.import_module(package), "__version__", "version unknown"))
           for backend, package in PACKAGES.items() if package in sys.modules and backend not in missing},
        "command": command,
    }


def write(path, document):
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def number(kind, low, high, what):
    """A parser of numbers for argparse that says what is accepted."""

    def parse(word):
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f'"{word}": accepted is {what}')
        return value

    return parse


def parse_options(words):
    parser = argparse.ArgumentParser(prog="bench/peers.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    size = number(int, 1, 2**30, "a whole number from 1 to 2^30")
    cases = parser.add_argument_group("cases (they add up; without any: --sweep)")
    cases.add_argument("--sweep", action="store_true", help="16384 tokens, 2048/d heads, d = 64 and 128, N = 512 to 16384, full and "
                                                            "causal, bf16 and, where it is done, f32; and --gqa")
    cases.add_argument("--quick", action="store_true", help="of --sweep N = 1024 and 4096 in bf16 with d = 128")
    cases.add_argument("--gqa", action="store_true", help="B=4 Hq=32 Hkv=8 N=4096 d=128 bf16 causal")
    cases.add_argument("--decode", action="store_true", help="one query against B=1 to 128 caches of 512 to 131072 keys, Hq=32 Hkv=8 d=128 bf16")
    cases.add_argument("--varlen", metavar="FILE", help="a packed batch of sequences of the lengths in FILE, one a line; --heads, --kv-heads, "
                                                        "--head-dim, --dtype and --causal are this case's, in memory it is (N, H, d)")
    one = parser.add_argument_group("a single case (any of these makes one)")
    one.add_argument("--batch", type=size, metavar="B", help="default 1")
    one.add_argument("--heads", type=size, metavar="H", help="query heads; default 16")
    one.add_argument("--kv-heads", type=size, metavar="H", help="heads of K and V, a divisor of --heads; default --heads")
    one.add_argument("--seq", type=size, metavar="N", help="queries; default 4096")
    one.add_argument("--kv-seq", type=size, metavar="N", help="keys; default --seq")
    one.add_argument("--head-dim", type=size, metavar="d", help="default 128")
    one.add_argument("--dtype", choices=DTYPES, help="default bf16")
    one.add_argument("--causal", action="store_true", help="aligned to the bottom right")
    parser.add_argument("--backward", nargs="?", const="bwd,fwdbwd", choices=("bwd,fwdbwd", "bwd"), metavar="bwd",
                        help="gradients instead: of each case the backward pass alone, and both passes; with =bwd the former only")
    parser.add_argument("--only", metavar="REGEX", default="", help="of these cases the ones whose name, without the backend, it is found in")
    parser.add_argument("--backends", metavar="A,B", help="of " + ", ".join(PEERS) + "; default: all that are installed")
    parser.add_argument("--no-ceilings", action="store_true", help="leave out the copy and the matrix products")
    parser.add_argument("--repeats", type=number(int, 2, 10000, "a whole number from 2 to 10000"), metavar="N",
                        help="repeat each case so often; default: for 0.3 s, and 10 times where that takes no more than 1 s")
    parser.add_argument("--layout", choices=("bhnd", "bnhd"), default="bhnd", help="order in memory: (B, H, N, d), the default, or (B, N, H, d)")
    parser.add_argument("--beside", metavar="PROGRAM", help="a benchmark program of the workbook, build/gpu/bench/bench_stepNN: before each "
                                                            "case it times its kernels on it; --beside-out is needed too")
    parser.add_argument("--variants", metavar="REGEX", default="[^/]+", help="of --beside only these; default all")
    parser.add_argument("--beside-out", metavar="FILE", help="where to write what --beside measured")
    parser.add_argument("--max-seconds", type=number(float, 0.01, 3600, "0.01 to 3600"), default=10.0, metavar="S",
                        help="skip a case of which one run takes longer; default 10")
    parser.add_argument("--out", metavar="FILE", help="default: standard output. FILE.partial grows as cases end")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    options = parser.parse_args(words)

    if (options.beside is None) != (options.beside_out is None):
        parser.error("arguments --beside and --beside-out: accepted are both or neither")
    if options.beside and not os.access(options.beside, os.X_OK):
        parser.error(f"argument --beside: {options.beside}: accepted is a program; ./workbook bench builds them")
    for name in ("variants", "only"):
        try:
            re.compile(getattr(options, name))
        except re.error as error:
            parser.error(f'argument --{name}: "{getattr(options, name)}": not a regular expression: {error}')
    options.backend_list = list(PEERS)
    if options.backends is not None:
        options.backend_list = list(dict.fromkeys(options.backends.split(",")))
        for backend in options.backend_list:
            if backend not in PEERS:
                parser.error(f'argument --backends: "{backend}": accepted are {", ".join(PEERS)}')
    sizes = (options.batch, options.heads, options.kv_heads, options.seq, options.kv_seq, options.head_dim, options.dtype)
    single = options.causal or any(value is not None for value in sizes)
    options.cases, lengths = [], ()
    if options.varlen is not None:
        if options.batch or options.seq or options.kv_seq:
            parser.error("argument --varlen: --batch, --seq and --kv-seq are those of the file; leave them out")
        try:
            lengths = read_lengths(options.varlen)
        except (OSError, ValueError) as error:
            parser.error(f"argument --varlen: {options.varlen}: {getattr(error, 'strerror', None) or error}")
        options.layout = "bnhd"
    if single or lengths:
        heads, seq = options.heads or 16, sum(lengths) or options.seq or 4096
        kv_heads = options.kv_heads or heads
        if heads % kv_heads:
            parser.error(f"argument --kv-heads: {kv_heads}: accepted are divisors of --heads {heads}")
        size = (options.batch or 1, heads, kv_heads, seq, options.kv_seq or seq, options.head_dim or 128, options.dtype or "bf16", options.causal)
        options.cases.append(PackedCase(*size, sequences=len(lengths), lengths=lengths, path=options.varlen) if lengths else Case(*size))
    asked = set(options.cases)
    options.cases += quick() if options.quick else []
    options.cases += sweep() if options.sweep or not (options.cases or options.quick or options.gqa or options.decode) else []
    options.cases += grouped_heads() if options.gqa else []
    options.cases += decode() if options.decode else []
    options.cases = list(dict.fromkeys(options.cases))
    if options.backward:
        directions = options.backward.split(",")
        options.cases = [dataclasses.replace(case, direction=direction) for case in options.cases for direction in directions]
        asked = {dataclasses.replace(case, direction=direction) for case in asked for direction in directions}
    options.plan = [(case, [backend for backend in options.backend_list
                            if case.dtype != "f32" or case in asked or backend in ("torch_math", "torch_efficient")])
                    for case in options.cases]
    options.plan = [(case, backends) for case, backends in options.plan if backends]
    if not options.plan:
        parser.error(f"argument --backends: {options.backends}: none of them does any of the cases")
    options.plan = [(case, backends) for case, backends in options.plan if re.search(options.only, case.name())]
    if not options.plan:
        parser.error(f'argument --only: "{options.only}": found in the name of none of the cases')
    return options


def available(options):
    """Takes backends whose package is not there out of the plan. Returns {backend: reason}; ends the program when one was asked for."""
    missing = {}
    for backend, package in PACKAGES.items():
        if backend not in options.backend_list:
            continue
        try:
            importlib.import_module(package).flash_attn_func
        except Exception as error:  # a package built for another PyTorch raises anything
            missing[backend] = f"{package}: {first_line(error)}"
    if options.backends is not None and missing:
        backend, why = next(iter(missing.items()))
        progress(f"peers.py: --backends {backend}: {why}")
        sys.exit(3)
    options.plan = [(case, [backend for backend in backends if backend not in missing]) for case, backends in options.plan]
    return missing


def stop_by_signal(number, _):
    raise Stopped(f"by signal {number}")


def run_all(options, entries, add):
    """Measures the ceilings and all cases of the plan; add() takes each entry as it comes."""
    if not options.no_ceilings:
        for new in ceilings(options):
            add(new, "ceiling")
    total, count, done = sum(len(backends) for _, backends in options.plan), 0, {}
    for case, backends in options.plan:
        if options.beside:
            for own in beside(case, options):
                options.own.append(own)
                progress(f"{own['name']}: " + (own.get("error_message") or f"{own['TFLOPS']:.1f} TFLOPS"))
        try:
            tensors = inputs(case, options)
        except torch.OutOfMemoryError as error:
            tensors, reason = None, "refused: out of memory: " + first_line(error)
            torch.cuda.empty_cache()
        for backend in backends:
            count += 1
            new = run_case(backend, case, tensors, options) if tensors else failed(f"peer/{backend}/{case.name()}", reason)
            add(new, f"{count}/{total}")
            if "error_occurred" not in new:
                done.setdefault((backend, case.dtype, case.direction), []).append(case)
        tensors = None
    verify(done, entries, options)


def main(words):
    global torch
    options = parse_options(words)
    if options.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads it may have seen enough
        for case, backends in options.plan:
            for backend in backends:
                print(f"peer/{backend}/{case.name()}")
        return 0
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.nn.attention").sdpa_kernel
    except (ImportError, AttributeError, OSError) as error:
        progress(f"peers.py: PyTorch 2.5 or later is needed: {first_line(error)}")
        return 3
    if not torch.cuda.is_available():
        progress("peers.py: PyTorch sees no usable GPU; there is nothing to time without one")
        return 3
    options.device, options.wrong = torch.device("cuda"), 0
    options.own, options.own_context = [], {}
    torch.set_float32_matmul_precision("highest")  # no TF32 in the f32 matrix products of the math backend
    missing = available(options)
    for backend, why in missing.items():
        progress(f"{backend} is left out: {why}")

    document = {"context": context(os.environ.get("WORKBOOK_COMMAND") or shlex.join(["bench/peers.py", *words]), missing), "benchmarks": []}
    entries = document["benchmarks"]
    partial = options.out and options.out + ".partial"

    def add(new, ordinal):
        entries.append(new)
        if "error_occurred" in new:
            result = "error: " + new["error_message"]
        else:
            rate = f"{new['TFLOPS']:8.1f} TFLOPS" if "TFLOPS" in new else f"{new['GB_per_s']:8.0f} GB/s"
            result = f"{new['real_time']:9.4f} ms {rate}"
        progress(f"[{ordinal}] {new['name']}: {result}")
        if partial:
            write(partial, document)

    signal.signal(signal.SIGTERM, stop_by_signal)
    signal.signal(signal.SIGINT, stop_by_signal)
    try:
        if partial:
            write(partial, document)
        try:
            run_all(options, entries, add)
        except Wrong as error:  # --beside
            progress(f"peers.py: stopped: {error}")
            options.wrong += 1
        except (Stopped, RuntimeError) as error:  # a RuntimeError is CUDA's: after it nothing that follows can be trusted
            why = str(error) if isinstance(error, Stopped) else "the GPU failed: " + first_line(error)
            progress(f"peers.py: stopped: {why}")
            options.wrong += 1
            begun = {old["name"] for old in entries}
            names = [f"peer/{backend}/{case.name()}" for case, backends in options.plan for backend in backends]
            left = [name for name in names if name not in begun]
            if left and isinstance(error, RuntimeError):
                entries.append(failed(left.pop(0), f"failed: {first_line(error)}"))
            entries += [failed(name, f"skipped: not begun: stopped: {why}") for name in left]
        write(options.out, document)
        if options.beside:
            own_context = {key: value for key, value in options.own_context.items() if key not in NOT_OF_THE_GPU}
            write(options.beside_out, {"context": {**own_context, "command": document["context"]["command"]}, "benchmarks": options.own})
        if partial:
            os.remove(partial)
    except OSError as error:
        progress(f"peers.py: {error.filename or 'standard output'}: {error.strerror}")
        return 2
    return 1 if options.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
