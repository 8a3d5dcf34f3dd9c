"""One gloo rank of test_qat: a model whose routed experts are rounded to INT4, beside one whose are not.

python -m tests.integration.qat_rank JOB.json RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from tests.integration.optimizer_rank import STEPS, OptimizerRank, equal


class QatRank(OptimizerRank):
    def config(self, *, qat: str | None = "int4", **options: Any) -> Config:
        base = super().config(dtype="bfloat16", **options)
        return base.model_copy(update={"trainer": base.trainer.model_copy(update={"qat": qat})})

    def experts(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in tensors.items() if ".mlp.experts." in name}

    def rounded(self, tensors: dict[str, Any]) -> dict[str, Any]:
        from slimx.extras.low_precision import int4_kernel as int4

        out = {name: value.detach().clone() for name, value in tensors.items()}
        for value in self.experts(out).values():
            int4.round_(value)
        return out

    def main_weights(self, trainer: Any) -> dict[str, Any]:
        """The optimizer's fp32 weights of whole parameters, in bf16."""
        named = trainer.weights.parameters
        return {name: getattr(p, "main_param", p).detach().bfloat16().view(p.shape) for name, p in named.items()}

    def whole_optimizer(self) -> None:
        plain = self.built(qat=None, distributed_optimizer=False)
        loaded = self.held(plain)
        trainer = self.built(distributed_optimizer=False)
        held, main = self.held(trainer), self.main_weights(trainer)
        self.said["begins_rounded"] = equal(held, self.rounded(loaded))
        self.said["experts_moved"] = not equal(self.experts(held), self.experts(loaded))
        self.said["main_is_unrounded"] = equal(main, loaded)
        for name, value in plain.weights.parameters.items():
            value.data.copy_(held[name])
        for one in (plain, trainer):
            self.steps(one, 1)
        self.said["straight_through"] = equal(self.gradients(plain), self.gradients(trainer))
        self.said["main_moved"] = not equal(self.experts(self.main_weights(trainer)), self.experts(main))
        after = self.held(trainer)
        self.said["stays_rounded"] = equal(after, self.rounded(self.main_weights(trainer)))
        copy = trainer.weights.snapshot()
        with trainer.weights.switching() as switch:
            switch(loaded)
            self.said["reference_is_rounded"] = equal(self.held(trainer), held)
        self.said["comes_back"] = equal(self.held(trainer), copy) and equal(self.held(trainer), after)

    def trained(self) -> None:
        trainer = self.built()
        # In fp32, which is exact: it is the dtype of the model that the ranks of this file's neighbours write.
        self.write_tensors("begun", {name: value.detach().float() for name, value in self.held(trainer).items()})
        self.steps(trainer)
        self.said["trained_rounded"] = equal(self.held(trainer), self.rounded(self.held(trainer)))
        path = self.out / "checkpoint"
        self.save(trainer, path)
        fresh = self.built()
        fresh.restore(str(path), same_layout=True)
        self.said["restored"] = equal(self.held(trainer), self.held(fresh))
        self.said["moments"] = equal(self.moments(trainer), self.moments(fresh))
        for one in (trainer, fresh):
            self.steps(one, 1, STEPS)
        self.said["goes_on"] = equal(self.held(trainer), self.held(fresh))


def main() -> None:
    rank = QatRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.whole_optimizer()
    rank.trained()
    rank.finish()


if __name__ == "__main__":
    main()
