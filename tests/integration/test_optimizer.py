"""Optimizer steps: gloo ranks of four layouts against torch's AdamW and one rank, frozen and skipped ones too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.data.batch import MicroBatch, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.errors import SlimxError
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.trainer_rank import CLIPPED, Rank, demonstrations, equal, shard
from tests.refusals import refusal_fields

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "EP2": {"world_size": 2, "expert": 2},
    "PP2xVPP2": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
}
PARTS = ("frozen", "skipped", "without_signal")
QUICK_PARTS = {"single": PARTS, "EP2": ("skipped",), "PP2xVPP2": ("frozen",)}
"""Layout -> the parts that it has in `make test`."""
FREEZING = {"single": {"recompute": {"granularity": "full"}}, "PP2xVPP2": {"recompute": {"granularity": "selective"}}}
"""Recomputed layers get no gradient if their input, a frozen embedding's output, needs none."""
FROZEN = ["model.embed_tokens.weight", "decoder.layers.[01].*"]
"""The first half of the model: a whole pipeline stage of two, a chunk of each rank where stages are interleaved."""
UNDECAYED = ["*.mlp.router.weight", "model.layers.3.mlp.experts.5.down_proj.weight"]
STEPS = 3
WITH_TERMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kl": ({"reference": True, "kl_coef": 0.5}, {}),
    "entropy": ({"entropy_coef": 0.1}, {}),
    "balance": ({}, {"aux_loss_coef": 0.01}),
    "z": ({}, {"z_loss_coef": 0.01}),
}
"""Sections `algorithm` and `trainer.moe` of losses with another term."""


