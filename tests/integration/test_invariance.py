"""Loss, metrics and gradients of the same rollouts do not depend on layout, packing or recomputation.

Each layout is one start of real gloo ranks that take one step for each model: a Qwen3-MoE with tied embeddings (GRPO),
a DeepSeek-V3 (MLA, sigmoid router with selection bias, shared experts, a dense first layer, multi-token prediction;
GSPO), a Qwen3-Next (gated delta nets; GRPO), and a Nemotron-3 (Mamba-2 layers; GRPO). One rank without recomputation
is what all others must equal. `layout_cases` says which layouts: `make test` has each setting with both of the first
two models, in three combined layouts; `make test-all` has every layout with both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.data.records import Group, Prompt, Span, Trajectory
from slimx.data.sampling_support import Support
from slimx.data.saved.codec import save_groups
from slimx.models.families import read_model
from slimx.runtime.ports import free_port
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights
from tests.integration.invariance_models import DEEPSEEK, NEMOTRON, NEXT, QWEN
from tests.integration.invariance_rank import VERSION
from tests.integration.layout_cases import (
    COVERING,
    EIGHT,
    FACTORS,
    MODELS,
    ONE,
    QUICK,
    Case,
    all_cases,
    fields,
    name_of,
    pairs,
)
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration
BOUND = 1e-5
"""max|a - b| / max|b| of a gradient tensor; relative difference of a metric."""
# Gradients of delta nets in fp32 are 1e-4 off those in fp64: with TP2, which adds in another order, up to 1.6e-5 apart.
BOUNDS = {"next": 3e-5}
# Sums over sequences, which context parallelism cuts: of ratios in the objective, of trainer / engine in weights.
ALGORITHMS = {
    "qwen": {"old_logprobs": "recompute", "correction": {"kind": "truncate", "level": "geometric", "low": 0.5}},
    "deepseek": {"name": "gspo", "loss": {"high": 0.2}, "kl_unbiased": True, "entropy_coef": 0.1, "teacher_coef": 0.3},
    "next": {},
    "nemotron": {},
}
GROUPS = 4


def rollouts(seed: int) -> list[Group]:
    """Groups of 2 to 5 rollouts of 8 to 48 tokens; some of an older version than the engines', some sampled from 9
    tokens."""
    random, groups = np.random.default_rng(seed), []
    for number in range(GROUPS):
        trajectories = []
        for index in range(2 + number):
            prompt, length = int(random.integers(3, 8)), int(random.integers(12, 49))
            spans = [
                Span(start=0, stop=prompt, source="prompt"),
                Span(start=prompt, stop=length, source="sampled", version=VERSION - index % 2),
            ]
            logprobs = np.where(np.arange(length) < prompt, np.nan, random.normal(-4.8, 0.1, length))
            tokens = random.integers(1, 128, length).astype(np.int32)  # id 0 is padding
            kept = None
            if index == 1:
                logprobs += np.log(128 / 9)
                others = np.stack([random.permutation(np.setdiff1d(np.arange(128), token))[:8] for token in tokens])
                ids = np.concatenate([tokens[:, None], others], 1)[prompt:]
                counts = np.where(np.arange(length) < prompt, 0, 9)
                kept = Support(ids=ids.reshape(-1).astype(np.int32), counts=counts.astype(np.int32))
            trajectories.append(
                Trajectory(
                    id=f"{number}.{index}",
                    rollout_id=f"{number}.{index}",
                    group_id=str(number),
                    index=index,
                    token_ids=tokens,
                    loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
                    logprobs=logprobs.astype(np.float32),
                    spans=spans,
                    sampling={"temperature": 0.8},
                    support=kept,
                    reward=float(random.normal()),
                )
            )
        groups.append(Group(id=str(number), prompt=Prompt(id=str(number), token_ids=[1]), trajectories=trajectories))
    return groups


def write_model(path: Path, hf: dict[str, Any], mtp: int, seed: int) -> Path:
    """A checkpoint of random weights: norms around 1, states of delta nets that last for some tokens, the rest far from
    uniform."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    shapes = read_model(path, mtp_layers=mtp).table.checkpoint_shapes()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.05)
        + ("norm" in name and len(shape) == 1)
        - 3 * name.endswith("A_log")
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Laboratory:
    """Runs each layout once, when it is first asked for, with the models of the chosen tests."""

    def __init__(self, directory: Path, asked: set[tuple[str, str]]):
        """`asked`: names of the layouts and models that will be asked for."""
        self.directory, self.asked, self.done = directory, asked, set[str]()
        self.models = []
        every = (("qwen", QWEN, 0), ("deepseek", DEEPSEEK, 1), ("next", NEXT, 0), ("nemotron", NEMOTRON, 0))
        for seed, (name, hf, mtp) in enumerate(every):
            if not any(name == model for _, model in asked):
                continue
            save_groups(directory / f"{name}.groups", rollouts(seed))
            self.models.append(
                {
                    "name": name,
                    "path": str(write_model(directory / name, hf, mtp, seed)),
                    "policy": str(write_model(directory / f"{name}-policy", hf, mtp, seed + 10)),
                    "teacher": str(write_model(directory / f"{name}-teacher", hf, mtp, seed + 20)),
                    "groups": str(directory / f"{name}.groups"),
                    "mtp": mtp,
                    "algorithm": ALGORITHMS[name],
                }
            )

    def __call__(self, case: Case, model: str) -> tuple[dict[str, Any], Weights]:
        """What the last rank said, and all gradients."""
        out = self.directory / name_of(case)
        if out.name not in self.done:
            self.done.add(out.name)
            out.mkdir()
            init = f"tcp://127.0.0.1:{free_port()}"
            models = [each for each in self.models if case == ONE or (out.name, each["name"]) in self.asked]
            job = {"models": models, "trainer": fields(case), "out": str(out), "init_method": init}
            (out / "job.json").write_text(json.dumps(job))
            run_ranks("tests.integration.invariance_rank", out, case["world_size"])
        return json.loads((out / f"{model}.json").read_text()), load_file(out / f"{model}.safetensors")


