"""Data-parallel ranks exchange the same bits during passes as between them, and bf16 rounds gradients once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.integration.block_models import make_block_model
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_rank import Rank, equal

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"world_size": 2},
    "PP2xVPP2xDP2": {"world_size": 4, "pipeline": 2, "virtual_pipeline": 2},
}
STEPS = 3
"""megatron-core learns in the first one which gradients to wait for, and overlaps from the second on."""


class OverlapRank(Rank):
    def overlapping(self, *, overlap: bool, halved: bool | None = None, **options: Any) -> Any:
        """Makes a trainer; `halved`: of a bf16 model, whose gradients are summed in bf16 if it is true."""
        config = self.config(
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

    def watch_sums(self, trainer: Any) -> list[list[str]]:
        """Returns events by step, in their order from now on: a sum that begins, and the end of the backward pass."""
        steps: list[list[str]] = [[]]
        settings = trainer.chunks[0].config

        def begins(begin: Any, **options: Any) -> None:
            steps[-1].append("sum")
            begin(**options)

        def ends(finish: Any, *arguments: Any, **options: Any) -> None:
            steps[-1].append("end")
            finish(*arguments, **options)
            steps.append([])

        for chunk in trainer.chunks:
            for group in chunk.bucket_groups:
                group.start_grad_sync = partial(begins, group.start_grad_sync)
        settings.finalize_model_grads_func = partial(ends, settings.finalize_model_grads_func)
        return steps

    def compare_sums(self) -> None:
        after, overlapped = self.overlapping(overlap=False), self.overlapping(overlap=True)
        begun = self.watch_sums(overlapped)
        expected, path = self.steps(after, range(STEPS)), self.out / "checkpoint"
        self.results["metrics"] = [expected, self.steps(overlapped, range(STEPS))]
        self.results["begun"] = begun
        self.results["equal"] = equal(self.weights(after), self.weights(overlapped))
        self.save(overlapped, path, step=STEPS)
        resumed = self.overlapping(overlap=False)
        resumed.restore(str(path), same_layout=True)
        self.results["resumed"] = [self.steps(trainer, range(STEPS, STEPS + 2)) for trainer in (overlapped, resumed)]
        self.results["resumed_equal"] = equal(self.weights(overlapped), self.weights(resumed))

    def compare_gathers(self) -> None:
        """Steps of two updates, after which the weights are read on each rank."""
        at_once, overlapped = self.overlapping(overlap=True), self.overlapping(overlap=True, overlap_param_gather=True)
        self.results["gathered"], self.results["order"], self.results["stage"] = (
            [],
            [],
            self.parallel.coordinates.pipeline,
        )
        events = self.watch_gathers(overlapped)
        for step in range(2):
            events.clear()
            for trainer in (at_once, overlapped):
                updates = [self.demonstrated(2 * step + number) for number in range(2)]
                metrics = trainer.train_updates(updates, step=step, version=0)
                self.results["gathered"].append(metrics)
            self.results["order"].append([*events])
            self.results[f"gathered_equal_{step}"] = equal(self.weights(at_once), self.weights(overlapped))
        path = self.out / "gathered"
        self.save(overlapped, path, step=2)
        at_once.restore(str(path), same_layout=True)
        scored = [trainer.logprobs(self.demonstrated(9)) for trainer in (at_once, overlapped)]
        self.results["scored_equal"] = all((one == other).all() for one, other in zip(*scored, strict=True))

    def watch_gathers(self, trainer: Any) -> list[str]:
        """Returns events in their order from now on: a layer that computes, a gather that begins, and a step."""
        from slimx.trainer.model.build import unwrap

        events: list[str] = []

        def recorded(event: str, call: Any, *arguments: Any, **options: Any) -> Any:
            events.append(event)
            return call(*arguments, **options)

        for chunk in trainer.chunks:
            for layer in unwrap(chunk).decoder.layers:
                layer.forward = partial(recorded, "layer", layer.forward)
            for group in chunk.bucket_groups:
                group.start_param_sync = partial(recorded, "gather", group.start_param_sync)
        step = trainer.optimizer.step_with_ready_grads
        trainer.optimizer.step_with_ready_grads = partial(recorded, "step", step)
        return events

    def compare_precisions(self) -> None:
        """Trains on one micro-batch on each of two ranks: each gradient is in bf16 anyway, and one sum is rounded."""
        whole, halved = (
            self.overlapping(overlap=False, halved=halved, distributed_optimizer=False) for halved in (False, True)
        )
        for trainer in (whole, halved):
            trainer.train_step(self.demonstrated(0)[:1], step=0, version=0)
        sums = [self.gradients(trainer) for trainer in (whole, halved)]
        rounded = {name: value.bfloat16() for name, value in sums[0].items()}
        self.results["halved"] = sorted({str(value.dtype) for value in sums[1].values()})
        self.results["rounded_once"] = equal(rounded, sums[1])
        self.results["rounding"] = equal(sums[0], {name: value.float() for name, value in sums[1].items()})
        sharded = self.overlapping(overlap=True, halved=True)
        sharded.train_step(self.demonstrated(0)[:1], step=0, version=0)
        for trainer in (halved, sharded):
            self.steps(trainer, range(1, STEPS))
        self.results["sharded_equal"] = equal(self.weights(halved), self.weights(sharded))
        parts = sharded.optimizer.chained_optimizers
        left = [p.grad for part in parts for group in part.param_groups for p in group["params"]]
        self.results["copies_left"] = sum(gradient is not None for gradient in left)


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    overlapping = OverlapRank(job, rank)
    overlapping.compare_sums()
    overlapping.compare_gathers()
    if overlapping.sizes.world == 2:
        overlapping.compare_precisions()
    return overlapping.finish()


@pytest.fixture(
    scope="module", params=["DP2", pytest.param("PP2xVPP2xDP2", marks=pytest.mark.slow("a layout of four ranks"))]
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns results of each rank about a dense model, all of whose parameters have gradients."""
    layout, out = LAYOUTS[request.param], tmp_path_factory.mktemp(request.param)
    model = make_block_model(out / "model", dense=True, layers=4)
    return run_ranks(train, out, layout["world_size"], {"model": model, "layout": layout})


