"""What a trainer computes does not depend on its layout: gloo ranks of six layouts against one rank and transformers.

Each layout is one start of real processes (5 to 12 s) that do everything asked below; `trainer_rank.py` is one of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.sections.algorithm import Algorithm
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group
from slimx.data.saved.codec import save_groups
from slimx.layout.ranks import Sizes, coordinates
from slimx.runtime.ports import free_port
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights, perturbed
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_oracle import TEMPERATURE, Oracle, difference, rollouts, write_model
from tests.integration.trainer_rank import OPTIMIZER, STEPS, VERSION, demonstrations

pytestmark = pytest.mark.integration

LAYOUTS = {
    "single": {"world_size": 1},
    "DP2": {"world_size": 2},
    "EP2": {"world_size": 2, "expert": 2},
    "TP2": {"world_size": 2, "tensor": 2},
    "PP2": {"world_size": 2, "pipeline": 2},
    "EP2xTP2": {"world_size": 4, "tensor": 2, "expert": 2},
}
SIZES = {
    "single": Sizes(),
    "DP2": Sizes(data=2),
    "EP2": Sizes(data=2, expert=2),
    "TP2": Sizes(tensor=2, expert_tensor=2),
    "PP2": Sizes(pipeline=2),
    "EP2xTP2": Sizes(tensor=2, data=2, expert=2, expert_tensor=2),
}
RESTORES = {"TP2": ["DP2"], "EP2": ["DP2"], "EP2xTP2": ["EP2"]}
"""Layout -> whose checkpoints it loads."""
SLOW = ("DP2", "TP2", "PP2", "EP2xTP2")
"""EP2 has two data-parallel ranks. In `make test` test_invariance has gradients in every kind of split, and
test_checkpoints a checkpoint of DP2 in TP2, pipeline stages, context parallel and, refused, expert parallel ranks."""
ALL = [pytest.param(name, marks=[pytest.mark.slow("full grid of layouts")] if name in SLOW else []) for name in LAYOUTS]
SEVERAL = ALL[1:]


class Layout:
    """What the ranks of one layout wrote."""

    def __init__(self, name: str, directory: Path):
        self.directory, self.sizes = directory, SIZES[name]
        self.ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(self.sizes.world)]

    def tensors(self, name: str) -> Weights:
        return load_file(self.directory / f"{name}.safetensors")

    @property
    def last(self) -> dict[str, Any]:
        """What the last rank said: it belongs to the last pipeline stage, which knows the loss."""
        return self.ranks[-1]

    def logprobs(self) -> dict[tuple[int, ...], np.ndarray]:
        """Log-probs by sequence (its tokens with the last label)."""
        out = {}
        for rank in range(self.sizes.world):
            with np.load(self.directory / f"{rank}.npz") as arrays:
                count = sum(key.startswith("logprobs.") for key in arrays)
                for number in range(count):
                    end = np.cumsum(arrays[f"lengths.{number}"])
                    for start, stop in zip([0, *end], end, strict=False):
                        tokens, labels = (arrays[f"{key}.{number}"][start:stop] for key in ("tokens", "labels"))
                        if tokens.any():  # not the padding
                            out[(*tokens.tolist(), int(labels[-1]))] = arrays[f"logprobs.{number}"][start:stop]
        return out


class Laboratory:
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, inputs: dict[str, str], restored: set[str]):
        """`restored`: layouts whose checkpoints the chosen tests restore in others."""
        self.directory, self.inputs, self.restored = directory, inputs, restored
        self._done: dict[str, Layout | AssertionError] = {}

    def __getitem__(self, name: str) -> Layout:
        if name not in self._done:
            try:
                self._done[name] = self._run(name)
            except AssertionError as error:
                self._done[name] = error
        if isinstance(done := self._done[name], AssertionError):
            raise done
        return done

    def _run(self, name: str) -> Layout:
        others = [other for other in RESTORES.get(name, []) if other in self.restored]
        restore = [str(self[other].directory / "checkpoint") for other in others]
        out = self.directory / name
        out.mkdir()
        job = {
            **self.inputs,
            "layout": LAYOUTS[name],
            "out": str(out),
            "checkpoint": str(out / "checkpoint"),
            "restore": restore,
            "init_method": f"tcp://127.0.0.1:{free_port()}",
        }
        (out / "job.json").write_text(json.dumps(job))
        run_ranks("tests.integration.trainer_rank", out, LAYOUTS[name]["world_size"])
        return Layout(name, out)


# Inputs and what transformers says of them ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models whose attention and routing are far from uniform."""
    directory = tmp_path_factory.mktemp("models")
    weights = perturbed(tiny_weights, 1, 0.05)
    return {
        "model": write_model(directory / "model", tiny_model, weights),
        "policy": write_model(directory / "policy", tiny_model, perturbed(weights, 2, 0.01)),
    }


