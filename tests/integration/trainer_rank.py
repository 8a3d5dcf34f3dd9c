"""Trainers of gloo ranks without Ray, for tests of what ranks compute.

A rank begins as `slimx.trainer.worker` does: adapters first, megatron-core after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainingRow, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Span, Trajectory
from tests.integration import rank_start
from tests.integration.gathering import write_tensors
from tests.integration.saving import begin_save, finish_save

MAX_TOKENS = 60
"""Tokens: no limit of a micro-batch is smaller."""
PACKED = ("tokens", "labels", "lengths", "padding")
CLIPPED = {"lr": 2e-3, "weight_decay": 0.3, "clip_grad": 0.05, "betas": [0.9, 0.95], "eps": 1e-8}
"""Options of an optimizer that clips the gradients of every step."""


def demonstrations(step: int) -> list[Trajectory]:
    """Makes 16 sequences of 6 to 39 tokens, of which the first four are a prompt; three tokens in four follow from the
    one before, so that there is something to learn. Id 0 is padding and never among them."""
    random = np.random.default_rng(step)
    out = []
    for index in range(16):
        length = int(random.integers(6, 40))
        tokens = random.integers(1, 128, length)
        for at in np.flatnonzero(random.random(length - 1) < 0.75):
            tokens[at + 1] = 1 + (5 * tokens[at] + 3) % 127
        out.append(
            Trajectory(
                id=str(index),
                rollout_id=str(index),
                group_id=str(index),
                index=0,
                token_ids=tokens.astype(np.int32),
                loss_mask=np.array([0] * 4 + [1] * (length - 4), np.uint8),
                logprobs=np.full(length, np.nan, np.float32),
                spans=[Span(start=0, stop=length, source="inserted")],
            )
        )
    return out


def microbatch_tokens(rows: Sequence[TrainingRow], data: int) -> int:
    """Returns the `max_tokens` of `pack` that leaves each of `data` data-parallel ranks a few micro-batches, as few as
    show that gradients add up over them: each costs a forward and a backward pass of every test."""
    return max(MAX_TOKENS, round(0.6 * sum(map(len, rows)) / data))


def shard(rows: Sequence[TrainingRow], parallel: Any) -> list[MicroBatch]:
    """Returns the micro-batches of this data-parallel rank, at least two."""
    sizes = parallel.sizes
    batch = pack(
        rows,
        data_size=sizes.data,
        max_tokens=microbatch_tokens(rows, sizes.data),
        multiple_of=sizes.tensor * sizes.context,
        sequence_multiple=sizes.sequence_multiple,
        # Interleaved pipelines go round in turns of as many micro-batches as there are stages.
        count_multiple=sizes.pipeline if sizes.virtual > 1 else 1,
    )
    assert len(batch.shards[0]) > 1
    return batch.shards[parallel.coordinates.data]


def sft_rows(trajectories: list[Trajectory]) -> list[TrainingRow]:
    return make_rows(trajectories, [1.0] * len(trajectories), loss_weights(trajectories, "token"))


class Rank:
    """One rank, which has joined the others, and its results.

    `job`: `model`, a checkpoint; `layout`, keys of the section `trainer`; `out` and `init_method` (`run_ranks`)."""

    sequences: ClassVar[int] = 16
    """Demonstrations of a step."""
    optimizer: ClassVar[dict[str, Any]] = {"lr": 2e-3}

    def __init__(self, job: dict[str, Any], rank: int):
        self.job, self.rank, self.out = job, rank, job["out"]
        self.results: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}
        """Written to OUT/RANK.npz in the end."""
        self.parallel = rank_start.join(self.config().trainer, rank, job["init_method"])
        from slimx.models.families import read_model

        self.spec, self.sizes = read_model(job["model"]), self.parallel.sizes

    def config(self, *, dtype: str = "float32", optimizer: dict[str, Any] | None = None, **trainer: Any) -> Config:
        """Returns one of supervised training; `optimizer` and `trainer` extend those of the class and the layout."""
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": {"path": self.job["model"]},
                "numerics": {"dtype": dtype},
                "trainer": {
                    **self.job["layout"],
                    **trainer,
                    "max_tokens_per_microbatch": MAX_TOKENS,
                    "optimizer": {**self.optimizer, **(optimizer or {})},
                },
                "rollout": {"prompts": "p", "engines": []},
                "schedule": {"steps": 6, "updates_per_step": 2},
                "algorithm": {"name": "sft"},
            }
        )

    def trainer(self, config: Config | None = None, **options: Any) -> Any:
        """Returns a policy's trainer by `config`, by default that of `options`."""
        from slimx.trainer.trainer import PolicyTrainer

        return PolicyTrainer(config or self.config(**options), self.spec, self.parallel)

    def demonstrated(self, step: int) -> list[MicroBatch]:
        return shard(sft_rows(demonstrations(step)[: self.sequences]), self.parallel)

    def steps(self, trainer: Any, steps: Sequence[int]) -> list[dict[str, float]]:
        """Trains on the demonstrations of each step; returns its metrics."""
        return [trainer.train_step(self.demonstrated(step), step=step, version=0) for step in steps]

    def write_tensors(self, name: str, tensors: dict[str, Any], **form: Any) -> None:
        write_tensors(self.out / f"{name}.safetensors", tensors, self.spec, self.parallel, **form)

    def keep_logprobs(self, batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray]) -> None:
        """Adds log-probs to the arrays, for `by_sequence`; only the last pipeline stage has them."""
        self.arrays |= packed(batches) | {f"logprobs.{number}": values for number, values in enumerate(logprobs)}

    def gradients(self, trainer: Any) -> dict[str, Any]:
        """Returns those by local name; zeros for a buffer, which has none."""
        import torch

        named = trainer.weights.parameters.items()
        return {name: getattr(value, "main_grad", torch.zeros(value.shape)) for name, value in named}

    def weights(self, trainer: Any) -> dict[str, Any]:
        """Returns a copy of the weights by local name."""
        return {name: value.detach().clone() for name, value in trainer.weights.parameters.items()}

    def moments(self, trainer: Any) -> list[Any]:
        """Returns main weights, moments and step counts."""
        out: list[Any] = []
        for part in trainer.optimizer.chained_optimizers:
            for group in part.param_groups:
                out.append(group.get("step", 0))
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    out += [parameter.detach().clone(), *(state[key].clone() for key in sorted(state))]
        return out

    def save(self, trainer: Any, path: Path, *, step: int) -> None:
        begin_save(trainer, path, step=step)
        finish_save(trainer, path)
        self.barrier()

    def barrier(self) -> None:
        self.parallel.host_group.barrier().wait()

    def finish(self) -> dict[str, Any]:
        """Writes the arrays and leaves the other ranks; returns the results."""
        np.savez(self.out / f"{self.rank}.npz", **self.arrays)
        rank_start.leave(self.parallel)
        return self.results