def test_gradients_reduced_during_the_backward_pass_are_equal(ranks: list[dict[str, Any]]) -> None:
    """Weights, metrics and a checkpoint that goes on without it."""
    for results in ranks:
        first, second, *_ = results["begun"]
        assert first[0] == "end", "the first step learns which gradients there are"
        assert len(first) > 2 and sorted(second) == sorted(first)
        assert second.index("end") > 1, "sums began before the backward pass had ended"
        assert results["equal"] and results["resumed_equal"]
        for kind in ("metrics", "resumed"):
            after, overlapped = results[kind]
            assert [*map(pytest.approx, after)] == overlapped


def test_weights_gathered_during_the_forward_pass_are_equal(ranks: list[dict[str, Any]]) -> None:
    """Between the updates of a step; when it ends they are whole: on every rank, in a checkpoint, for log-probs."""
    for results in ranks:
        for at_once, overlapped in (results["gathered"][:2], results["gathered"][2:]):
            assert pytest.approx(at_once) == overlapped
        assert results["gathered_equal_0"] and results["gathered_equal_1"] and results["scored_equal"]
        for events in results["order"]:
            before, between, after = " ".join(events).split("step")
            assert "gather" not in before, "the step before left the weights whole"
            assert between.index("gather") < between.index("layer")
            assert "layer gather" in between or results["stage"], (
                "the later layers' weights were gathered while the first layers computed"
            )
            assert "gather" in after


def test_gradients_in_bf16_are_rounded_once_where_two_ranks_add_them(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        if "halved" not in results:
            pytest.skip("the sums of several micro-batches are rounded several times")
        assert results["halved"] == ["torch.bfloat16"]
        assert results["rounded_once"] and not results["rounding"]
        assert results["sharded_equal"] and results["copies_left"] == 0
