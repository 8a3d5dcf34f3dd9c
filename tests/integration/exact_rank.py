"""One gloo rank of test_exact: the gap between log-probs that came from elsewhere and those of this rank's layouts.

The job has `groups`, each a `model`, its `dtype`, `completions` (prompt, tokens, logprobs, temperature of each) and
`cases` in order: a `trainer` section, `leaves`, `threads` of each rank, and what is spoilt (`spoil`). Completions
without log-probs take those of the first case, which is one rank's. The result lists the cases' gap metrics, group by
group; {} where this rank has none. A case may have a `model` of its own. Of a case with `gradients` (the numerics.mode
in which they are computed), GROUP-CASE.safetensors has those of one step, and GROUP-CASE.RANK.json the keys of a
checkpoint. `quantize` of a group or of one case: the rule by which engines hold blocks of fp8; with `follows` the
metrics say by occasion whether what the rank computes with changes with its weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Span, Trajectory
from tests.integration.rank_start import enter, join, leave
from tests.integration.saving import begin_save, finish_save
from tests.processes import wait_for

VERSION = 1
"""The weight version that sampled every token."""


def trajectories(completions: list[dict[str, Any]]) -> list[Trajectory]:
    out = []
    for number, one in enumerate(completions):
        prompt, tokens = one["prompt"], one["tokens"]
        first, length = len(prompt), len(prompt) + len(tokens)
        logprobs = np.full(length, np.nan, np.float32)
        logprobs[first:] = one.get("logprobs", 0.0)
        out.append(
            Trajectory(
                id=str(number),
                rollout_id=str(number),
                group_id=str(number),
                index=0,
                token_ids=np.array([*prompt, *tokens], np.int32),
                loss_mask=np.array([0] * first + [1] * len(tokens), np.uint8),
                logprobs=logprobs,
                spans=[
                    Span(start=0, stop=first, source="prompt"),
                    Span(start=first, stop=length, source="sampled", version=VERSION),
                ],
                sampling={"temperature": one["temperature"]},
            )
        )
    return out


def config(group: dict[str, Any], case: dict[str, Any], out: Path, mode: str = "exact") -> Config:
    trainer = {
        "max_tokens_per_microbatch": 150,
        "logprob_chunk_tokens": 64,
        "distributed_optimizer": False,  # every rank then holds whole gradients
        "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
        **case["trainer"],
    }
    longest = max(len(one["prompt"]) + len(one["tokens"]) for one in group["completions"])
    trainer["max_tokens_per_microbatch"] = max(trainer["max_tokens_per_microbatch"], longest + 8)
    exact = {"mode": "exact", "leaves": case.get("leaves")} if mode == "exact" else {}
    rule = case.get("quantize", group.get("quantize"))
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": case.get("model", group["model"])},
            "numerics": {"dtype": group["dtype"], **exact},
            "trainer": trainer,
            "rollout": {"prompts": "p", "engines": [{"model": group["model"]}]},
            "publish": {"quantize": rule},
            "reward": {"function": "tests.integration.hooks.digits"},
        }
    )


def backwards(query: Any, key: Any, value: Any, bounds: Any, scale: float, **_: Any) -> Any:
    """Exact mode's attention of a pack, but each row reads its keys from the last to the first."""
    import torch

    from slimx.extras.exact.operations import gathered_attention

    last, place = len(query) - 1, torch.arange(len(query))
    first = bounds[torch.searchsorted(bounds, place, right=True) - 1]
    return gathered_attention(query, key, value, (last - place).int(), last - place, place - first + 1, scale)


@contextmanager
def spoilt(what: str | None) -> Iterator[None]:
    """One operation of the trainer as torch has it, or (`attention order`) in another order."""
    import torch.nn.functional as F

    from slimx.numerics.attention import packed_attention
    from slimx.numerics.norm import rms_norm

    plain = {
        "rms_norm": ("slimx.extras.exact.adapters.megatron.layers.ExactNormColumn.norm", staticmethod(rms_norm)),
        "linear": (
            "slimx.extras.exact.adapters.megatron.layers._Column._forward_impl",
            lambda self, input, weight, *_, **__: F.linear(input, weight),
        ),
        "silu_and_mul": (
            "slimx.extras.exact.operations.silu_and_mul",
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        ),
        "attention order": ("slimx.extras.exact.operations.attention", backwards),
        "attention": (
            "slimx.extras.exact.operations.attention",
            lambda q, k, v, bounds, scale, **_: packed_attention(q, k, v, bounds.diff().tolist(), scale),
        ),
    }
    if what not in plain:
        yield
        return
    with mock.patch(*plain[what]):
        yield


def gap(group: dict[str, Any], case: dict[str, Any], known: list[Trajectory], out: Path, parallel: Any) -> Any:
    """Gap metrics; without log-probs in `known`, the log-probs of this one rank are taken for them first."""
    import torch

    from slimx.models.families import read_model
    from slimx.orchestration.batches import make_packer
    from slimx.trainer.trainer import PolicyTrainer

    torch.set_num_threads(case.get("threads", 1))
    settings = config(group, case, out)
    spec = read_model(settings.model.path)
    with spoilt(case.get("spoil")):
        trainer = PolicyTrainer(settings, spec, parallel)
        if case.get("spoil") == "weights":
            weight = trainer.weights.parameters["decoder.final_layernorm.weight"]
            with torch.no_grad():
                weight.copy_(torch.nextafter(weight, weight + 1))
        weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in known]
        rows = make_rows(known, [0.0] * len(known), weights)
        batches = make_packer(settings, spec, parallel.sizes)(rows).shards[parallel.coordinates.data]
        if "logprobs" not in group["completions"][0]:
            for batch, values in zip(batches, trainer.logprobs(batches), strict=True):
                for row, part in zip(batch.rows, np.split(values, np.cumsum(batch.lengths)[:-1]), strict=False):
                    known[row].logprobs[1:] = part[: len(known[row].token_ids) - 1]
            return {}
        return trainer.measure_gap(batches, version=VERSION)


