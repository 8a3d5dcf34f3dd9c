"""One gloo rank of test_overlap: the same steps with gradients summed beside the backward pass and after it.

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
    def built(self, *, overlap: bool) -> Any:
        return self.trainer(
            self.config(
                algorithm="sft",
                overlap_grad_reduce=overlap,
                grad_bucket_elements=4096,
                # The norm, of which clipping takes a factor, is summed over other shares of the gradients.
                optimizer={"lr": 2e-3, "clip_grad": 0.0},
            )
        )

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


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    rank = OverlapRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.compared()
    (rank.out / f"{rank.rank}.json").write_text(json.dumps(rank.said))
    rank.barrier()
    rank.parallel.destroy()


if __name__ == "__main__":
    main()
