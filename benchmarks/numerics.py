"""Exact mode against torch's stock operations: single linears, a decoding step and a training step of a dense decoder.

    python benchmarks/numerics.py [--hidden 512] [--layers 6] [--rounds 7] [--threads 1]

Both sides run in this process, in turns; times are the best of all rounds, since a machine that others use can only be
slower. The decoder has the matrices of a dense Qwen3 without a server or trainer around it: what is compared is what
exact mode changes. Every attention of a decoding step reads 256 keys; a training step is two sequences of 256 tokens,
forward and backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from machine import surroundings
from quantities import positive

from slimx.extras.exact import operations as exact
from slimx.numerics.attention import packed_attention

KEYS = 256
HEAD = 64
BATCHES = (1, 16, 64)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rope(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cosine, sine = (t[:, None] for t in table[positions].to(query.dtype).chunk(2, dim=1))

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)

    return turned(query), turned(key)


def plain_decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes attention with one query per sequence [B, heads, d] to keys and values [B, KEYS, groups, d], one
    sequence after the other, as SGLang's torch backend does."""
    parts = [
        F.scaled_dot_product_attention(
            q[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale, enable_gqa=True
        )[0, :, 0]
        for q, k, v in zip(query, keys, values, strict=True)
    ]
    return torch.stack(parts)


def exact_decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    flat = [t.flatten(0, 1) for t in (keys, values)]
    begin = torch.arange(len(query)) * KEYS
    index = torch.arange(len(flat[0]), dtype=torch.int32)
    return exact.gathered_attention(query, *flat, index, begin, torch.full_like(begin, KEYS), scale)


STOCK = SimpleNamespace(
    linear=F.linear,
    norm=lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    rope=plain_rope,
    gated=swiglu,
    decode=plain_decode,
    attend=lambda q, k, v, lengths, scale: packed_attention(q, k, v, lengths, scale),
    logprobs=lambda x: torch.log_softmax(x.float(), dim=-1),
)
EXACT = SimpleNamespace(
    linear=exact.linear,
    norm=lambda x, w: exact.rms_norm(x, w, 1e-6),
    rope=exact.rope,
    gated=exact.silu_and_mul,
    decode=exact_decode,
    attend=lambda q, k, v, lengths, scale: exact.attention(
        q, k, v, torch.tensor([0, *lengths]).cumsum(0), scale
    ).flatten(1),
    logprobs=exact.log_softmax,
)


class Decoder:
    """Dense layers of size `hidden`, with heads of 64 in groups of four and an inner size of three times `hidden`."""

    def __init__(self, hidden: int, layers: int, dtype: torch.dtype):
        self.heads, self.groups = hidden // HEAD, max(1, hidden // HEAD // 4)
        shapes = {
            "qkv": ((self.heads + 2 * self.groups) * HEAD, hidden),
            "out": (hidden, self.heads * HEAD),
            "up": (6 * hidden, hidden),
            "down": (hidden, 3 * hidden),
        }
        self.layers = [
            {name: (torch.randn(shape) * shape[1] ** -0.5).to(dtype) for name, shape in shapes.items()}
            for _ in range(layers)
        ]
        self.ones = torch.ones(hidden, dtype=dtype)
        self.table = exact.rope_table(exact.rope_frequencies(HEAD, 10000.0), 2 * KEYS)
        self.vocabulary = (torch.randn(8192, hidden) * hidden**-0.5).to(dtype)

    def run(self, ops: SimpleNamespace, x: torch.Tensor, positions: torch.Tensor, attend: Callable) -> torch.Tensor:
        """Returns the log-probs of x [T, hidden]. `attend`: function of query, key and value [T, heads or groups,
        64]."""
        for layer in self.layers:
            qkv = ops.linear(ops.norm(x, self.ones), layer["qkv"]).view(len(x), -1, HEAD)
            query, key, value = qkv.split([self.heads, self.groups, self.groups], dim=1)
            mixed = attend(*ops.rope(query, key, self.table, positions), value)
            x = x + ops.linear(mixed.flatten(1), layer["out"])
            x = x + ops.linear(ops.gated(ops.linear(ops.norm(x, self.ones), layer["up"])), layer["down"])
        return ops.logprobs(ops.linear(ops.norm(x, self.ones), self.vocabulary))


def decoding(model: Decoder, batch: int, hidden: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x, positions = torch.randn(batch, hidden).to(dtype), torch.full((batch,), KEYS)
    keys, values = torch.randn(2, batch, KEYS, model.groups, HEAD).to(dtype).unbind()

    def step(ops: SimpleNamespace) -> torch.Tensor:
        with torch.no_grad():
            return model.run(ops, x, positions, lambda q, k, v: ops.decode(q, keys, values, HEAD**-0.5))

    return {"stock": lambda: step(STOCK), "exact": lambda: step(EXACT)}


def training(model: Decoder, hidden: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x, positions = torch.randn(2 * KEYS, hidden).to(dtype), torch.arange(KEYS).repeat(2)
    weights = [model.vocabulary, model.ones, *(w for layer in model.layers for w in layer.values())]

    def step(ops: SimpleNamespace) -> None:
        for weight in weights:
            weight.requires_grad_().grad = None
        out = model.run(ops, x, positions, lambda q, k, v: ops.attend(q, k, v, [KEYS, KEYS], HEAD**-0.5))
        out[:, 0].sum().backward()

    return {"stock": lambda: step(STOCK), "exact": lambda: step(EXACT)}


def single(rows: int, columns: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(columns, width).to(dtype)

    def step(linear: Callable) -> torch.Tensor:
        with torch.no_grad():
            return linear(x, weight)

    return {"stock": lambda: step(F.linear), "exact": lambda: step(exact.linear)}


def best(sides: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Calls the sides alternately for `rounds` times `seconds`; returns the seconds of each side's fastest call."""
    found = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, call in sides.items():
            end = time.perf_counter() + seconds / len(sides)
            while True:
                began = time.perf_counter()
                call()
                now = time.perf_counter()
                found[name] = min(found[name], now - began)
                if now >= end:
                    break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    hidden = options.hidden
    print(surroundings("torch"))
    print(f"hidden {hidden}, {options.layers} layers, {options.threads} threads; best of {options.rounds} rounds")
    print("| | stock, ms | exact, ms | speed of exact to stock |\n| --- | --- | --- | --- |")
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        cases = {
            f"{kind} linear {hidden} x {width}, {rows} rows": single(rows, hidden, width, dtype)
            for width in (hidden, 3 * hidden)
            for rows in (1, 16, 64, 1024)
        }
        model = Decoder(hidden, options.layers, dtype)
        cases |= {f"{kind} decoding step, batch {n}": decoding(model, n, hidden, dtype) for n in BATCHES}
        cases[f"{kind} training step, {2 * KEYS} tokens"] = training(model, hidden, dtype)
        for name, sides in cases.items():
            took = best(sides, options.rounds, 0.05)
            stock, ours = (1e3 * took[side] for side in ("stock", "exact"))
            print(f"| {name} | {stock:.3f} | {ours:.3f} | {stock / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