class OptimizerRank(Rank):
    sequences = 6
    optimizer = CLIPPED

    def gradients_without_freezing(self) -> None:
        # Without the distributed optimizer every rank has whole gradients.
        trainer = self.trainer(distributed_optimizer=False, optimizer={"clip_grad": 0.0})
        self.steps(trainer, (0,))
        self.write_tensors("gradients", self.gradients(trainer))

    def freeze(self) -> None:
        import torch

        extra = self.job["freezing"]
        trainer = self.trainer(distributed_optimizer=False, freeze=FROZEN, optimizer={"clip_grad": 0.0}, **extra)
        self.steps(trainer, (0,))
        self.write_tensors("frozen_gradients", self.gradients(trainer))
        trainer = self.trainer(freeze=FROZEN, **extra)
        before = self.weights(trainer)
        self.steps(trainer, range(STEPS))
        after = self.weights(trainer)
        self.write_tensors("frozen_weights", trainer.weights.parameters)
        trainable = set(trainer.weights.trainable())
        self.results["frozen"] = {
            " + ".join(part.sources): [
                bool(torch.equal(before[part.name], after[part.name])),
                " + ".join(part.sources) in trainable,
                getattr(trainer.weights.parameters[part.name], "main_grad", None) is not None,
            ]
            for part in trainer.weights.parts
        }
        # Of the distributed optimizer each rank has a share.
        self.results["state_elements"] = sum(
            p.numel() for group in trainer.optimizer.param_groups for p in group["params"]
        )
        self.results["trainable_elements"] = sum(p.numel() for p in trainer.weights.trainable().values())
        path = self.out / "checkpoint"
        self.save(trainer, path, step=STEPS)
        ahead = self.steps(trainer, (STEPS, STEPS + 1))
        fresh = self.trainer(freeze=FROZEN, **extra)
        fresh.restore(str(path), same_layout=True)
        self.results["restored"] = [ahead, self.steps(fresh, (STEPS, STEPS + 1))]
        self.results["restored_equal"] = equal(self.weights(trainer), self.weights(fresh))

    def skip(self) -> None:
        trainer = self.trainer(optimizer={"max_skipped": 2})
        self.steps(trainer, (0, 1))
        weights, moments = self.weights(trainer), self.moments(trainer)
        poisoned = self.demonstrated(2)
        if self.parallel.coordinates.data == 0:  # one token of one data-parallel rank
            poisoned[0].weight[int(np.flatnonzero(poisoned[0].weight)[0])] = math.nan
        first = trainer.train_step(poisoned, step=2, version=0)
        self.results["skipped"] = first["optim/skipped"]
        self.results["skip_left_all"] = equal(weights, self.weights(trainer)) and equal(moments, self.moments(trainer))
        self.results["after_skip"] = trainer.train_step(self.demonstrated(3), step=3, version=0)["optim/skipped"]
        self.results["after_skip_moved"] = not equal(weights, self.weights(trainer))
        hooked = trainer.weights.trainable().get("model.layers.2.mlp.experts.6.down_proj.weight")
        if hooked is not None:
            hooked.register_hook(lambda gradient: gradient * math.inf)
        trainer.train_step(self.demonstrated(0), step=4, version=0)
        try:
            trainer.train_step(self.demonstrated(1), step=5, version=0)
        except SlimxError as error:
            self.results["stopped"] = refusal_fields(error)

    def train_without_signal(self) -> None:
        """Takes a third step whose advantages are all 0: alone, and with each other term that a loss may have."""
        from slimx.config.sections.algorithm import Algorithm

        for name in ("alone", *WITH_TERMS):
            algorithm, moe = WITH_TERMS.get(name, ({}, {}))
            config = self.config(moe=moe).model_copy(update={"algorithm": Algorithm(name="grpo", **algorithm)})
            trainer = self.trainer(config)
            for step in range(2):
                trainer.train_step(self.sampled(step, 1.0), step=step, version=None)
            weights, moments = self.weights(trainer), self.moments(trainer)
            metrics = trainer.train_step(self.sampled(2, 0.0), step=2, version=None)
            same = equal(weights, self.weights(trainer)) and equal(moments, self.moments(trainer))
            self.results[f"without_signal_{name}"] = [
                metrics["optim/zero_gradient"],
                metrics["optim/grad_norm"] == 0,
                same,
                trainer.train_step(self.sampled(3, 1.0), step=3, version=None)["optim/zero_gradient"],
            ]
            if name == "alone":
                # Gradients that are not 0, whose squares are.
                metrics = trainer.train_step(self.sampled(4, 1e-25), step=4, version=None)
                self.results["tiny_gradient"] = [metrics["optim/zero_gradient"], metrics["optim/grad_norm"]]

    def sampled(self, step: int, advantage: float) -> list[MicroBatch]:
        """Returns those of `demonstrated`, with the log-probs of an engine."""
        trajectories = demonstrations(step)[: self.sequences]
        for trajectory in trajectories:
            trajectory.logprobs[:] = -3.0
        weights = loss_weights(trajectories, "token")
        return shard(make_rows(trajectories, [advantage] * len(trajectories), weights), self.parallel)

    def compare_with_adamw(self, name: str, **options: Any) -> None:
        """Steps torch's AdamW (fp32) on the run's clipped gradients; keeps the largest distance of main weights."""
        import torch

        trainer = self.trainer(**options)
        named = trainer.weights.trainable()
        main = {key: p.main_param if hasattr(p, "main_param") else p for key, p in named.items()}
        twin = {key: main[key].detach().clone().view(named[key].shape).requires_grad_() for key in named}
        plain = [
            key
            for key in named
            if "norm" in key or ".mlp.gate." in key or key == "model.layers.3.mlp.experts.5.down_proj.weight"
        ]
        decayed = [key for key in named if key not in plain]
        adam = torch.optim.AdamW(
            [
                {"params": [twin[key] for key in decayed], "weight_decay": CLIPPED["weight_decay"]},
                {"params": [twin[key] for key in plain], "weight_decay": 0.0},
            ],
            lr=CLIPPED["lr"],
            betas=CLIPPED["betas"],
            eps=CLIPPED["eps"],
        )
        norms = []
        for step in range(5):
            trainer.train_step(self.demonstrated(step), step=step, version=0)
            for key, parameter in named.items():
                twin[key].grad = parameter.main_grad.detach().clone()
            norms.append(math.sqrt(sum(float(t.grad.double().square().sum()) for t in twin.values())))
            adam.step()
        distance = max(float((main[key].view_as(twin[key]) - twin[key]).abs().max()) for key in named)
        moved = min(float((main[key].view_as(twin[key]) - twin[key]).abs().max()) for key in named)
        self.results[name] = {
            "distance": distance,
            "least": moved,
            "norms": norms,
            "rounded": all(torch.equal(p.detach(), main[k].view_as(p).to(p.dtype)) for k, p in named.items()),
            "exact": all(torch.equal(main[k], main[k].bfloat16().float()) for k in named),
        }


def train(job: dict[str, Any], number: int) -> dict[str, Any]:
    rank = OptimizerRank(job, number)
    if "frozen" in job["parts"]:
        rank.gradients_without_freezing()
        rank.freeze()
    if "skipped" in job["parts"]:
        rank.skip()
    if "without_signal" in job["parts"]:
        rank.train_without_signal()
    if rank.sizes.world == 1:
        rank.compare_with_adamw("bfloat16", dtype="bfloat16", optimizer={"no_weight_decay": UNDECAYED})
        rank.compare_with_adamw("float32", distributed_optimizer=False, optimizer={"no_weight_decay": UNDECAYED})
    return rank.finish()


def every_layout(part: str, *, several: bool = False) -> pytest.MarkDecorator:
    """Returns a parametrization over the layouts with a part. `several`: without that of one rank."""
    return pytest.mark.parametrize(
        ("name", "part"),
        [
            pytest.param(
                name,
                part,
                marks=[] if part in QUICK_PARTS.get(name, ()) else [pytest.mark.slow("full grid of layouts and parts")],
            )
            for name in LAYOUTS
            if name != "single" or not several
        ],
    )


