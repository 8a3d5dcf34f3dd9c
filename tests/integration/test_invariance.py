"""Loss, metrics and gradients of the same rollouts do not depend on layout, packing or recomputation.

Each layout is one start of real gloo ranks that take one step for each model: a Qwen3-MoE with tied embeddings (GRPO),
a DeepSeek-V3 (MLA, sigmoid router with selection bias, shared experts, a dense first layer, multi-token prediction;
GSPO), a Qwen3-Next (gated delta nets; GRPO), a Nemotron-3 (Mamba-2 layers; GRPO), and a Qwen3-VL-MoE whose vision
tower is trained on images in the prompts (GRPO). One rank without recomputation
is what all others must equal. Layouts are a covering array (`COVERING`), in which every pair of settings meets:
`make test` has each setting with both of the first two models, in three combined layouts; `make test-all` has every
layout with both.
"""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.schema import Config
from slimx.config.sections.trainer import Trainer
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Image, Prompt, Span, Trajectory
from slimx.data.sampling_support import Support
from slimx.data.saved.codec import load_groups, save_groups
from slimx.extras.vision.images.store import ImageStore
from slimx.models.families import read_model
from slimx.orchestration.batches import make_packer
from tests.integration.chosen import chosen_cases
from tests.integration.conftest import Weights
from tests.integration.gathering import write_tensors
from tests.integration.invariance_models import DEEPSEEK, NEMOTRON, NEXT, PLACEHOLDER, QWEN, VISION
from tests.integration.rank_processes import run_ranks
from tests.integration.rank_start import join, leave

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
    "vision": {},
}
GROUPS = 4
VERSION = 3
"""The engines' weight version at the step."""
FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "pipeline": (1, 2),
    "virtual_pipeline": (1, 2),
    "layers_per_stage": (None, (1, 3)),
    "context": (1, 2),
    "data": (1, 2),
    "expert": (1, 2, 4),
    "expert_tensor": (1, 2),
    "recompute": ("none", "selective", "full"),
    "max_tokens_per_microbatch": (56, 200),
}
Case = dict[str, Any]

ONE = {name: values[0] for name, values in FACTORS.items()} | {"world_size": 1}
"""The case that the others are compared with."""
_KEYS = (*FACTORS,)


def _case(*values: Any) -> Case:
    case = dict(zip(_KEYS, values, strict=True))
    return case | {"world_size": case["tensor"] * case["pipeline"] * case["context"] * case["data"]}


COVERING: tuple[Case, ...] = (
    _case(1, 1, 1, None, 1, 1, 1, 1, "selective", 200),
    _case(2, 2, 2, None, 1, 1, 1, 2, "none", 56),
    _case(1, 1, 1, None, 2, 2, 2, 2, "full", 56),
    _case(1, 2, 1, (1, 3), 1, 2, 2, 1, "none", 200),
    _case(2, 1, 1, None, 2, 1, 4, 1, "full", 200),
    _case(1, 2, 2, None, 2, 1, 2, 1, "selective", 56),
    _case(2, 2, 1, (1, 3), 1, 1, 1, 2, "full", 200),
    _case(2, 1, 1, None, 1, 2, 4, 1, "selective", 56),
    _case(1, 2, 1, (1, 3), 2, 1, 1, 1, "selective", 56),
    _case(1, 2, 2, None, 1, 2, 1, 1, "full", 200),
    _case(1, 1, 1, None, 2, 2, 4, 1, "none", 56),
    _case(2, 1, 1, None, 2, 1, 2, 2, "selective", 200),
)
"""Every pair of settings of layouts of up to four ranks."""
MODELS = ("qwen", "deepseek")
QUICK = (COVERING[0], COVERING[5], COVERING[6], COVERING[10])
"""The one of one rank, and three of four ranks in which every setting occurs."""

EIGHT = _case(2, 2, 2, None, 2, 1, 4, 1, "selective", 200)


def fields(case: Case) -> dict[str, Any]:
    """Returns the trainer section of a case."""
    modules = ["core_attn", "layernorm", "moe_act"] if case["recompute"] == "selective" else ["core_attn"]
    return case | {"recompute": {"granularity": case["recompute"], "modules": modules}}


def possible(case: Case) -> bool:
    """Returns True if slimx takes the layout for the two models of the test."""
    stages = case["pipeline"] * case["virtual_pipeline"]
    if case["virtual_pipeline"] > 1 and case["pipeline"] == 1:
        return False
    if case["layers_per_stage"] and len(case["layers_per_stage"]) != stages:
        return False
    try:
        Trainer.model_validate(fields(case))
    except ValidationError:
        return False
    return True


