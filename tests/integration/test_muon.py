"""Muon on gloo ranks: against one in plain torch, over layouts, and its state on disk, on the host and in the plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.parameter_runs import Holdings
from slimx.extras.planner.memory.state import Buffers
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_rank import CLIPPED, Rank, equal

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "TP2xEP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "TP2xETP2xEP2": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
    "CP2xPP2": {"world_size": 4, "context": 2, "pipeline": 2},
}
MOMENTUM, SCALE = 0.95, 0.2
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of each iteration (https://leloykun.github.io/ponder/muon-opt-coeffs)."""
STEPS = 3
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow("layouts of four ranks")] if layout["world_size"] > 2 else [])
    for name, layout in LAYOUTS.items()
]


def orthogonalized(matrix: Any) -> Any:
    """The update of a matrix [m, n]: five Newton-Schulz iterations in fp32, scaled by 0.2 sqrt(max(m, n))."""
    x = matrix / matrix.norm()
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return SCALE * math.sqrt(max(matrix.shape)) * x


def in_parts(update: Any, heads: list[int] | None) -> Any:
    """Orthogonalise a matrix, or queries, keys and values of it: `heads`, their rows in each group of queries."""
    if heads is None:
        return orthogonalized(update)
    import torch

    width = update.shape[-1]
    parts = update.view(-1, sum(heads), width).split(heads, dim=1)
    updates = [orthogonalized(part.reshape(-1, width)).view(part.shape) for part in parts]
    return torch.cat(updates, dim=1).view(update.shape)


class MuonRank(Rank):
    sequences = 6
    optimizer = CLIPPED | {"kind": "muon", "lr": 2e-2}

    def train(self) -> None:
        trainer = self.trainer()
        self.steps(trainer, range(STEPS))
        self.write_tensors("weights", trainer.weights.parameters)
        self.results["state_bytes"] = trainer.offloading.sizes()["optimizer state"]
        path = self.out / "checkpoint"
        self.save(trainer, path, step=STEPS)
        fresh = self.trainer()
        fresh.restore(str(path), same_layout=True)
        trainer.offload()
        self.results["offloaded"] = trainer.offloading.sizes()["optimizer state"]
        trainer.reload()
        self.steps(trainer, (STEPS, STEPS + 1))
        self.steps(fresh, (STEPS, STEPS + 1))
        bf16 = self.trainer(dtype="bfloat16")
        self.steps(bf16, (0,))
        self.results["bf16_state_bytes"] = bf16.offloading.sizes()["optimizer state"]
        self.results["restored"] = equal(self.weights(trainer), self.weights(fresh))
        self.results["moments"] = equal(self.moments(trainer), self.moments(fresh))

    def compare_with_plain_torch(self) -> None:
        """Feed a Muon and torch's AdamW, in fp32, with the run's own clipped gradients."""
        import torch

        trainer = self.trainer()
        named = trainer.weights.trainable()
        twin = {key: p.detach().clone().requires_grad_() for key, p in named.items()}
        plain = [key for key, p in named.items() if p.ndim != 2 or "embed_tokens" in key or "lm_head" in key]
        adam = torch.optim.AdamW(
            [
                {"params": [twin[key] for key in plain if twin[key].ndim == 2], "weight_decay": 0.3},
                {"params": [twin[key] for key in plain if twin[key].ndim != 2], "weight_decay": 0.0},
            ],
            lr=self.optimizer["lr"],
            betas=(0.9, 0.95),
            eps=self.optimizer["eps"],
        )
        settings = trainer.chunks[0].config
        queries = settings.num_attention_heads // settings.num_query_groups * settings.kv_channels
        heads = [queries, settings.kv_channels, settings.kv_channels]
        momentum = {key: torch.zeros_like(p) for key, p in twin.items() if key not in plain}
        begun = {key: p.detach().clone() for key, p in twin.items()}
        rate, decay = self.optimizer["lr"], self.optimizer["weight_decay"]
        for step in range(STEPS):
            trainer.train_step(self.demonstrated(step), step=step, version=0)
            for key, parameter in named.items():
                twin[key].grad = parameter.main_grad.detach().clone()
            adam.step()
            with torch.no_grad():
                for key, mean in momentum.items():
                    gradient = twin[key].grad
                    mean.lerp_(gradient, 1 - MOMENTUM)
                    update = in_parts(gradient.lerp(mean, MOMENTUM), heads if "q_proj" in key else None)
                    twin[key].mul_(1 - rate * decay).sub_(rate * update)
        self.results["matrices"] = len(momentum)
        self.results["distance"] = max(float((p - twin[key]).abs().max()) for key, p in named.items())
        self.results["moved"] = min(float((p - begun[key]).abs().max()) for key, p in named.items())


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    muon = MuonRank(job, rank)
    muon.train()
    if muon.sizes.world == 1:
        muon.compare_with_plain_torch()
    return muon.finish()


class Laboratory:
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, model: Path):
        self.directory, self.model = directory, model
        self._results: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._results:
            job = {"model": self.model, "layout": {**LAYOUTS[name], "distributed_optimizer": False}}
            self._results[name] = run_ranks(train, self.directory / name, LAYOUTS[name]["world_size"], job)
        return self._results[name]


@pytest.fixture(scope="module")
def laboratory(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("muon"), tiny_model)


def test_matrices_take_muons_steps_and_everything_else_adamws(laboratory):
    (results,) = laboratory["single"]
    assert results["matrices"] > 0 and results["moved"] > 1e-3
    assert results["distance"] <= 1e-5


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_layout_does_not_change_the_steps(laboratory, name):
    assert laboratory[name] and laboratory["single"]
    several, single = (load_file(laboratory.directory / layout / "weights.safetensors") for layout in (name, "single"))
    assert several.keys() == single.keys()
    assert max(float((several[key] - single[key]).abs().max()) for key in single) <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_state_comes_back_from_disk_and_from_the_host_bit_for_bit(laboratory, name):
    for results in laboratory[name]:
        assert results["restored"] and results["moments"] and results["offloaded"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_one_moment_of_a_matrix_and_two_of_all_else(laboratory, name, tiny_model):
    trainer = Trainer(**LAYOUTS[name], optimizer={"kind": "muon"}, distributed_optimizer=False)
    sizes = sizes_of(trainer)
    table = read_model(str(tiny_model)).table
    for rank, results in enumerate(laboratory[name]):
        for dtype, nbytes in (("float32", results["state_bytes"]), ("bfloat16", results["bf16_state_bytes"])):
            runs = Holdings(table, dtype).runs(sizes, rank)
            assert Buffers(runs, trainer, sizes).state(rank).optimizer == nbytes, dtype