def follows(
    group: dict[str, Any], case: dict[str, Any], known: list[Trajectory], out: Path, parallel: Any
) -> dict[str, bool]:
    """Whether rounded weights change with the weights that they stand for, by occasion."""
    import torch

    from slimx.models.families import read_model
    from slimx.orchestration.batches import make_packer
    from slimx.trainer.trainer import PolicyTrainer

    settings, spec = config(group, case, out), read_model(group["model"])
    trainer = PolicyTrainer(settings, spec, parallel)
    weights, facts = trainer.weights, {}
    (served,) = (refresh.__self__ for refresh in weights.derived)

    def fresh() -> bool:
        now = {name: value.clone() for name, value in served.values.items()}
        served.refresh()
        return all(torch.equal(now[name], value) for name, value in served.values.items())

    first, copy = weights.snapshot(), weights.snapshot()
    for name in served.values:
        copy[name].mul_(1.5)
    with weights.switching() as switch:
        switch(copy)
        facts["others"] = fresh() and not torch.equal(copy[name], first[name])
    facts["back"] = fresh()
    rows = make_rows(known, [(-1.0) ** number for number in range(len(known))], loss_weights(known, "token"))
    batches = make_packer(settings, spec, parallel.sizes)(rows).shards[parallel.coordinates.data]
    trainer.train_step(batches, step=0, version=VERSION)
    facts["step"] = fresh() and not torch.equal(weights.parameters[name], first[name])
    path, trained = out / "checkpoint", weights.snapshot()
    begin_save(trainer, path, step=0)
    finish_save(trainer, path)
    with torch.no_grad():
        weights.parameters[name].mul_(1.5)
    weights.changed()
    trainer.restore(str(path), same_layout=True)
    facts["restored"] = fresh() and torch.equal(weights.parameters[name], trained[name])
    return facts


def write_gradients(
    group: dict[str, Any], case: dict[str, Any], known: list[Trajectory], path: Path, parallel: Any
) -> None:
    """Of one step on these tokens, under their Hugging Face names; beside them the keys of this rank's checkpoint."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from slimx.models.families import read_model
    from slimx.orchestration.batches import make_packer
    from slimx.trainer.checkpoint.state import model_state
    from slimx.trainer.trainer import PolicyTrainer
    from tests.integration.gathering import write_tensors

    settings, spec = config(group, case, path.parent, case["gradients"]), read_model(group["model"])
    trainer = PolicyTrainer(settings, spec, parallel)
    rows = make_rows(known, [(-1.0) ** number for number in range(len(known))], loss_weights(known, "token"))
    batches = make_packer(settings, spec, parallel.sizes)(rows).shards[parallel.coordinates.data]
    trainer.train_step(batches, step=0, version=VERSION)
    gradients = {
        name: getattr(parameter, "main_grad", torch.zeros_like(parameter))  # the selection bias has none
        for name, parameter in trainer.weights.parameters.items()
    }
    write_tensors(path, gradients, spec, parallel)
    saved = nested_values(model_state(trainer.chunks))
    keys = sorted({part.key for part in saved if isinstance(part, ShardedTensor)})
    path.with_suffix(f".{parallel.rank}.json").write_text(json.dumps(keys))


def shared_logprobs(path: Path, known: list[Trajectory], rank: int, seconds: float = 120) -> None:
    """What rank 0 computed alone, on every rank."""
    if rank == 0:
        np.savez(path.with_suffix(".part.npz"), *[t.logprobs for t in known])
        path.with_suffix(".part.npz").rename(path)
        return
    wait_for(path.exists, seconds)
    with np.load(path) as found:
        for trajectory, name in zip(known, found.files, strict=True):
            trajectory.logprobs[:] = found[name]


def run(job: dict[str, Any], rank: int) -> list[list[dict[str, Any]]]:
    out, start, groups = job["out"], join, []
    meetings = iter(job["init_methods"])
    for number, group in enumerate(job["groups"]):
        known, metrics = trajectories(group["completions"]), []
        for at, case in enumerate(group["cases"]):
            trainer, meeting, found = config(group, case, out).trainer, next(meetings), {}
            if rank < trainer.world_size:
                parallel = start(trainer, rank, meeting)
                start = enter
                found = gap(group, case, known, out, parallel)
                if "follows" in case:
                    found |= follows(group, case, known, out, parallel)
                if "gradients" in case:
                    write_gradients(group, case, known, out / f"{number}-{at}.safetensors", parallel)
                leave(parallel)
            metrics.append(found)
            if "logprobs" not in group["completions"][0]:
                shared_logprobs(out / f"{number}.npz", known, rank)
                group["completions"][0]["logprobs"] = None
        groups.append(metrics)
    return groups
