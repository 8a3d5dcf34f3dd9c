"""Tokens per second of a real SGLang server in exact mode and in fast mode, one after the other.

    python benchmarks/numerics_server.py [--hidden 512] [--layers 6] [--experts 0] [--dtype bfloat16] [--tokens 32]

A Qwen3, or with --experts a Qwen3-MoE, with random weights; each server has one thread. Requests of 32 prompt tokens
come 1, 16 and 64 at a time and ask for log-probs; the best of three rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import torch
from machine import surroundings
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slimx.ports import free_port
from slimx.rollout.engine import Engine
from slimx.rollout.spec import EngineSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.quickstart.make_model import CONFIG, make_tokenizer  # noqa: E402

BATCHES = (1, 16, 64)
PROMPT = 32
START_S = 120


def make_model(out: Path, hidden: int, layers: int, experts: int) -> None:
    """The quickstart's model in another size, with 8,192 token ids."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "head_dim": 64, "intermediate_size": 3 * hidden}
    sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "vocab_size": 8192}
    if experts:
        moe = {"num_experts": experts, "moe_intermediate_size": hidden // 2, "initializer_range": 0.02}
        config, classes = CONFIG | sizes | moe, (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    else:
        kept = {key: value for key, value in CONFIG.items() if "expert" not in key and "moe" not in key}
        name = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "initializer_range": 0.02}
        config, classes = kept | sizes | name, (Qwen3Config, Qwen3ForCausalLM)
    torch.manual_seed(0)
    classes[1](classes[0](**config)).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config))
    make_tokenizer().save_pretrained(out)


async def throughput(url: str, batch: int, tokens: int) -> float:
    """Sampled tokens per second, the best of three rounds of `batch` requests at once."""
    random, best = np.random.default_rng(batch), 0.0
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}

    async def post(session: aiohttp.ClientSession) -> int:
        body = {"input_ids": random.integers(4, 8000, PROMPT).tolist(), "sampling_params": sampling}
        async with session.post(f"{url}/generate", json=body | {"return_logprob": True}) as response:
            response.raise_for_status()
            return len((await response.json())["meta_info"]["output_token_logprobs"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        for _ in range(3):
            began = time.perf_counter()
            sampled = sum(await asyncio.gather(*(post(session) for _ in range(batch))))
            best = max(best, sampled / (time.perf_counter() - began))
    return best


async def serve(model: Path, dtype: str, leaves: int | None, tokens: int, log: Path, *, moe: bool) -> list[float]:
    """Tokens per second for each of BATCHES of one server, which is started and stopped here."""
    spec = EngineSpec(
        *("measured", str(model), dtype, "cpu", free_port()),
        max_total_tokens=16384,
        routed_experts=moe,
        exact_leaves=leaves,
    )
    engine = Engine(spec, log)
    engine.start()
    try:
        await engine.wait_ready(START_S)
        return [await throughput(spec.url, batch, tokens) for batch in BATCHES]
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    print(surroundings("torch", "sglang"))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, options.hidden, options.layers, options.experts)
        found = {}
        for mode, leaves in (("fast", None), ("exact", 1)):
            log = Path(folder) / f"{mode}.log"
            run = serve(model, options.dtype, leaves, options.tokens, log, moe=options.experts > 0)
            found[mode] = asyncio.run(run)
            print(f"{mode}: {[round(n) for n in found[mode]]} tokens/s at batch {BATCHES}", flush=True)
    ratios = [exact / fast for fast, exact in zip(found["fast"], found["exact"], strict=True)]
    print(f"exact / fast: {[round(ratio, 2) for ratio in ratios]}")


if __name__ == "__main__":
    main()
