"""Ranks that measure the gap between log-probs that came from elsewhere and those of their layouts, in exact mode.

The job has `groups`, each a `model`, its `dtype`, `completions` (prompt, tokens, logprobs, temperature of each),
`quantize` (the rule by which engines hold blocks of fp8) and `cases` in order: a `trainer` section, `leaves`, `threads`
of each rank, `model` and `quantize` in place of the group's. Completions without log-probs take those of the first
case, which is one rank's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, make_rows
from slimx.data.records import Span, Trajectory
from tests.integration.rank_start import enter, join, leave
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


class Case:
    """One case of a group on this rank."""

    def __init__(self, group: dict[str, Any], case: dict[str, Any], known: list[Trajectory], name: Path, parallel: Any):
        """`known`: the group's completions. `name`: of files of this case, without a suffix."""
        self.group, self.case, self.known, self.name, self.parallel = group, case, known, name, parallel

    def trainer(self, mode: str = "exact") -> Any:
        from slimx.models.families import read_model
        from slimx.trainer.trainer import PolicyTrainer

        settings = config(self.group, self.case, self.name.parent, mode)
        return PolicyTrainer(settings, read_model(settings.model.path), self.parallel)

    def batches(self, trainer: Any, advantages: list[float], weights: list[np.ndarray]) -> list[MicroBatch]:
        from slimx.orchestration.batches import make_packer

        pack = make_packer(trainer.config, trainer.weights.spec, self.parallel.sizes)
        return pack(make_rows(self.known, advantages, weights)).shards[self.parallel.coordinates.data]

    def measure(self) -> dict[str, Any]:
        """Gap metrics; without log-probs in `known`, those of this one rank are taken for them first."""
        import torch

        torch.set_num_threads(self.case.get("threads", 1))
        trainer = self.trainer()
        weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in self.known]
        batches = self.batches(trainer, [0.0] * len(self.known), weights)
        if "logprobs" in self.group["completions"][0]:
            return trainer.measure_gap(batches, version=VERSION)
        for batch, values in zip(batches, trainer.logprobs(batches), strict=True):
            for row, part in zip(batch.rows, np.split(values, np.cumsum(batch.lengths)[:-1]), strict=False):
                self.known[row].logprobs[1:] = part[: len(self.known[row].token_ids) - 1]
        return {}


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


def run(job: dict[str, Any], rank: int, kind: type[Case] = Case) -> list[list[dict[str, Any]]]:
    """Returns what each case measured, by group; {} where this rank has none."""
    out, start, groups = job["out"], join, []
    meetings = iter(job["init_methods"])
    for number, group in enumerate(job["groups"]):
        known, metrics = trajectories(group["completions"]), []
        for at, case in enumerate(group["cases"]):
            trainer, meeting = config(group, case, out).trainer, next(meetings)
            metrics.append({})
            if rank < trainer.world_size:
                parallel = start(trainer, rank, meeting)
                start = enter
                metrics[-1] = kind(group, case, known, out / f"{number}-{at}", parallel).measure()
                leave(parallel)
            if "logprobs" not in group["completions"][0]:
                shared_logprobs(out / f"{number}.npz", known, rank)
                group["completions"][0]["logprobs"] = None
        groups.append(metrics)
    return groups