@pytest.fixture(scope="module")
def oracles(models: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(path) for name, path in models.items()}


@pytest.fixture(scope="module")
def groups(oracles: dict[str, Oracle]) -> list[Group]:
    return rollouts(oracles["policy"])


@pytest.fixture(scope="module")
def laboratory(
    models: dict[str, Path],
    groups: list[Group],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Laboratory:
    directory = tmp_path_factory.mktemp("layouts")
    saved = directory / "groups.bin"
    save_groups(saved, groups)
    restored = {case["other"] for case in chosen_cases(request) if "other" in case}
    return Laboratory(directory, {**{name: str(path) for name, path in models.items()}, "groups": str(saved)}, restored)


# One rank against transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_logprobs_are_those_of_transformers(laboratory, oracles, name):
    found = laboratory[name].logprobs()
    wanted = [trajectory.token_ids for trajectory in demonstrations(0)]
    assert found.keys() == {tuple(tokens.tolist()) for tokens in wanted}
    with torch.no_grad():
        logprobs = oracles["model"].logprobs(wanted)
    for tokens, expected in zip(wanted, logprobs, strict=True):
        assert np.abs(found[tuple(tokens.tolist())] - expected.numpy()).max() <= 1e-5


def test_loss_and_gradients_of_one_rank_are_those_of_transformers(laboratory, oracles):
    oracle = oracles["model"]
    oracle.model.zero_grad()
    loss = oracle.sft_loss(demonstrations(0))
    loss.backward()
    single = laboratory["single"]
    assert single.last["first_step"]["loss/sft"] == pytest.approx(loss.item(), abs=1e-5)
    worst, name = difference(single.tensors("sft_gradients"), oracle.gradients())
    assert worst <= 1e-5, name
    norm = sum(gradient.double().square().sum() for gradient in oracle.gradients().values()) ** 0.5
    assert single.last["first_step"]["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_supervised_steps_of_one_rank_equal_transformers_with_adamw(laboratory, models):
    oracle = Oracle(models["model"])
    parameters = list(oracle.model.parameters())
    # Vectors (norms) are not decayed.
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == many] for many in (True, False))
    options = {"betas": OPTIMIZER["betas"], "eps": OPTIMIZER["eps"]}
    decayed = {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}
    adam = torch.optim.AdamW([decayed, {"params": vectors, "weight_decay": 0.0}], **options)
    losses, norms = [], []
    for step in range(STEPS):
        # Two steps of warm-up, then linearly from 2e-3 at step 2 to 2e-4 at step 11.
        for group in adam.param_groups:
            group["lr"] = [1e-3, 2e-3][step] if step < 2 else 2e-3 - 1.8e-3 * (step - 2) / 9
        adam.zero_grad()
        loss = oracle.sft_loss(demonstrations(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_grad"]).item())
        losses.append(loss.item())
        adam.step()
    assert min(norms) > OPTIMIZER["clip_grad"] and losses[-1] < losses[0] - 0.2, "the steps must clip and learn"
    found = laboratory["single"].last["steps"]
    # The last two were one step of two updates, whose metrics are means.
    losses[-2:], norms[-2:] = [np.mean(losses[-2:])], [np.mean(norms[-2:])]
    assert [step["loss/sft"] for step in found] == pytest.approx(losses, abs=1e-4)
    assert [step["optim/grad_norm"] for step in found] == pytest.approx(norms, rel=1e-3)
    assert found[-1]["optim/lr"] == pytest.approx(2e-3 - 1.8e-3 * 7 / 9)
    worst, name = difference(laboratory["single"].tensors("weights"), oracle.named(lambda p: p.detach()))
    assert worst <= 1e-3, name


def test_a_grpo_step_of_one_rank_is_the_formula_over_transformers_logprobs(laboratory, oracles, groups):
    policy, reference = oracles["policy"], oracles["model"]
    policy.model.zero_grad()
    trajectories = [t for group in groups for t in group.trajectories]
    algorithm = Algorithm(loss={"low": 0.2, "high": 0.3})
    advantages = [value for group in groups for value in group_advantages(algorithm, group)]
    surrogate, kl, clipped, gaps, above, below = torch.zeros(()), torch.zeros(()), 0.0, [], 0, 0
    tokens, weights = [t.token_ids for t in trajectories], loss_weights(trajectories, "token")
    with torch.no_grad():
        others = reference.logprobs(tokens, TEMPERATURE)
    rows = zip(trajectories, advantages, weights, policy.logprobs(tokens, TEMPERATURE), others, strict=True)
    for t, advantage, weight, new, other in rows:
        trained = weight > 0
        new, other, weight = new[trained], other[trained], torch.from_numpy(weight[trained])
        old = torch.from_numpy(t.logprobs[1:])[trained]
        ratio = (new - old).exp()
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        surrogate = surrogate - (weight * terms).sum()
        kl = kl + (weight * ((other - new).exp() - (other - new) - 1)).sum()
        clipped += weight[(ratio * advantage > terms)].sum().item()
        above, below = above + int((ratio > 1.3).sum()), below + int((ratio < 0.8).sum())
        if t.oldest_version == VERSION:
            gaps += (new - old).abs().tolist()
    (surrogate + 0.5 * kl).backward()
    assert above > 5 and below > 5 and 0.05 < clipped < 0.5 and kl.item() > 1e-4, "the rollouts must exercise the loss"
    found = laboratory["single"].last["grpo_step"]
    assert found["loss/policy"] == pytest.approx(surrogate.item(), abs=1e-5)
    assert found["loss/clip_fraction"] == pytest.approx(clipped, abs=1e-6)
    assert found["kl/reference"] == pytest.approx(kl.item(), abs=1e-6)
    assert found["gap/tokens"] == len(gaps)
    assert found["gap/mean"] == pytest.approx(np.mean(gaps), abs=1e-5)
    assert found["gap/max"] == pytest.approx(max(gaps), abs=1e-5)
    worst, name = difference(laboratory["single"].tensors("grpo_gradients"), policy.gradients())
    assert worst <= 1e-5, name


# Layouts against one rank ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_ranks_stand_where_megatron_put_them(laboratory, name):
    layout = laboratory[name]
    places = [asdict(coordinates(rank, layout.sizes)) for rank in range(layout.sizes.world)]
    assert [said["place"] for said in layout.ranks] == places


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_the_first_step_are_those_of_one_rank(laboratory, name):
    layout, single = laboratory[name], laboratory["single"]
    worst, tensor = difference(layout.tensors("sft_gradients"), single.tensors("sft_gradients"))
    assert worst <= 1e-5, tensor
    for metric, value in single.last["first_step"].items():
        assert layout.last["first_step"][metric] == pytest.approx(value, rel=1e-5), metric


@pytest.mark.parametrize("name", SEVERAL)
def test_supervised_steps_with_the_distributed_optimizer_equal_one_rank(laboratory, name):
    layout, single = laboratory[name], laboratory["single"]
    losses = [[step["loss/sft"] for step in each.last["steps"]] for each in (layout, single)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and len(losses[1]) == STEPS - 1
    worst, tensor = difference(layout.tensors("weights"), single.tensors("weights"))
    assert worst <= 1e-3, tensor


@pytest.mark.parametrize("name", SEVERAL)
def test_a_grpo_step_on_saved_rollouts_is_that_of_one_rank(laboratory, name):
    layout, single = laboratory[name].last["grpo_step"], laboratory["single"].last["grpo_step"]
    assert layout.keys() == single.keys()
    for metric, value in single.items():
        assert layout[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    worst, tensor = difference(
        laboratory[name].tensors("grpo_gradients"), laboratory["single"].tensors("grpo_gradients")
    )
    assert worst <= 1e-5, tensor


@pytest.mark.parametrize("name", ALL)
def test_positions_with_other_experts_than_the_engines_are_counted_exactly(laboratory, groups, name):
    """Of the measured tokens, whose gaps all exceed 1e-5: differing here, explained by here or earlier, unexplained."""
    here = explained = measured = 0
    for t in (t for group in groups for t in group.trajectories if t.oldest_version == VERSION):
        trained = t.loss_mask[1:] > 0
        differs = np.isin(np.arange(len(trained)), t.metadata["corrupted"])
        here += int((differs & trained).sum())
        explained += int((np.maximum.accumulate(differs) & trained).sum())
        measured += int(trained.sum())
    assert 0 < here < explained < measured
    found = laboratory[name].last["grpo_step"]
    counts = ("routes/differing", "gap/tokens_other_routes", "gap/tokens_unexplained", "gap/tokens_above_1e-5")
    assert [found[count] for count in counts] == [here, explained, measured - explained, measured]


@pytest.mark.parametrize("name", ALL)
def test_the_measured_gap_equals_that_of_the_step(laboratory, name):
    measured, step = laboratory[name].last["gap"], laboratory[name].last["grpo_step"]
    assert measured == {key: step[key] for key in step if key.startswith(("gap/", "routes/"))}
    assert len(measured) == 8
    mismatch = {key: step[key] for key in step if key.startswith("mismatch/")}
    assert laboratory[name].last["mismatch"] == measured | mismatch and len(mismatch) == 5


@pytest.mark.parametrize("name", ALL)
def test_what_a_step_computed_of_every_token_adds_up_to_its_metrics(laboratory, name):
    layout = laboratory[name]
    whole = [
        [*batch]
        for rank, said in enumerate(layout.ranks)
        if (place := coordinates(rank, layout.sizes)).tensor == place.context == 0
        for batch in said["trained_tokens"]
    ]
    step = layout.last["grpo_step"]
    assert max(each[0] for each in whole) == step["gap/max"] > 0
    assert sum(each[1] for each in whole) / step["gap/tokens"] == pytest.approx(step["gap/mean"], rel=1e-9)
    assert sum(each[2] for each in whole) == step["routes/differing"] > 0
    assert all(said["told_again"] == [] for said in layout.ranks), "values are told once"


@pytest.mark.parametrize("name", ALL)
def test_every_rank_of_the_last_stage_knows_the_metrics_of_the_whole_batch(laboratory, name):
    layout = laboratory[name]
    for rank, said in enumerate(layout.ranks):
        last = coordinates(rank, layout.sizes).pipeline == layout.sizes.pipeline - 1
        for part in ("first_step", "grpo_step"):
            expected = layout.last[part] if last else {k: v for k, v in layout.last[part].items() if "optim/" in k}
            assert said[part] == expected, (rank, part)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_restored_trainer_repeats_the_same_steps_bit_for_bit(laboratory, name):
    for said in laboratory[name].ranks:
        assert said["after_restore"] == said["after_save"]
        first, second = said["after_save"]
        assert first != second
    first, second = laboratory[name].last["after_save"]
    assert first["loss/sft"] != laboratory[name].last["steps"][-1]["loss/sft"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pytest.param("TP2", "DP2", marks=pytest.mark.slow("test_checkpoints resumes DP2 in TP2")),
        pytest.param("EP2xTP2", "EP2", marks=pytest.mark.slow("full grid of layouts")),
    ],
)
def test_a_checkpoint_of_another_layout_continues_with_the_same_losses(laboratory, name, other):
    """The first loss shows the weights, the second one the optimizer's state too."""
    found = laboratory[name].last[f"after_restore_of_{other}"]
    expected = laboratory[other].last["after_save"]
    assert found[0]["loss/sft"] == pytest.approx(expected[0]["loss/sft"], abs=1e-6)
    assert found[0]["optim/grad_norm"] == pytest.approx(expected[0]["optim/grad_norm"], rel=1e-5)
    assert found[1]["loss/sft"] == pytest.approx(expected[1]["loss/sft"], abs=1e-5)


@pytest.mark.slow("test_checkpoints::test_weights_alone_go_where_the_optimizer_cannot")
@pytest.mark.parametrize(("name", "other"), [("EP2", "DP2")])
def test_optimizer_state_that_cannot_move_is_refused(laboratory, name, other):
    for said in laboratory[name].ranks:
        told = said[f"after_restore_of_{other}"]
        assert told[:2] == ["checkpoint.load", str(laboratory[other].directory / "checkpoint")]


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_checkpoint_file_is_refused_on_every_rank(laboratory, name):
    directory = laboratory[name].directory / "damaged"
    for rank, said in enumerate(laboratory[name].ranks):
        assert said["damaged"][:2] == ["checkpoint.load", str(directory)], rank