def by_sequence(arrays: Mapping[str, np.ndarray], key: str = "logprobs.{}") -> dict[tuple[int, ...], np.ndarray]:
    """Returns values of packed sequences by sequence: its tokens with the last label.

    `key`: name of the values in `arrays` by the number of a micro-batch, whose `PACKED` are in `arrays` too. A rank
    that does not know the values has none."""
    out = {}
    for number in range(sum(name.startswith("tokens.") for name in arrays)):
        if key.format(number) not in arrays:
            continue
        end = np.cumsum(arrays[f"lengths.{number}"])
        for start, stop in zip([0, *end], end, strict=False):
            places = np.arange(start, stop)[~arrays[f"padding.{number}"][start:stop]]
            if places.size:
                tokens, labels = (arrays[f"{name}.{number}"][places] for name in ("tokens", "labels"))
                out[(*tokens.tolist(), int(labels[-1]))] = arrays[key.format(number)][places]
    return out


def packed(batches: Sequence[MicroBatch]) -> dict[str, np.ndarray]:
    """Returns what `by_sequence` reads of micro-batches: NAME.NUMBER for each of `PACKED`."""
    return {f"{name}.{n}": np.asarray(getattr(batch, name)) for n, batch in enumerate(batches) for name in PACKED}


def equal(one: Any, other: Any) -> bool:
    """Returns True if two collections of tensors and numbers are equal bit for bit."""
    import torch

    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(one, other, strict=True)
    )
