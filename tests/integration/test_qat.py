"""Training with routed experts rounded to INT4: straight-through gradients, fp32 weights unrounded, any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimx.config.schema import Config
from tests.integration.exact_runs import assert_none, gaps
from tests.integration.rank_processes import run_ranks
from tests.integration.runs import TrainProcess, steps, write_config
from tests.integration.trainer_rank import CLIPPED, Rank, equal

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "TP2xETP2": {"world_size": 2, "tensor": 2, "expert_tensor": 2},
}
STEPS = 3
QAT = {"qat": "int4"}
CASES: list[dict[str, Any]] = [
    {"trainer": QAT},
    {"trainer": QAT | {"world_size": 2, "expert": 2}},
    {"trainer": QAT | {"world_size": 2, "tensor": 2}},
]


class QatRank(Rank):
    sequences = 6
    optimizer = CLIPPED

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

    def compare_with_plain(self) -> None:
        plain = self.trainer(qat=None, distributed_optimizer=False)
        loaded = self.weights(plain)
        trainer = self.trainer(distributed_optimizer=False)
        weights, main = self.weights(trainer), self.main_weights(trainer)
        self.results["begins_rounded"] = equal(weights, self.rounded(loaded))
        self.results["experts_moved"] = not equal(self.experts(weights), self.experts(loaded))
        self.results["main_is_unrounded"] = equal(main, loaded)
        for name, value in plain.weights.parameters.items():
            value.data.copy_(weights[name])
        for one in (plain, trainer):
            self.steps(one, (0,))
        self.results["straight_through"] = equal(self.gradients(plain), self.gradients(trainer))
        self.results["main_moved"] = not equal(self.experts(self.main_weights(trainer)), self.experts(main))
        after = self.weights(trainer)
        self.results["stays_rounded"] = equal(after, self.rounded(self.main_weights(trainer)))
        copy = trainer.weights.snapshot()
        with trainer.weights.switching() as switch:
            switch(loaded)
            self.results["reference_is_rounded"] = equal(self.weights(trainer), weights)
        self.results["comes_back"] = equal(self.weights(trainer), copy) and equal(self.weights(trainer), after)

    def train(self) -> None:
        trainer = self.trainer()
        # In fp32, the dtype of the checkpoint, which is exact.
        self.write_tensors("begun", {name: value.detach().float() for name, value in self.weights(trainer).items()})
        self.steps(trainer, range(STEPS))
        self.results["trained_rounded"] = equal(self.weights(trainer), self.rounded(self.weights(trainer)))
        path = self.out / "checkpoint"
        self.save(trainer, path, step=STEPS)
        fresh = self.trainer()
        fresh.restore(str(path), same_layout=True)
        self.results["restored"] = equal(self.weights(trainer), self.weights(fresh))
        self.results["moments"] = equal(self.moments(trainer), self.moments(fresh))
        for one in (trainer, fresh):
            self.steps(one, (STEPS,))
        self.results["goes_on"] = equal(self.weights(trainer), self.weights(fresh))


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    qat = QatRank(job, rank)
    qat.compare_with_plain()
    qat.train()
    return qat.finish()


def test_gradients_pass_and_the_layout_changes_no_rounded_weight(tiny_model: Path, tmp_path: Path) -> None:
    begun = {}
    for name, layout in LAYOUTS.items():
        job = {"model": tiny_model, "layout": layout}
        for facts in run_ranks(train, tmp_path / name, layout["world_size"], job):
            assert [fact for fact, true in facts.items() if true is not True] == []
            assert len(facts) == 12, facts
        begun[name] = load_file(tmp_path / name / "begun.safetensors")
    single, other = begun.values()
    assert single.keys() == other.keys()
    assert all(torch.equal(single[name], other[name]) for name in single)


def test_log_probs_are_equal_to_the_last_bit_between_layouts(tiny_model: Path, tmp_path: Path) -> None:
    completions = [
        {"prompt": [3, 5, 7], "tokens": [(k * n) % 127 + 1 for k in range(1, 20)], "temperature": 1.0}
        for n in (3, 5, 11, 17)
    ]
    group = {"model": str(tiny_model), "dtype": "bfloat16", "completions": completions}
    # The first case makes the log-probs of the others, and the last shows that rounding is seen.
    (found,) = gaps(tmp_path, [group | {"cases": [*CASES, {"trainer": {}}]}])
    assert_none([group | {"cases": CASES[1:]}], [found[1:-1]])
    assert found[-1]["gap/max"] > 1e-3


@pytest.mark.slow("a whole run; the layouts have the trainer's part")
def test_engines_serve_the_rounded_weights_without_any_gap(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact", "dtype": "bfloat16"},
        trainer={"world_size": 2, "expert": 2, "qat": "int4", "optimizer": {"lr": 1e-3}},
        schedule={"steps": 3},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert (row["gap/tokens"] > 0, row["gap/max"], row["publish/engines_verified"]) == (True, 0.0, 1)
    run.assert_nothing_left()
