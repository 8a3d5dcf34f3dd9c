"""One gloo rank of test_exact: the gap between log-probs that came from elsewhere and those of this rank's layouts.

    python -m tests.integration.exact_rank JOB.json RANK

JOB has `groups`, each a `model`, its `dtype`, `completions` (prompt, tokens, logprobs, temperature of each) and `cases`
in order: a `trainer` section, `leaves`, and what is spoilt (`spoil`). Completions without log-probs take those of the
first case, which is one rank's. RANK.json lists the cases' gap metrics, group by group; {} where this rank has none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.records import Span, Trajectory
from tests.integration.rank_start import enter, join, leave

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


def config(group: dict[str, Any], case: dict[str, Any], out: Path) -> Config:
    trainer = {"max_tokens_per_microbatch": 150, "logprob_chunk_tokens": 64, **case["trainer"]}
    return Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": group["model"]},
            "numerics": {"dtype": group["dtype"], "mode": "exact", "leaves": case.get("leaves")},
            "trainer": trainer,
            "rollout": {"prompts": "p"},
            "reward": {"function": "tests.integration.hooks.digits"},
        }
    )


@contextmanager
def spoilt(what: str | None) -> Iterator[None]:
    """One operation of the trainer as torch has it."""
    import torch.nn.functional as F

    from slimx.numerics import exact
    from slimx.numerics.norm import rms_norm

    plain = {
        "rms_norm": ("slimx.adapters.megatron_exact.ExactNormColumn.norm", staticmethod(rms_norm)),
        "linear": (
            "slimx.adapters.megatron_exact._Column._forward_impl",
            lambda self, input, weight, *_, **__: F.linear(input, weight),
        ),
        "silu_and_mul": (
            "slimx.numerics.exact.silu_and_mul",
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        ),
        "moe_combine": (
            "slimx.numerics.exact.moe_combine",
            lambda rows, weights, shared=None: exact.combine_leaves(list((rows * weights[..., None]).unbind(1))),
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
    from slimx.trainer.trainer import Trainer

    settings, spec = config(group, case, out), read_model(group["model"])
    with spoilt(case.get("spoil")):
        trainer = Trainer(settings, spec, parallel)
        if case.get("spoil") == "weights":
            weight = trainer.weights.parameters["decoder.final_layernorm.weight"]
            with torch.no_grad():
                weight.copy_(torch.nextafter(weight, weight + 1))
        weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in known]
        rows = make_rows(known, [0.0] * len(known), weights)
        batches = make_packer(settings, spec, parallel.sizes)(rows).shards[parallel.place.data]
        if "logprobs" not in group["completions"][0]:
            for batch, values in zip(batches, trainer.logprobs(batches), strict=True):
                for row, part in zip(batch.rows, np.split(values, np.cumsum(batch.lengths)[:-1]), strict=False):
                    known[row].logprobs[1:] = part[: len(known[row].token_ids) - 1]
            return {}
        return trainer.measure_gap(batches, version=VERSION)


def shared_logprobs(path: Path, known: list[Trajectory], rank: int, seconds: float = 120) -> None:
    """What rank 0 computed alone, on every rank."""
    if rank == 0:
        np.savez(path.with_suffix(".part.npz"), *[t.logprobs for t in known])
        path.with_suffix(".part.npz").rename(path)
        return
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"rank 0 has not written {path}"
        time.sleep(0.02)
    with np.load(path) as found:
        for trajectory, name in zip(known, found.files, strict=True):
            trajectory.logprobs[:] = found[name]


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    out, start, said = Path(sys.argv[1]).parent, join, []
    meetings = iter(job["init_methods"])
    for number, group in enumerate(job["groups"]):
        known, metrics = trajectories(group["completions"]), []
        for case in group["cases"]:
            trainer, meeting, mine = config(group, case, out).trainer, next(meetings), {}
            if rank < trainer.world_size:
                parallel = start(trainer, rank, meeting)
                start = enter
                mine = gap(group, case, known, out, parallel)
                leave(parallel)
            metrics.append(mine)
            if "logprobs" not in group["completions"][0]:
                shared_logprobs(out / f"{number}.npz", known, rank)
                group["completions"][0]["logprobs"] = None
        said.append(metrics)
    (out / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