@pytest.fixture(scope="module")
def laboratory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    cases = [case for case in chosen_cases(request) if {"case", "model"} <= case.keys()]
    chosen = {(name_of(case["case"]), case["model"]) for case in cases if isinstance(case["case"], dict)}
    return Laboratory(tmp_path_factory.mktemp("invariance"), chosen)


def assert_equal_to_one_rank(laboratory: Laboratory, case: Case, model: str) -> None:
    (said, gradients), (expected, single) = laboratory(case, model), laboratory(ONE, model)
    assert said["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert said["metrics"][name] == pytest.approx(value, rel=BOUND, abs=1e-7), name
    assert gradients.keys() == single.keys()
    trained = {name for name, gradient in single.items() if gradient.any()}
    assert single.keys() - trained == {name for name in single if name.endswith("e_score_correction_bias")}
    each = {n: ((gradients[n] - single[n]).abs().max() / single[n].abs().max()).item() for n in trained}
    worst = max(each, key=each.__getitem__)
    assert each[worst] <= BOUNDS.get(model, BOUND), f"{worst}: {each[worst]:.1e}"


def test_the_layouts_cover_every_pair_of_settings_that_can_meet():
    possible = all_cases(4)
    wanted = set().union(*map(pairs, possible))
    assert {value for pair in wanted for value in pair} == {
        (name, value) for name, values in FACTORS.items() for value in values
    }
    assert set().union(*map(pairs, COVERING)) == wanted
    assert {case["world_size"] for case in (*COVERING, EIGHT)} >= {1, 4, 8}
    assert {(name, case[name]) for case in QUICK for name in FACTORS} == {
        (name, value) for name, values in FACTORS.items() for value in values
    }


CASES = [
    pytest.param(
        case,
        model,
        id=f"{name_of(case)}-{model}",
        marks=[] if case in QUICK and model in MODELS else [pytest.mark.slow("full grid of layouts and models")],
    )
    for case in (*COVERING, EIGHT)
    for model in (*MODELS, "next", "nemotron")
    if model != "nemotron" or case["context"] == 1  # Mamba-2 layers are refused otherwise
]


@pytest.mark.parametrize(("case", "model"), CASES)
def test_loss_metrics_and_gradients_are_those_of_one_rank(laboratory, case, model):
    assert_equal_to_one_rank(laboratory, case, model)


@pytest.mark.parametrize("model", ["qwen"])
@pytest.mark.parametrize("case", COVERING[:1], ids=name_of)
def test_packing_changes_the_number_of_microbatches(laboratory, case, model):
    """Else the invariance to packing above would say nothing."""
    few, many = (laboratory(each, model)[0]["microbatches"] for each in (case, ONE))
    assert 1 < few < many


@pytest.mark.slow("full grid: every layout of up to four ranks")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", [case for case in all_cases(4) if case not in COVERING], ids=name_of)
def test_every_layout_of_up_to_four_ranks_is_equal_to_one_rank(laboratory, case, model):
    assert_equal_to_one_rank(laboratory, case, model)
