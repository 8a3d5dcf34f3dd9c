"""One gloo rank of test_overlap: the same steps with gradients summed beside the backward pass and after it, with
weights gathered beside the forward pass and after an update, and with gradients summed in bf16.

    python -m tests.integration.overlap_rank JOB.json RANK

It writes RANK.json.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import Rank

STEPS = 3
"""megatron-core learns in the first one which gradients to wait for, and overlaps from the second on."""


class OverlapRank(Rank):
    def built(self, *, overlap: bool, halved: bool | None = None, **options: Any) -> Any:
        """`halved`: a bf16 model, whose gradients are summed in bf16 if it is true."""
        config = self.config(
            algorithm="sft",
            overlap_grad_reduce=overlap,
            grad_bucket_elements=4096,
            # The norm, of which clipping takes a factor, is summed over other shares of the gradients.
            optimizer={"lr": 2e-3, "clip_grad": 0.0},
            **options,
        )
        if halved is not None:
            numerics = config.numerics.model_copy(update={"dtype": "bfloat16"})
            trainer = config.trainer.model_copy(update={"grad_reduce_in_fp32": not halved})
            config = config.model_copy(update={"numerics": numerics, "trainer": trainer})
        return self.trainer(config)

    def steps(self, trainer: Any, first: int, end: int) -> list[dict[str, float]]:
        return [trainer.train_step(self.demonstrated(step), step=step, version=0) for step in range(first, end)]

    def weights(self, trainer: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in trainer.weights.parameters.items()}

    def watched(self, trainer: Any) -> list[list[str]]:
        """By step, what happens in which order from now on: a sum that begins, and the end of the backward pass."""
        steps: list[list[str]] = [[]]
        settings = trainer.chunks[0].config

        def begins(begin: Any, **given: Any) -> None:
            steps[-1].append("sum")
            begin(**given)

        def ends(finish: Any, *given: Any, **named: Any) -> None:
            steps[-1].append("end")
            finish(*given, **named)
            steps.append([])

        for chunk in trainer.chunks:
            for group in chunk.bucket_groups:
                group.start_grad_sync = partial(begins, group.start_grad_sync)
        settings.finalize_model_grads_func = partial(ends, settings.finalize_model_grads_func)
        return steps

    def compared(self) -> None:
        after, beside = self.built(overlap=False), self.built(overlap=True)
        begun = self.watched(beside)
        expected, path = self.steps(after, 0, STEPS), self.out / "checkpoint"
        self.said["metrics"] = [expected, self.steps(beside, 0, STEPS)]
        self.said["begun"] = begun
        self.said["equal"] = _equal(self.weights(after), self.weights(beside))
        begin_save(beside, path, step=STEPS)
        finish_save(beside, path)
        self.barrier()
        resumed = self.built(overlap=False)
        resumed.restore(str(path), same_layout=True)
        self.said["resumed"] = [self.steps(each, STEPS, STEPS + 2) for each in (beside, resumed)]
        self.said["resumed_equal"] = _equal(self.weights(beside), self.weights(resumed))

    def gathered(self) -> None:
        """Steps of two updates, after which the weights are read on each rank."""
        at_once, beside = self.built(overlap=True), self.built(overlap=True, overlap_param_gather=True)
        self.said["gathered"], self.said["order"], self.said["stage"] = [], [], self.parallel.coordinates.pipeline
        events = self.reading(beside)
        for step in range(2):
            events.clear()
            for trainer in (at_once, beside):
                updates = [self.demonstrated(2 * step + number) for number in range(2)]
                metrics = trainer.train_updates(updates, step=step, version=0)
                self.said["gathered"].append(metrics)
            self.said["order"].append([*events])
            self.said[f"gathered_equal_{step}"] = _equal(self.weights(at_once), self.weights(beside))
        path = self.out / "gathered"
        begin_save(beside, path, step=2)
        finish_save(beside, path)
        self.barrier()
        at_once.restore(str(path), same_layout=True)
        scored = [trainer.logprobs(self.demonstrated(9)) for trainer in (at_once, beside)]
        self.said["scored_equal"] = all((one == other).all() for one, other in zip(*scored, strict=True))

    def reading(self, trainer: Any) -> list[str]:
        """Events in their order from now on: a layer that computes, a gather that begins, and a step."""
        events: list[str] = []

        def noted(what: str, call: Any, *given: Any, **named: Any) -> Any:
            events.append(what)
            return call(*given, **named)

        for chunk in trainer.chunks:
            for layer in unwrapped(chunk).decoder.layers:
                layer.forward = partial(noted, "layer", layer.forward)
            for group in chunk.bucket_groups:
                group.start_param_sync = partial(noted, "gather", group.start_param_sync)
        step = trainer.optimizer.step_with_ready_grads
        trainer.optimizer.step_with_ready_grads = partial(noted, "step", step)
        return events

    def reduced(self) -> None:
        """One micro-batch on each of two ranks: what each has is in bf16 anyway, and one sum is rounded."""
        whole, halved = (
            self.built(overlap=False, halved=halved, distributed_optimizer=False) for halved in (False, True)
        )
        for trainer in (whole, halved):
            trainer.train_step(self.demonstrated(0)[:1], step=0, version=0)
        sums = [self.gradients(trainer) for trainer in (whole, halved)]
        rounded = {name: value.bfloat16() for name, value in sums[0].items()}
        self.said["halved"] = sorted({str(value.dtype) for value in sums[1].values()})
        self.said["rounded_once"] = _equal(rounded, sums[1])
        self.said["rounding"] = _equal(sums[0], {name: value.float() for name, value in sums[1].items()})
        sharded = self.built(overlap=True, halved=True)
        sharded.train_step(self.demonstrated(0)[:1], step=0, version=0)
        for trainer in (halved, sharded):
            self.steps(trainer, 1, STEPS)
        self.said["sharded_equal"] = _equal(self.weights(halved), self.weights(sharded))
        parts = sharded.optimizer.chained_optimizers
        left = [p.grad for part in parts for group in part.param_groups for p in group["params"]]
        self.said["copies_left"] = sum(gradient is not None for gradient in left)


def unwrapped(chunk: Any) -> Any:
    from slimx.trainer.model.build import unwrap

    return unwrap(chunk)


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    rank = OverlapRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.compared()
    rank.gathered()
    if rank.sizes.world == 2:
        rank.reduced()
    (rank.out / f"{rank.rank}.json").write_text(json.dumps(rank.said))
    rank.barrier()
    rank.parallel.destroy()


if __name__ == "__main__":
    main()
