"""Optimizer steps and where their state lies: gloo ranks of four layouts against torch's AdamW, one rank, and
themselves undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slimx.runtime.ports import free_port
from tests.integration import transformer_engine_stand
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights
from tests.integration.optimizer_rank import KINDS, OPTIMIZER, WITH_TERMS
from tests.integration.rank_processes import run_ranks
from tests.needed import missing

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "EP2": {"world_size": 2, "expert": 2},
    "PP2xVPP2": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
}
PARTS = ("frozen", "skipped", "without_signal", "gathered")
QUICK_PARTS = {"single": PARTS, "EP2": ("skipped", "gathered"), "PP2xVPP2": ("frozen",)}
"""Layout -> the parts of `optimizer_rank` that it has in `make test`."""
QUICK = {"single": "float32", "EP2": "bfloat16"}
"""Layout -> the kind of optimizer whose state leaves and comes back there in `make test`."""
FREEZING = {"single": {"recompute": {"granularity": "full"}}, "PP2xVPP2": {"recompute": {"granularity": "selective"}}}
"""Recomputed layers get no gradient if their input, a frozen embedding's output, needs none."""


def each_layout(part: str, *, several: bool = False) -> pytest.MarkDecorator:
    """Every layout with a part of `optimizer_rank`. `several`: without that of one rank."""
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


def each_kind() -> pytest.MarkDecorator:
    """Every kind of optimizer in every layout."""
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
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, model: Path, chosen: set[tuple[str, str]]):
        """`chosen`: layouts and kinds of optimizers or parts; one rank takes all parts."""
        self.directory, self.model, self.chosen = directory, model, chosen
        self._done: dict[str, list[dict[str, Any]] | AssertionError] = {}

    def run_in(self, name: str, kinds: list[str], role: str = "rank") -> list[dict[str, Any]]:
        """Answers of the ranks of layout `name`; `role`: as `run_ranks` takes it."""
        out = self.directory / (f"{name}-engine" if role != "rank" else name)
        out.mkdir()
        job = {
            "model": str(self.model),
            "layout": LAYOUTS[name],
            "freezing": FREEZING.get(name, {}),
            "parts": [part for part in PARTS if name == "single" or (name, part) in self.chosen],
            "kinds": kinds,
            "engine": role != "rank",
            "out": str(out),
            "init_method": f"tcp://127.0.0.1:{free_port()}",
        }
        (out / "job.json").write_text(json.dumps(job))
        world = LAYOUTS[name]["world_size"]
        run_ranks("tests.integration.optimizer_rank", out, world, role=role)
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """What the ranks said."""
        if name not in self._done:
            try:
                self._done[name] = self.run_in(name, [kind for kind in KINDS if (name, kind) in self.chosen])
            except AssertionError as error:
                self._done[name] = error
        if isinstance(done := self._done[name], AssertionError):
            raise done
        return done

    def tensors(self, name: str, file: str) -> Weights:
        assert self[name]
        return load_file(self.directory / name / f"{file}.safetensors")


@pytest.fixture(scope="module")
def laboratory(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Laboratory:
    """On a model of four layers, so that pipeline stages can be interleaved and half of it be frozen."""
    directory = tmp_path_factory.mktemp("optimizer")
    config = json.loads((tiny_model / "config.json").read_text()) | {"num_hidden_layers": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).to(torch.float32)
    model.save_pretrained(directory / "model")
    (directory / "model" / "config.json").write_text(json.dumps(config))
    params = chosen_cases(request)
    chosen = {(each["name"], each[key]) for each in params if "name" in each for key in ("kind", "part") if key in each}
    return Laboratory(directory, directory / "model", chosen)


# Frozen parameters ----------------------------------------------------------------------------------------------------


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))


@each_layout("frozen")
def test_frozen_parameters_have_neither_gradient_nor_state(laboratory, name, part):
    seen = set()
    for said in laboratory[name]:
        for parameter, (unchanged, trainable, has_gradient) in said["frozen"].items():
            seen.add(parameter)
            assert unchanged == is_frozen(parameter), parameter
            assert trainable == has_gradient == (not is_frozen(parameter)), parameter
    assert any(map(is_frozen, seen)) and not all(map(is_frozen, seen))
    # The distributed optimizer divides what all trainable parameters need among the ranks that hold the same.
    if "expert" not in LAYOUTS[name]:
        for said in laboratory[name]:
            assert said["state_elements"] == said["trainable_elements"]


@each_layout("frozen")
def test_freezing_changes_no_other_gradient_also_with_recomputation(laboratory, name, part):
    plain, frozen = (laboratory.tensors(name, file) for file in ("gradients", "frozen_gradients"))
    assert plain.keys() == frozen.keys()
    for parameter, gradient in plain.items():
        if is_frozen(parameter):
            assert not frozen[parameter].any(), parameter
        else:
            torch.testing.assert_close(frozen[parameter], gradient, rtol=1e-6, atol=1e-8, msg=parameter)


@each_layout("frozen", several=True)
def test_a_half_frozen_model_trains_alike_in_every_layout(laboratory, name, part):
    single, several = (laboratory.tensors(each, "frozen_weights") for each in ("single", name))
    for parameter, weight in single.items():
        assert (several[parameter] - weight).abs().max() <= 1e-3 * weight.abs().max(), parameter


