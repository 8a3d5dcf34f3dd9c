"""Tokens per second of a real SGLang server in exact mode and in fast mode, one after the other.

    python benchmarks/numerics_server.py [--size hidden512] [--experts] [--fp8] [--dtype bfloat16] [--tokens 32]

A Qwen3, or with --experts a Qwen3-MoE of 8 experts, with random weights (numerics_model.py); each server has one
thread. Requests of 32 prompt tokens come 1, 16 and 64 at a time (--batches) and ask for log-probs; the best of three
rounds counts. With --fp8 both are in exact mode, the second one with weights in blocks of fp8.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
from machine import surroundings
from numerics_model import SIZES, make_model
from quantities import positive

from slimx.engines.server.engine import Engine
from slimx.engines.server.keys import bearer
from slimx.engines.server.spec import EngineSpec
from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.extras.exact.mode import Exact
from slimx.numerics.mode import NumericsMode

PROMPT = 32
START_S = 120


async def throughput(spec: EngineSpec, batch: int, tokens: int, ids: int) -> float:
    """Returns sampled tokens per second, the best of three rounds of `batch` concurrent requests. Prompts contain token
    ids below `ids`."""
    random, best = np.random.default_rng(batch), 0.0
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}

    async def post(session: aiohttp.ClientSession) -> int:
        body = {"input_ids": random.integers(4, ids, PROMPT).tolist(), "sampling_params": sampling}
        async with session.post(f"{spec.url}/generate", json=body | {"return_logprob": True}) as response:
            response.raise_for_status()
            return len((await response.json())["meta_info"]["output_token_logprobs"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120), headers=bearer(spec.keys.api_key)) as session:
        for _ in range(3):
            began = time.perf_counter()
            sampled = sum(await asyncio.gather(*(post(session) for _ in range(batch))))
            best = max(best, sampled / (time.perf_counter() - began))
    return best


async def serve(
    model: Path, dtype: str, leaves: int | None, tokens: int, ids: int, log: Path, *, batches: list[int], moe: bool
) -> list[float]:
    """Starts a server, measures its tokens per second for each of `batches`, and stops it."""
    spec = EngineSpec(
        *("measured", str(model), dtype, "cpu"),
        max_total_tokens=16384,
        routed_experts=moe,
        numerics=NumericsMode() if leaves is None else Exact(leaves),
    )
    engine = Engine(spec, log)
    try:
        await engine.start(START_S)
        return [await throughput(engine.spec, batch, tokens, ids) for batch in batches]
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="hidden512")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="compare exact mode with weights in fp8 and in bfloat16")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 16, 64], help="requests at a time")
    options = parser.parse_args()
    print(surroundings("torch", "sglang"))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        ids = make_model(model, options.size, experts=options.experts)
        compared: dict[str, tuple[Path, int | None]] = {"fast": (model, None), "exact": (model, 1)}
        if options.fp8:
            convert(run.hf_to_fp8(model), Path(folder) / "fp8", threads=1, verify=False)
            compared = {"exact": (model, 1), "exact in fp8": (Path(folder) / "fp8", 1)}
        found = {}
        for mode, (path, leaves) in compared.items():
            log = Path(folder) / f"{mode}.log"
            served = serve(
                path, options.dtype, leaves, options.tokens, ids, log, batches=options.batches, moe=options.experts
            )
            found[mode] = asyncio.run(served)
            print(f"{mode}: {[round(n) for n in found[mode]]} tokens/s at batch {options.batches}", flush=True)
    (before, first), (after, second) = found.items()
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    print(f"{after} / {before}: {[round(ratio, 2) for ratio in ratios]}")


if __name__ == "__main__":
    main()
