"""A GRPO step of the trainer on one GPU: time, tokens and FLOPs per second, peak memory, and how often the host waits.

    python benchmarks/trainer_cuda.py [--steps 10] [--models tiny wide] [--device cuda]

Random weights and rollouts; `tiny` is the quickstart's size in fp32, `wide` has hidden size 1024 and 0.5 billion
parameters in bf16. FLOPs are those of `slimx.models.flops`: none for what recomputation computes again.
A wait is a call in which the host stops until the GPU has done its queue (torch's sync debug mode, in one more step).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from quantities import positive

from slimx.data.batch import MicroBatch, TrainingRow  # noqa: E402
from slimx.data.packing import pack  # noqa: E402
from slimx.runtime.ports import free_port  # noqa: E402
from slimx.trainer.process import install_adapters, prepare_process  # noqa: E402

FAMILY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
WIDE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
# Sizes, dtype, rollouts of a step, their shortest and longest, tokens of a micro-batch.
MODELS: dict[str, tuple[dict[str, Any], str, int, tuple[int, int], int]] = {
    "tiny": (TINY, "float32", 256, (16, 64), 8192),
    "wide": (WIDE, "bfloat16", 64, (256, 2048), 16384),
}
WARMUP = 3
VERSION = 1


def write_checkpoint(path: Path, hf: dict[str, Any]) -> None:
    """Writes random weights in bf16: standard deviation 0.02 around 0, norms 1."""
    import torch
    from safetensors.torch import save_file

    from slimx.models.families import read_model

    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    shapes = read_model(path).table.checkpoint_shapes()
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(std=0.02)
        for name, shape in shapes.items()
    }
    save_file({name: value.to(torch.bfloat16) for name, value in tensors.items()}, path / "model.safetensors")


def rollouts(count: int, lengths: tuple[int, int], vocab_size: int, max_tokens: int) -> tuple[list[MicroBatch], int]:
    """Returns the micro-batches of a step and their number of tokens. Three quarters of each rollout are trained."""
    random, rows = np.random.default_rng(1), []
    for length in random.integers(*lengths, count):
        tokens = random.integers(1, vocab_size, length + 1)
        trained = np.arange(length) >= length // 4
        rows.append(
            TrainingRow(
                tokens=tokens[:-1],
                labels=tokens[1:],
                weight=(trained / 1e3).astype(np.float32),
                advantages=np.full(length, random.normal(), np.float32),
                rollout_logprobs=np.full(length, -np.log(vocab_size), np.float32),
                versions=np.where(trained, VERSION, -1),
                temperature=np.ones(length, np.float32),
                routed_experts=None,
            )
        )
    batch = pack(rows, data_size=1, max_tokens=max_tokens)
    return batch.shards[0], batch.tokens


def measure(name: str, steps: int, parallel: Any, directory: Path) -> None:
    """Builds one model, trains it and prints its line."""
    import torch

    from slimx.config.schema import Config
    from slimx.models.families import read_model
    from slimx.models.flops import sequence_flops
    from slimx.trainer.trainer import PolicyTrainer

    sizes, dtype, count, lengths, max_tokens = MODELS[name]
    hf, cuda = {**FAMILY, **sizes}, parallel.device.type == "cuda"
    write_checkpoint(directory / name, hf)
    config = Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": str(directory / name)},
            "numerics": {"dtype": dtype},
            "trainer": {"max_tokens_per_microbatch": max_tokens, "optimizer": {"lr": 1e-6}},
            "rollout": {"prompts": "none"},
            "schedule": {"steps": 1000},
        }
    )
    spec = read_model(directory / name)
    trainer = PolicyTrainer(config, spec, parallel)
    built = torch.cuda.memory_allocated() if cuda else 0
    batches, tokens = rollouts(count, lengths, hf["vocab_size"], max_tokens)
    flops = sequence_flops(spec.transformer, spec.vocab_size, spec.layer_kind)
    work = sum(flops(length) for batch in batches for length in batch.lengths)

    def step(number: int) -> float:
        began = time.perf_counter()
        trainer.train_step(batches, step=number, version=VERSION)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for number in range(WARMUP):
        step(number)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = [step(WARMUP + number) for number in range(steps)]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    parameters = sum(p.numel() for p in trainer.weights.parameters.values())
    middle = median(taken)
    print(
        f"{name:6}{parameters / 1e6:10.1f}{dtype:>10}{len(batches):8}{tokens:9}{middle * 1e3:10.1f}"
        f" ({min(taken) * 1e3:.1f} to {max(taken) * 1e3:.1f}){tokens / middle:12.0f}{work / middle / 1e12:10.2f}"
        f"{built / 2**20:10.0f}{peak / 2**20:10.0f}{waits(lambda: step(WARMUP + steps)) if cuda else 0:8}",
        flush=True,
    )


def waits(step: Any) -> int:
    """Counts how often the host waits for the GPU in one step. torch counts its waits, but not those inside NCCL."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    prepare_process(options.device, shares_layers=False, local=True)
    adapters = install_adapters()
    import torch

    from slimx.layout.ranks import Sizes
    from slimx.trainer.parallel import ParallelState

    device = torch.device(options.device)
    parallel = ParallelState(
        Sizes(), rank=0, init_method=f"tcp://127.0.0.1:{free_port()}", device=device, deadline_s=120, seed=1
    )
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{machine}, torch {torch.__version__}, adapters {', '.join(adapters)}; {options.steps} steps")
    print(
        f"{'model':6}{'10^6 par.':>10}{'dtype':>10}{'batches':>8}{'tokens':>9}{'step ms (range)':>28}{'tokens/s':>12}"
        f"{'TFLOP/s':>10}{'MiB held':>10}{'MiB peak':>10}{'waits':>8}"
    )
    with tempfile.TemporaryDirectory() as directory:
        for name in options.models:
            measure(name, options.steps, parallel, Path(directory))
    parallel.destroy()


if __name__ == "__main__":
    main()