@each_layout("frozen")
def test_a_half_frozen_trainer_continues_from_its_checkpoint_bit_for_bit(laboratory, name, part):
    for said in laboratory[name]:
        ahead, restored = said["restored"]
        assert ahead == restored and said["restored_equal"]


# Steps that are skipped -----------------------------------------------------------------------------------------------


@each_layout("skipped")
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(laboratory, name, part):
    for rank, said in enumerate(laboratory[name]):
        assert said["skipped"] == 1.0 and said["skip_left_all"], rank
        assert said["after_skip"] == 0.0 and said["after_skip_moved"], rank


@each_layout("skipped")
def test_too_many_skips_stop_every_rank_with_the_first_bad_parameter(laboratory, name, part):
    ((code, about, sentence),) = {tuple(said["stopped"]) for said in laboratory[name]}
    assert (code, about) == ("trainer.max_skipped", "trainer.optimizer.max_skipped")
    assert "model.layers.2.mlp.experts.6.down_proj.weight" in sentence


@each_layout("without_signal")
def test_an_update_without_gradient_changes_neither_weights_nor_moments(laboratory, name, part):
    for rank, said in enumerate(laboratory[name]):
        assert said["without_signal_alone"] == [1.0, True, True, 0.0], rank
        for term in WITH_TERMS:
            assert said[f"without_signal_{term}"] == [0.0, False, False, 0.0], (rank, term)
        assert said["tiny_gradient"] == [0.0, 0.0], rank


# AdamW ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_main_weights_follow_an_independent_fp32_adamw_with_its_own_groups(laboratory, dtype):
    """Within 2e-6 after five steps of 2e-3: one unit in the last place of a weight near 1 is 1.2e-7."""
    said = laboratory["single"][0][dtype]
    assert said["distance"] <= 2e-6
    assert said["norms"] == pytest.approx([OPTIMIZER["clip_grad"]] * 5, rel=1e-4), "every step must clip"


def test_weights_of_a_bf16_model_are_the_rounded_main_weights(laboratory):
    said = laboratory["single"][0]["bfloat16"]
    assert said["rounded"] and not said["exact"]


# State on the host ----------------------------------------------------------------------------------------------------


@each_kind()
def test_moments_on_the_host_give_the_same_bits(laboratory, name, kind):
    for said in laboratory[name]:
        assert said[f"host_moments_{kind}_0.5"] and said[f"host_moments_{kind}_1.0"]


@each_kind()
def test_host_moments_continue_with_another_fraction_on_the_host(laboratory, name, kind):
    for said in laboratory[name]:
        assert said[f"host_moments_{kind}_restored"] and said[f"host_moments_{kind}_went_on"]


@each_kind()
def test_a_run_goes_on_from_a_checkpoint_with_another_learning_rate(laboratory, name, kind):
    assert all(said[f"host_moments_{kind}_faster"] for said in laboratory[name])


@each_kind()
def test_a_checkpoint_before_the_first_step_changes_nothing(laboratory, name, kind):
    for said in laboratory[name]:
        assert said[f"unstepped_{kind}"] == [True, True]


@each_layout("gathered")
def test_a_checkpoint_that_megatron_gathered_is_restored_bit_for_bit(laboratory, name, part):
    assert all(said["gathered"] == [True, True] for said in laboratory[name])


def came_back_whole(found: dict[str, Any]) -> bool:
    """Check what `OptimizerRank.offloaded` says about one kind of optimizer."""
    nothing = set(found["away"].values()) == {0} and found["storages"] == [0]
    half = {"weights": found["whole"]["weights"], "gradients": 0, "optimizer state": 0}
    moved = min(found["whole"].values()) > 0 and found["half"] == found["only"] == half
    same = found["back"] == found["whole"] and found["kept"] and found["published"] and found["same"]
    return nothing and moved and same


@each_kind()
def test_an_offloaded_trainer_holds_nothing_and_comes_back_as_it_was(laboratory, name, kind):
    assert all(came_back_whole(said[f"offloaded_{kind}"]) for said in laboratory[name])


@each_kind()
def test_training_goes_on_after_offloading_as_if_nothing_had_been(laboratory, name, kind):
    assert all(said[f"offloaded_{kind}"]["trained"] for said in laboratory[name])


@pytest.mark.slow("needs .venv/transformer-engine, a start of ranks")
def test_bf16_moments_are_planned_saved_and_offloaded(laboratory):
    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    for said in laboratory.run_in("EP2", ["short"], "rank_with_engine"):
        assert (said["short_moments"], said["long_moments"]) == (["torch.bfloat16"], ["torch.float32"])
        assert said["short_steps"] != said["long_steps"]
        for kind in ("short", "long"):
            assert said[f"{kind}_planned"] == said[f"{kind}_held"]
            assert said[f"{kind}_elsewhere"], "a checkpoint gives its moments to a run that keeps the other precision"
        (weights, gradients, short), (*other, long) = said["short_held"], said["long_held"]
        assert [weights, gradients] == other and 3 * short == 2 * long
        assert said["unstepped_short"] == [True, True]
        assert came_back_whole(said["offloaded_short"]) and said["offloaded_short"]["trained"]