def all_cases(largest: int) -> list[Case]:
    """Returns every possible layout of up to `largest` ranks."""
    cases = [_case(*values) for values in product(*FACTORS.values())]
    return [case for case in cases if case["world_size"] <= largest and possible(case)]


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Returns pairs of settings that meet in a case."""
    return set(combinations([(name, case[name]) for name in _KEYS], 2))


def name_of(case: Case) -> str:
    """Returns a name such as TP2xPP2xVPP2xEP2-full."""
    short = {
        "tensor": "TP",
        "pipeline": "PP",
        "virtual_pipeline": "VPP",
        "context": "CP",
        "data": "DP",
        "expert": "EP",
        "expert_tensor": "ETP",
    }
    sizes = [f"{text}{case[name]}" for name, text in short.items() if case[name] > 1] or ["single"]
    split = ["uneven"] if case["layers_per_stage"] else []
    return "-".join(["x".join(sizes), *split, case["recompute"], str(case["max_tokens_per_microbatch"])])


def rollouts(seed: int) -> list[Group]:
    """Makes groups of 2 to 5 rollouts of 8 to 48 tokens; some of an older version than the engines', some sampled from
    9 tokens."""
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


def show_images(groups: list[Group], store: ImageStore) -> None:
    """Gives two of three rollouts an image in their prompt, of one or two placeholders: one of three images."""
    random = np.random.default_rng(3)
    grids = {"a": (1, 2, 2), "b": (1, 2, 4), "c": (1, 4, 2)}
    for name, grid in grids.items():
        store.save(name, random.standard_normal((np.prod(grid), 3 * 2 * 4 * 4), np.float32), grid)
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.index % 3:
                name = "abc"[(trajectory.index + int(group.id)) % 3]
                stop = 1 + int(np.prod(grids[name])) // 4
                trajectory.token_ids[1:stop] = PLACEHOLDER
                trajectory.images.append(Image(start=1, stop=stop, grid=grids[name], digest=name))


def configuration(job: dict[str, Any], model: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(model["path"])},  # which has the images
            "model": {"path": model["path"]},
            "numerics": {"dtype": "float32"},
            "trainer": {
                **job["trainer"],
                # Every rank then holds whole gradients.
                "distributed_optimizer": False,
                # Several chunks, of which the last is not full.
                "logprob_chunk_tokens": 24,
                "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
                "megatron": {"mtp_num_layers": model["mtp"]} if model["mtp"] else {},
                "vision": {"train": "tower"} if model["name"] == "vision" else None,
            },
            "rollout": {"prompts": "p"},
            "algorithm": {"reference": True, "kl_coef": 0.5, "teacher": model["teacher"], **model["algorithm"]},
        }
    )


def take_step(job: dict[str, Any], model: dict[str, Any], parallel: Any) -> dict[str, Any]:
    """Returns metrics and the number of micro-batches of a step, and writes its gradients by Hugging Face names."""
    import torch

    from slimx.models.families import configured_model
    from slimx.trainer.trainer import PolicyTrainer

    settings = configuration(job, model)
    spec = configured_model(settings)
    trainer = PolicyTrainer(settings, spec, parallel)
    trainer.weights.load(model["policy"])  # another than the reference
    groups = load_groups(model["groups"])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = [value for group in groups for value in group_advantages(settings.algorithm, group)]
    rows = make_rows(trajectories, advantages, loss_weights(trajectories, "token"))
    sizes = parallel.sizes
    batch = make_packer(settings, spec, sizes)(rows)
    shard = batch.shards[parallel.coordinates.data]
    metrics = trainer.train_step(shard, step=0, version=VERSION)
    gradients = {
        # Buffers (the router's selection bias) have none.
        key: parameter.main_grad if hasattr(parameter, "main_grad") else torch.zeros_like(parameter)
        for key, parameter in trainer.weights.parameters.items()
    }
    write_tensors(job["out"] / f"{model['name']}.safetensors", gradients, spec, parallel)
    return {"metrics": metrics, "microbatches": len(shard)}


def train(job: dict[str, Any], rank: int) -> dict[str, dict[str, Any]]:
    """Takes a step with each model; returns its metrics and number of micro-batches by model."""
    parallel = join(configuration(job, job["models"][0]).trainer, rank, job["init_method"])
    results = {model["name"]: take_step(job, model, parallel) for model in job["models"]}
    leave(parallel)
    return results


def write_model(path: Path, hf: dict[str, Any], mtp: int, seed: int) -> Path:
    """Writes a checkpoint of random weights: norms around 1, states of delta nets that last for some tokens, the rest
    far from uniform."""
    path.mkdir(exist_ok=True)
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
    """Runs each layout once, when it is first requested, with the models of the chosen tests."""

    def __init__(self, directory: Path, chosen: set[tuple[str, str]]):
        """`chosen`: names of the layouts and models of the chosen tests."""
        self.directory, self.chosen = directory, chosen
        self.results: dict[str, dict[str, Any]] = {}
        """Results of the last rank by layout."""
        self.models = []
        every = {"qwen": QWEN, "deepseek": DEEPSEEK, "next": NEXT, "nemotron": NEMOTRON, "vision": VISION}
        for seed, (name, hf) in enumerate(every.items()):
            if not any(name == model for _, model in chosen):
                continue
            groups, mtp = rollouts(seed), int(name == "deepseek")
            if name == "vision":
                show_images(groups, ImageStore(directory / name / "images"))
            save_groups(directory / f"{name}.groups", groups)
            self.models.append(
                {
                    "name": name,
                    "path": write_model(directory / name, hf, mtp, seed),
                    "policy": write_model(directory / f"{name}-policy", hf, mtp, seed + 10),
                    "teacher": write_model(directory / f"{name}-teacher", hf, mtp, seed + 20),
                    "groups": directory / f"{name}.groups",
                    "mtp": mtp,
                    "algorithm": ALGORITHMS[name],
                }
            )

    def __call__(self, case: Case, model: str) -> tuple[dict[str, Any], Weights]:
        """Returns results of the last rank, and all gradients."""
        out = self.directory / name_of(case)
        if out.name not in self.results:
            models = [model for model in self.models if case == ONE or (out.name, model["name"]) in self.chosen]
            job = {"models": models, "trainer": fields(case)}
            self.results[out.name] = run_ranks(train, out, case["world_size"], job)[-1]
        return self.results[out.name][model], load_file(out / f"{model}.safetensors")


@pytest.fixture(scope="module")
def laboratory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    cases = [case for case in chosen_cases(request) if {"case", "model"} <= case.keys()]
    chosen = {(name_of(case["case"]), case["model"]) for case in cases if isinstance(case["case"], dict)}
    return Laboratory(tmp_path_factory.mktemp("invariance"), chosen)


def assert_equal_to_one_rank(laboratory: Laboratory, case: Case, model: str) -> None:
    (found, gradients), (expected, single) = laboratory(case, model), laboratory(ONE, model)
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=BOUND, abs=1e-7), name
    assert gradients.keys() == single.keys()
    trained = {name for name, gradient in single.items() if gradient.any()}
    assert single.keys() - trained == {name for name in single if name.endswith("e_score_correction_bias")}
    errors = {n: ((gradients[n] - single[n]).abs().max() / single[n].abs().max()).item() for n in trained}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= BOUNDS.get(model, BOUND), f"{worst}: {errors[worst]:.1e}"


def test_the_layouts_cover_every_pair_of_settings_that_can_meet():
    possible = all_cases(4)
    necessary = set().union(*map(pairs, possible))
    assert {value for pair in necessary for value in pair} == {
        (name, value) for name, values in FACTORS.items() for value in values
    }
    assert set().union(*map(pairs, COVERING)) == necessary
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
    for model in (*MODELS, "next", "nemotron", "vision")
    if model != "nemotron" or case["context"] == 1  # Mamba-2 layers are refused otherwise
]


@pytest.mark.parametrize(("case", "model"), CASES)
def test_loss_metrics_and_gradients_are_those_of_one_rank(laboratory, case, model):
    assert_equal_to_one_rank(laboratory, case, model)


@pytest.mark.parametrize("model", ["qwen"])
@pytest.mark.parametrize("case", COVERING[:1], ids=name_of)
def test_packing_changes_the_number_of_microbatches(laboratory, case, model):
    """Else the invariance to packing above would say nothing."""
    few, many = (laboratory(x, model)[0]["microbatches"] for x in (case, ONE))
    assert 1 < few < many


@pytest.mark.slow("full grid: every layout of up to four ranks")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", [case for case in all_cases(4) if case not in COVERING], ids=name_of)
def test_every_layout_of_up_to_four_ranks_is_equal_to_one_rank(laboratory, case, model):
    assert_equal_to_one_rank(laboratory, case, model)