class Laboratory:
    """Runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, model: Path, chosen: set[tuple[str, str]]):
        """`chosen`: layouts and parts; one rank takes all parts."""
        self.directory, self.model, self.chosen = directory, model, chosen
        self.results = cached(self._run)

    def _run(self, name: str) -> list[dict[str, Any]]:
        parts = [part for part in PARTS if name == "single" or (name, part) in self.chosen]
        job = {"model": self.model, "layout": LAYOUTS[name], "freezing": FREEZING.get(name, {}), "parts": parts}
        return run_ranks(train, self.directory / name, LAYOUTS[name]["world_size"], job)

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Returns results by rank."""
        return self.results(name)

    def tensors(self, name: str, file: str) -> Weights:
        assert self[name]
        return load_file(self.directory / name / f"{file}.safetensors")


@pytest.fixture(scope="module")
def laboratory(
    deep_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Laboratory:
    """Makes one of pipeline stages that can be interleaved, and half of which can be frozen."""
    chosen = {(case["name"], case["part"]) for case in chosen_cases(request) if "part" in case}
    return Laboratory(tmp_path_factory.mktemp("optimizer"), deep_model, chosen)


# Frozen parameters ----------------------------------------------------------------------------------------------------


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))


@every_layout("frozen")
def test_frozen_parameters_have_neither_gradient_nor_state(laboratory, name, part):
    seen = set()
    for results in laboratory[name]:
        for parameter, (unchanged, trainable, has_gradient) in results["frozen"].items():
            seen.add(parameter)
            assert unchanged == is_frozen(parameter), parameter
            assert trainable == has_gradient == (not is_frozen(parameter)), parameter
    assert any(map(is_frozen, seen)) and not all(map(is_frozen, seen))
    # The distributed optimizer divides what all trainable parameters need among the ranks that hold the same.
    if "expert" not in LAYOUTS[name]:
        for results in laboratory[name]:
            assert results["state_elements"] == results["trainable_elements"]


@every_layout("frozen")
def test_freezing_changes_no_other_gradient_also_with_recomputation(laboratory, name, part):
    plain, frozen = (laboratory.tensors(name, file) for file in ("gradients", "frozen_gradients"))
    assert plain.keys() == frozen.keys()
    for parameter, gradient in plain.items():
        if is_frozen(parameter):
            assert not frozen[parameter].any(), parameter
        else:
            torch.testing.assert_close(frozen[parameter], gradient, rtol=1e-6, atol=1e-8, msg=parameter)


@every_layout("frozen", several=True)
def test_a_half_frozen_model_trains_alike_in_every_layout(laboratory, name, part):
    single, several = (laboratory.tensors(x, "frozen_weights") for x in ("single", name))
    for parameter, weight in single.items():
        assert (several[parameter] - weight).abs().max() <= 1e-3 * weight.abs().max(), parameter


@every_layout("frozen")
def test_a_half_frozen_trainer_continues_from_its_checkpoint_bit_for_bit(laboratory, name, part):
    for results in laboratory[name]:
        ahead, restored = results["restored"]
        assert ahead == restored and results["restored_equal"]


# Steps that are skipped -----------------------------------------------------------------------------------------------


@every_layout("skipped")
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(laboratory, name, part):
    for rank, results in enumerate(laboratory[name]):
        assert results["skipped"] == 1.0 and results["skip_left_all"], rank
        assert results["after_skip"] == 0.0 and results["after_skip_moved"], rank


@every_layout("skipped")
def test_too_many_skips_stop_every_rank_with_the_first_bad_parameter(laboratory, name, part):
    ((code, about, sentence),) = {tuple(results["stopped"]) for results in laboratory[name]}
    assert (code, about) == ("trainer.max_skipped", "trainer.optimizer.max_skipped")
    assert "model.layers.2.mlp.experts.6.down_proj.weight" in sentence


@every_layout("without_signal")
def test_an_update_without_gradient_changes_neither_weights_nor_moments(laboratory, name, part):
    for rank, results in enumerate(laboratory[name]):
        assert results["without_signal_alone"] == [1.0, True, True, 0.0], rank
        for term in WITH_TERMS:
            assert results[f"without_signal_{term}"] == [0.0, False, False, 0.0], (rank, term)
        assert results["tiny_gradient"] == [0.0, 0.0], rank


# AdamW ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_main_weights_follow_an_independent_fp32_adamw(laboratory, dtype):
    """Within 2e-6 after five steps of 2e-3: one unit in the last place of a weight near 1 is 1.2e-7."""
    results = laboratory["single"][0][dtype]
    assert results["distance"] <= 2e-6
    assert results["norms"] == pytest.approx([CLIPPED["clip_grad"]] * 5, rel=1e-4), "every step must clip"


def test_weights_of_a_bf16_model_are_the_rounded_main_weights(laboratory):
    results = laboratory["single"][0]["bfloat16"]
    assert results["rounded"] and not results["exact"]
