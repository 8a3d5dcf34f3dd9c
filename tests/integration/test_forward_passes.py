"""Log-probs and entropies under policy, reference and teacher, of rollouts sampled with and without top-k, against
transformers; what a loss is given in a step of two updates. One rank, and two tensor-parallel ones in chunks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.sections.algorithm import Algorithm
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Trajectory
from slimx.data.sampling_support import Support
from slimx.data.saved.codec import save_groups
from slimx.runtime.ports import free_port
from tests.integration.conftest import Weights, perturbed
from tests.integration.forward_passes_rank import DISTILLED, HOLDERS, KL, likeliest
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_oracle import TEMPERATURE, Oracle, difference, rollouts, write_model

pytestmark = pytest.mark.integration

LAYOUTS = {"single": {"world_size": 1}, "TP2": {"world_size": 2, "tensor": 2}}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def restricted(trajectory: Trajectory, random: np.random.Generator) -> Support:
    """1 to 7 kept tokens wherever one was sampled."""
    sampled = trajectory.versions() >= 0
    counts = np.where(sampled, random.integers(1, 8, len(sampled)), 0)
    rows = [
        [token, *random.permutation(np.setdiff1d(np.arange(128), token))[: count - 1]]
        for token, count in zip(trajectory.token_ids, counts, strict=True)
        if count
    ]
    return Support(ids=np.concatenate(rows).astype(np.int32), counts=counts.astype(np.int32))


def scores(oracle: Oracle, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [L - 1] over the support, with gradient: plain torch over the logits of transformers."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    logits = oracle.model(ids[None]).logits[0, :-1] / TEMPERATURE
    if trajectory.support is not None:
        support = trajectory.support.take(np.arange(1, len(ids)))
        kept = torch.from_numpy(support.counts == 0)[:, None].repeat(1, 128)
        kept[support.positions(), support.ids] = True
        logits = logits.masked_fill(~kept, -1e9)
    values = logits.log_softmax(-1)
    return values.gather(1, ids[1:, None])[:, 0], -(values.exp() * values).sum(-1)


class Laboratory:
    def __init__(self, directory: Path, models: dict[str, Path]):
        self.directory, self.models = directory, models
        self.oracles = {name: Oracle(path) for name, path in models.items()}
        self.groups: list[Group] = rollouts(self.oracles["policy"])
        random = np.random.default_rng(0)
        for trajectory in self.trajectories[::2]:
            trajectory.support = restricted(trajectory, random)
        save_groups(directory / "groups.bin", self.groups)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def __call__(self, layout: str) -> Path:
        """Directory of what the ranks wrote."""
        out = self.directory / layout
        if not out.exists():
            out.mkdir()
            job = {name: str(path) for name, path in self.models.items()} | {
                "groups": str(self.directory / "groups.bin"),
                "layout": LAYOUTS[layout],
                "out": str(out),
                "init_method": f"tcp://127.0.0.1:{free_port()}",
            }
            (out / "job.json").write_text(json.dumps(job))
            run_ranks("tests.integration.forward_passes_rank", out, LAYOUTS[layout]["world_size"])
        return out


@pytest.fixture(scope="module")
def laboratory(tiny_model: Path, tiny_weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    directory = tmp_path_factory.mktemp("forward_passes")
    weights = perturbed(tiny_weights, 1, 0.05)
    models = {"reference": weights, "policy": perturbed(weights, 2, 0.01), "teacher": perturbed(weights, 3, 0.03)}
    return Laboratory(directory, {name: write_model(directory / name, tiny_model, w) for name, w in models.items()})


def by_sequence(path: Path, key: str) -> dict[tuple[int, ...], np.ndarray]:
    """Values of `KEY.NUMBER` of scores.npz by sequence (its tokens and the last label)."""
    out = {}
    with np.load(path) as arrays:
        for number in range(sum(name.startswith("tokens.") for name in arrays)):
            end = np.cumsum(arrays[f"lengths.{number}"])
            for start, stop in zip([0, *end], end, strict=False):
                tokens, labels = (arrays[f"{name}.{number}"][start:stop] for name in ("tokens", "labels"))
                if tokens.any():  # not the padding
                    values = arrays[key.replace("NUMBER", str(number))][start:stop]
                    out[(*tokens.tolist(), int(labels[-1]))] = values
    return out


@every_layout
@pytest.mark.parametrize("holder", HOLDERS)
def test_scores_under_each_set_of_weights_are_those_of_transformers(laboratory, layout, holder):
    path = laboratory(layout) / "scores.npz"
    found = [by_sequence(path, f"{holder}.{name}.NUMBER.0") for name in ("logprobs", "entropy")]
    assert len(found[0]) == len(laboratory.trajectories)
    for trajectory in laboratory.trajectories:
        with torch.no_grad():
            expected = scores(laboratory.oracles[holder], trajectory)
        for values, wanted in zip(found, expected, strict=True):
            assert np.abs(values[tuple(trajectory.token_ids.tolist())] - wanted.numpy()).max() <= 1e-5


@every_layout
def test_passes_under_other_weights_change_nothing_and_repeat_bit_for_bit(laboratory, layout):
    assert json.loads((laboratory(layout) / "said.json").read_text())["changed"] == []
    with np.load(laboratory(layout) / "scores.npz") as arrays:
        first = [name for name in arrays if name.endswith(".0") and name.count(".") == 3]
        assert len(first) > 2 * len(HOLDERS)
        for name in first:
            assert np.array_equal(arrays[name], arrays[f"{name[:-1]}1"]), name
    policy, teacher = (
        by_sequence(laboratory(layout) / "scores.npz", f"{holder}.logprobs.NUMBER.0")
        for holder in ("policy", "teacher")
    )
    assert all(np.abs(policy[tokens] - teacher[tokens]).max() > 1e-2 for tokens in policy)


@every_layout
def test_a_step_with_recomputed_log_probs_is_the_formula_over_the_support(laboratory, layout):
    """The ratio is 1 everywhere, whatever the engine said; KL to reference and teacher are over the kept tokens."""
    policy = laboratory.oracles["policy"]
    policy.model.zero_grad()
    advantages = [value for group in laboratory.groups for value in group_advantages(Algorithm(), group)]
    trajectories, loss, kls, entropy, engine = laboratory.trajectories, 0.0, [0.0, 0.0], 0.0, 0.0
    for t, advantage, weight in zip(trajectories, advantages, loss_weights(trajectories, "token"), strict=True):
        new, spread = scores(policy, t)
        weight = torch.from_numpy(weight)
        loss = loss - (weight * (new - new.detach()).exp() * advantage).sum()
        for number, name in enumerate(("reference", "teacher")):
            with torch.no_grad():
                other, _ = scores(laboratory.oracles[name], t)
            kls[number] = kls[number] + (weight * ((other - new).exp() - (other - new) - 1)).sum()
        entropy += (weight * spread).sum().item()
        rollout = torch.from_numpy(np.nan_to_num(t.logprobs[1:]))
        gap = torch.where(weight > 0, new - rollout, 0.0).detach()
        engine += (weight * (gap.exp() - gap - 1)).sum().item()
    (loss + KL * kls[0]).backward()
    found = json.loads((laboratory(layout) / "said.json").read_text())["step"]
    assert found["loss/policy"] == pytest.approx(loss.item(), abs=1e-6) and found["loss/clip_fraction"] == 0.0
    assert found["kl/reference"] == pytest.approx(kls[0].item(), rel=1e-4) and kls[0] > 1e-4
    assert found["kl/teacher"] == pytest.approx(kls[1].item(), rel=1e-4) and kls[1] > 1e-4
    assert found["policy/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["kl/rollout"] == pytest.approx(engine, rel=1e-4)
    worst, name = difference(load_file(laboratory(layout) / "gradients.safetensors"), policy.gradients())
    assert worst <= 1e-5, name


@every_layout
def test_the_kl_of_a_teachers_top_tokens_is_that_of_whole_logits(laboratory, layout):
    """Three tokens and all others as a fourth, whoever holds their logits."""
    policy = laboratory.oracles["policy"]
    policy.model.zero_grad()
    trajectories, total = laboratory.trajectories, 0.0
    for t, weight in zip(trajectories, loss_weights(trajectories, "token"), strict=True):
        tokens = t.token_ids.astype(np.int64)
        logits = policy.model(torch.from_numpy(tokens)[None]).logits[0, :-1] / TEMPERATURE
        ids, said = (torch.from_numpy(part) for part in likeliest(tokens[:-1], tokens[1:]))
        three = logits.softmax(-1).gather(1, ids)
        p = torch.cat([three, 1 - three.sum(1, keepdim=True)], 1)
        q = torch.cat([said.exp(), 1 - said.exp().sum(1, keepdim=True)], 1)
        total = total + (torch.from_numpy(weight) * (p * (p / q).log()).sum(1)).sum()
    (DISTILLED["teacher_kl_coef"] * total).backward()
    found = json.loads((laboratory(layout) / "said.json").read_text())["distilled"]
    assert found["kl/teacher_top"] == pytest.approx(total.item(), rel=1e-5) and total > 0.1
    worst, name = difference(load_file(laboratory(layout) / "distilled.safetensors"), policy.gradients())
    assert worst <= 1e-5, name


@every_layout
def test_every_update_of_a_step_compares_with_the_policy_before_the_first(laboratory, layout):
    out = laboratory(layout)
    with np.load(out / "losses.npz") as given, np.load(out / "scores.npz") as before:
        count = sum(name.startswith("tokens.") for name in before)
        assert sum(name.startswith("logprobs.") for name in given) == 2 * count
        for number in range(count):
            for name, holder in (("old_logprobs", "policy"), ("reference_logprobs", "reference")):
                wanted = before[f"{holder}.logprobs.{number}.0"]
                for update in range(2):
                    assert np.array_equal(given[f"{name}.{number + update * count}"], wanted)
            assert np.array_equal(given[f"logprobs.{number}"], given[f"old_logprobs.{number}"])
            second = number + count
            assert np.abs(given[f"logprobs.{second}"] - given[f"old_logprobs.{second}"]).max() > 1e-2
            assert not np.array_equal(given[f"old_logprobs.{number}"], given[f"rollout_logprobs.{number}"])


@every_layout
def test_a_refreshed_reference_is_the_current_or_the_saved_policy(laboratory, layout):
    said = json.loads((laboratory(layout) / "said.json").read_text())
    assert said["reference_is_policy"] == [False, True] and said["reference_is_back"]
