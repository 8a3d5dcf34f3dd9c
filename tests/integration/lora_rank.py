"""One gloo rank of test_lora: adapters of a column- and a row-parallel layer against plain torch on whole matrices.

python -m tests.integration.lora_rank JOB.json RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slimx.config.schema import Config
from tests.integration.rank_start import join, leave

TOKENS, WIDTH, INNER, RANK, ALPHA, SEED = 6, 16, 24, 4, 8.0, 5


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    config = Config.model_validate(
        {
            "run": {"dir": job["out"]},
            "model": {"path": "m"},
            "trainer": job["layout"],
            "rollout": {"prompts": "p"},
        }
    )
    parallel = join(config.trainer, rank, job["init_method"])
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from slimx.adapters.megatron.layers import NormColumnParallelLinear
    from slimx.trainer.model.lora import Adapter

    size = config.trainer.tensor
    settings = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        normalization="RMSNorm",
        tensor_model_parallel_size=size,
        sequence_parallel=size > 1,
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    common = {"config": settings, "init_method": torch.nn.init.zeros_, "bias": False, "skip_bias_add": True}
    column = NormColumnParallelLinear(WIDTH, INNER, gather_output=False, **common)
    row = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, **common)
    adapters = [Adapter(layer, RANK, ALPHA, sources=name, seed=SEED) for name, layer in (("c", column), ("r", row))]
    starts = {"a": whole(column.lora_a, None), "ra": whole(row.lora_a, 1)}

    random = torch.Generator().manual_seed(1)
    shapes = {"w": (INNER, WIDTH), "rw": (WIDTH, INNER), "b": (INNER, RANK), "rb": (WIDTH, RANK), "n": (WIDTH,)}
    held = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()} | starts
    x, aim = (torch.randn(TOKENS, 1, WIDTH, generator=random) for _ in range(2))

    def part(value: torch.Tensor, dim: int) -> torch.Tensor:
        return value.chunk(size, dim)[rank]

    own = {
        column.weight: part(held["w"], 0),
        column.layer_norm_weight: held["n"],
        column.lora_b: part(held["b"], 0),
        row.weight: part(held["rw"], 1),
        row.lora_b: held["rb"],
    }
    with torch.no_grad():
        for parameter, value in own.items():
            parameter.copy_(value)
    for layer in (column, row):
        layer.weight.requires_grad_(False)
    column.layer_norm_weight.requires_grad_(False)
    out = row(torch.tanh(column(part(x, 0))[0]))[0]
    (out * part(aim, 0)).sum().backward()
    for layer in (column, row):
        for parameter in (layer.lora_a, layer.lora_b):
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)  # as megatron-core's finalize_model_grads

    leaves = {name: held[name].clone().requires_grad_() for name in ("a", "b", "ra", "rb")}
    scale = ALPHA / RANK
    normed = x / (x.square().mean(-1, keepdim=True) + settings.layernorm_epsilon).sqrt() * held["n"]
    inner = torch.tanh(normed @ held["w"].T + scale * (normed @ leaves["a"].T) @ leaves["b"].T)
    expected = inner @ held["rw"].T + scale * (inner @ leaves["ra"].T) @ leaves["rb"].T
    (expected * aim).sum().backward()
    got = {
        "out": (out, part(expected, 0)),
        "a": (column.lora_a.grad, leaves["a"].grad),
        "b": (column.lora_b.grad, part(leaves["b"].grad, 0)),
        "ra": (row.lora_a.grad, part(leaves["ra"].grad, 1)),
        "rb": (row.lora_b.grad, leaves["rb"].grad),
    }
    merged = [torch.empty_like(layer.weight) for layer in (column, row)]
    for adapter, into in zip(adapters, merged, strict=True):
        adapter.merge(into)
    got["merged"] = merged[0], part(held["w"] + scale * held["b"] @ held["a"], 0)
    got["rmerged"] = merged[1], part(held["rw"] + scale * held["rb"] @ held["ra"], 1)
    said = {
        "errors": {k: float((mine - his).abs().max() / his.abs().max()) for k, (mine, his) in got.items()},
        "frozen": [
            layer.weight.grad is None and torch.equal(layer.weight, own[layer.weight]) for layer in (column, row)
        ],
        "starts": {name: value.tolist() for name, value in starts.items()},
    }
    (Path(job["out"]) / f"{rank}.json").write_text(json.dumps(said))
    leave(parallel)


def whole(parameter: object, dim: int | None) -> object:
    """A parameter, of which every rank has a part along `dim`; None: all of it."""
    import torch
    import torch.distributed as dist

    value = parameter.detach().clone()
    if dim is None:
        return value
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return torch.cat(parts, dim)


if __name__ == "__main__":
    main()
