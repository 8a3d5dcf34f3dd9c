"""One gloo rank of test_gradients: gradients that products add to by themselves (apex), and gradients in bf16.

python -m tests.integration.gradient_rank JOB.json RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.integration import apex_stand
from tests.integration.optimizer_rank import STEPS, OptimizerRank, equal


class GradientRank(OptimizerRank):
    def after_a_step(self, **options: Any) -> dict[str, Any]:
        trainer = self.built(distributed_optimizer=False, optimizer={"clip_grad": 0.0}, **options)
        self.steps(trainer, 1)
        return {name: value.clone() for name, value in self.gradients(trainer).items()}

    def fused(self) -> None:
        for dtype, calls in (("float32", apex_stand.FP32), ("bfloat16", apex_stand.BF16)):
            fusion = {"megatron": {"gradient_accumulation_fusion": True}}
            before = len(calls)
            apart = self.after_a_step(dtype="bfloat16", grad_dtype=dtype)
            self.said[f"unfused_{dtype}"] = len(calls) == before
            together = self.after_a_step(dtype="bfloat16", grad_dtype=dtype, **fusion)
            self.said[f"fused_{dtype}"] = len(calls) > before
            self.said[f"equal_{dtype}"] = equal(apart, together)

    def halved(self) -> None:
        import torch

        whole = self.after_a_step(dtype="bfloat16")
        halved = self.after_a_step(dtype="bfloat16", grad_dtype="bfloat16")
        self.said["halved"] = {value.dtype for value in halved.values()} == {torch.bfloat16}
        apart = sum(float((halved[name].float() - value).double().square().sum()) for name, value in whole.items())
        self.said["apart"] = (apart / sum(float(value.double().square().sum()) for value in whole.values())) ** 0.5
        # Sharded over data-parallel ranks; from memory to the host and back, and from a checkpoint.
        trainer = self.built(dtype="bfloat16", grad_dtype="bfloat16")
        self.steps(trainer)
        sizes = trainer.offloading.sizes()
        self.said["bytes"] = [sizes["weights"], sizes["gradients"]]
        path = self.out / "checkpoint"
        self.save(trainer, path)
        fresh = self.built(dtype="bfloat16", grad_dtype="bfloat16")
        fresh.restore(str(path), same_layout=True)
        trainer.offload()
        trainer.reload()
        for one in (trainer, fresh):
            self.steps(one, 1, STEPS)
        self.said["goes_on"] = equal(self.held(trainer), self.held(fresh))


def main() -> None:
    rank = GradientRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.fused()
    rank.halved()
    rank.finish()


if __name__ == "__main__":
    main()
