"""Where the state of an optimizer lies: on the host, in checkpoints and away, on gloo ranks of four layouts against
trainers that are left undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimx.trainer.checkpoint import files
from slimx.trainer.device.offload import MOMENTS
from tests.integration import transformer_engine_stand
from tests.integration.chosen import chosen_cases
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.saving import finish_save
from tests.integration.test_optimizer import LAYOUTS
from tests.integration.trainer_rank import CLIPPED, Rank, equal
from tests.needed import missing

pytestmark = pytest.mark.integration

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16_undistributed": {"dtype": "bfloat16", "distributed_optimizer": False},
}
"""Optimizers whose state leaves and comes back."""
SHORT: dict[str, Any] = {"dtype": "bfloat16", "optimizer": {"moments_dtype": "bfloat16"}}
"""The one of Transformer Engine that keeps its moments in bf16."""
QUICK = {"single": "float32", "EP2": "bfloat16"}
"""Layout -> the kind of optimizer whose state leaves and comes back there in `make test`."""


class StateRank(Rank):
    sequences = 6
    optimizer = CLIPPED

    @property
    def kinds(self) -> dict[str, dict[str, Any]]:
        """Those of `KINDS` that the job has."""
        return {kind: (KINDS | {"short": SHORT})[kind] for kind in self.job["kinds"]}

    def same(self, one: Any, other: Any) -> bool:
        """Returns True if two trainers have the same weights and moments."""
        return equal(self.weights(one), self.weights(other)) and equal(self.moments(one), self.moments(other))

    def keep_moments_on_the_host(self) -> None:
        for kind, options in self.kinds.items():
            plain = self.trainer(**options)
            self.steps(plain, range(STEPS))
            for share in (0.5, 1.0):
                moved = self.trainer(**options, optimizer={"offload_fraction": share})
                self.steps(moved, range(STEPS))
                self.results[f"host_moments_{kind}_{share}"] = self.same(plain, moved)
            path = self.out / f"host_moments_{kind}"
            self.save(moved, path, step=STEPS)
            fresh = self.trainer(**options, optimizer={"offload_fraction": 0.25})
            fresh.restore(str(path), same_layout=True)
            self.results[f"host_moments_{kind}_restored"] = equal(self.moments(moved), self.moments(fresh))
            faster = self.trainer(**options, optimizer={"lr": 3e-3, "min_lr": 1e-3})
            faster.restore(str(path), same_layout=True)
            self.results[f"host_moments_{kind}_faster"] = equal(self.moments(moved), self.moments(faster))
            self.steps(moved, (STEPS,))
            self.steps(fresh, (STEPS,))
            self.results[f"host_moments_{kind}_went_on"] = equal(self.weights(moved), self.weights(fresh))

    def save_before_a_step(self) -> None:
        """Saves as after a first step that was skipped: Adam has made no moments yet."""
        for kind, options in self.kinds.items():
            trainer, path = self.trainer(**options), self.out / f"unstepped_{kind}"
            self.save(trainer, path, step=STEPS)
            fresh = self.trainer(**options)
            fresh.restore(str(path), same_layout=True)
            self.steps(trainer, (0,))
            self.steps(fresh, (0,))
            untouched = self.trainer(**options)
            self.steps(untouched, (0,))
            self.results[f"unstepped_{kind}"] = [self.same(untouched, x) for x in (trainer, fresh)]

    def restore_gathered(self) -> None:
        """Restores a checkpoint whose optimizer state megatron-core gathered, as slimx wrote it until 2026-11."""
        from slimx.trainer.checkpoint import state as states

        trainer, path = self.trainer(dtype="bfloat16"), self.out / "gathered"
        self.steps(trainer, range(STEPS))
        state = states.full_state(
            trainer.chunks, trainer.optimizer, step=STEPS, data_size=self.sizes.data, frozen=False
        )
        state["optimizer"] = trainer.optimizer.sharded_state_dict(
            states.model_state(trainer.chunks), is_loading=False, metadata=states.metadata()
        )
        if self.parallel.rank == 0:
            (path / files.REPORTS).mkdir(parents=True)
        self.barrier()
        trainer.saver.begin(path, state)
        finish_save(trainer, path)
        self.barrier()
        fresh = self.trainer(dtype="bfloat16")
        fresh.restore(str(path), same_layout=True)
        self.results["gathered"] = self.same(trainer, fresh)

    def offload(self) -> None:
        import torch

        for kind, options in self.kinds.items():
            straight, cycled = self.trainer(**options), self.trainer(**options)
            self.steps(straight, range(STEPS))
            self.steps(cycled, (0,))
            before = self.weights(cycled), self.moments(cycled)
            whole = cycled.offloading.sizes()
            cycled.offload(weights=False)
            half = cycled.offloading.sizes()
            kept = equal(before[0], self.weights(cycled))  # weights are still published from
            cycled.offload()
            away = cycled.offloading.sizes()
            storages = {
                tensor.untyped_storage().nbytes()
                for parameter in cycled.weights.parameters.values()
                if isinstance(parameter, torch.nn.Parameter)
                for tensor in (parameter, parameter.main_grad)
            }
            cycled.reload(training=False)
            only = cycled.offloading.sizes()
            published = equal(before[0], self.weights(cycled))
            cycled.reload()
            same = equal(before[0], self.weights(cycled)) and equal(before[1], self.moments(cycled))
            back = cycled.offloading.sizes()
            self.steps(cycled, (1,))
            cycled.offload()
            cycled.reload()
            self.steps(cycled, range(2, STEPS))
            self.results[f"offloaded_{kind}"] = {
                "whole": whole,
                "half": half,
                "away": away,
                "only": only,
                "back": back,
                "storages": sorted(storages),
                "kept": kept,
                "published": published,
                "same": same,
                "trained": self.same(straight, cycled),
            }

    def short_moments(self) -> None:
        """Compares bytes planned and allocated, and checkpoints of moments in the other precision."""
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        short, long = self.trainer(**SHORT), self.trainer(dtype="bfloat16")
        for trainer, name, other in ((long, "long", SHORT), (short, "short", {"dtype": "bfloat16"})):
            self.results[f"{name}_steps"] = self.steps(trainer, range(STEPS))
            states = [state for part in trainer.optimizer.chained_optimizers for state in part.optimizer.state.values()]
            self.results[f"{name}_moments"] = sorted({str(state[key].dtype) for state in states for key in MOMENTS})
            runs = holdings(trainer.config.trainer, trainer.config.numerics, self.spec).runs(self.sizes, self.rank)
            planned = Buffers(runs, trainer.config.trainer, self.sizes).state(self.rank)
            self.results[f"{name}_planned"] = [planned.weights, planned.gradients, planned.optimizer]
            self.results[f"{name}_bytes"] = list(trainer.offloading.sizes().values())
            self.save(trainer, self.out / name, step=STEPS)
            restored = self.trainer(**other)
            restored.restore(str(self.out / name), same_layout=True)
            pairs = zip(self.moments(trainer), self.moments(restored), strict=True)
            self.results[f"{name}_elsewhere"] = all(
                saved.to(taken.dtype).equal(taken) if hasattr(saved, "dtype") else saved == taken
                for saved, taken in pairs
            )


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    rank = StateRank(job, number)
    if job["engine"]:
        rank.short_moments()
    else:
        if job["gathered"]:
            rank.restore_gathered()
        rank.keep_moments_on_the_host()
    rank.save_before_a_step()
    rank.offload()
    return rank.finish()


def every_kind() -> pytest.MarkDecorator:
    """Returns a parametrization over the kinds of optimizer in every layout."""
    return pytest.mark.parametrize(
        ("name", "kind"),
        [
            pytest.param(
                name,
                kind,
                marks=[] if QUICK.get(name) == kind else [pytest.mark.slow("full grid of layouts and kinds")],
            )
            for name in LAYOUTS
            for kind in KINDS
        ],
    )


class Laboratory:
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, model: Path, chosen: set[tuple[str, str]]):
        """`chosen`: layouts and kinds of optimizers, or `gathered`."""
        self.directory, self.model, self.chosen = directory, model, chosen
        self.results = cached(self._run)

    def _run(self, name: str, engine: bool = False) -> list[dict[str, Any]]:
        """Runs the ranks; `engine`: with Transformer Engine's optimizer whose moments are short."""
        kinds = ["short"] if engine else [kind for kind in KINDS if (name, kind) in self.chosen]
        job = {"model": self.model, "layout": LAYOUTS[name], "kinds": kinds, "engine": engine}
        job["gathered"] = name == "single" or (name, "gathered") in self.chosen
        out = self.directory / (f"{name}-engine" if engine else name)
        role = "rank_with_engine" if engine else "rank"
        return run_ranks(train, out, LAYOUTS[name]["world_size"], job, role=role)

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Returns results by rank."""
        return self.results(name)


@pytest.fixture(scope="module")
def laboratory(
    deep_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Laboratory:
    """Makes one of pipeline stages that can be interleaved."""
    cases = [case for case in chosen_cases(request) if "name" in case]
    chosen = {(case["name"], case.get("kind") or case["part"]) for case in cases}
    return Laboratory(tmp_path_factory.mktemp("optimizer_state"), deep_model, chosen)


@every_kind()
def test_moments_on_the_host_give_the_same_bits(laboratory, name, kind):
    for results in laboratory[name]:
        assert results[f"host_moments_{kind}_0.5"] and results[f"host_moments_{kind}_1.0"]


@every_kind()
def test_host_moments_continue_with_another_fraction_on_the_host(laboratory, name, kind):
    for results in laboratory[name]:
        assert results[f"host_moments_{kind}_restored"] and results[f"host_moments_{kind}_went_on"]


@every_kind()
def test_a_run_goes_on_from_a_checkpoint_with_another_learning_rate(laboratory, name, kind):
    assert all(results[f"host_moments_{kind}_faster"] for results in laboratory[name])


@every_kind()
def test_a_checkpoint_before_the_first_step_changes_nothing(laboratory, name, kind):
    for results in laboratory[name]:
        assert results[f"unstepped_{kind}"] == [True, True]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, "gathered", marks=[] if name in QUICK else [pytest.mark.slow("full grid of layouts")])
        for name in LAYOUTS
    ],
)
def test_a_checkpoint_that_megatron_gathered_is_restored_bit_for_bit(laboratory, name, part):
    assert all(results["gathered"] for results in laboratory[name])


def came_back_whole(found: dict[str, Any]) -> bool:
    """Checks the results of `StateRank.offload` for one kind of optimizer."""
    nothing = set(found["away"].values()) == {0} and found["storages"] == [0]
    half = {"weights": found["whole"]["weights"], "gradients": 0, "optimizer state": 0}
    moved = min(found["whole"].values()) > 0 and found["half"] == found["only"] == half
    same = found["back"] == found["whole"] and found["kept"] and found["published"] and found["same"]
    return nothing and moved and same


@every_kind()
def test_an_offloaded_trainer_holds_nothing_and_comes_back_as_it_was(laboratory, name, kind):
    assert all(came_back_whole(results[f"offloaded_{kind}"]) for results in laboratory[name])


@every_kind()
def test_training_goes_on_after_offloading_as_if_nothing_had_been(laboratory, name, kind):
    assert all(results[f"offloaded_{kind}"]["trained"] for results in laboratory[name])


@pytest.mark.slow("needs .venv/transformer-engine, a start of ranks")
def test_bf16_moments_are_planned_saved_and_offloaded(laboratory):
    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    for results in laboratory.results("EP2", engine=True):
        assert (results["short_moments"], results["long_moments"]) == (["torch.bfloat16"], ["torch.float32"])
        assert results["short_steps"] != results["long_steps"]
        for kind in ("short", "long"):
            assert results[f"{kind}_planned"] == results[f"{kind}_bytes"]
            assert results[f"{kind}_elsewhere"], (
                "a checkpoint gives its moments to a run that keeps the other precision"
            )
        (weights, gradients, short), (*other, long) = results["short_bytes"], results["long_bytes"]
        assert [weights, gradients] == other and 3 * short == 2 * long
        assert results["unstepped_short"] == [True, True]
        assert came_back_whole(results["offloaded_short"]) and results["offloaded_short"]["trained"]
