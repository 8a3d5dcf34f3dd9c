"""DeepSeek-V3.2 and GLM-5: that the indexers of the tiny models choose, and the replay of their choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.data.records import Group, Prompt
from slimx.data.saved.codec import save_groups
from tests.integration import router_rank
from tests.integration.family_cases import CASES, SPARSE
from tests.integration.family_laboratory import difference
from tests.integration.family_oracle import Oracle
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration

FULL = {"recompute": {"granularity": "full", "method": "uniform", "layers": 1}}
SELECTIVE = {"recompute": {"granularity": "selective", "modules": ["core_attn"]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "CP2": {"world_size": 2, "context": 2, **FULL},
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2, **FULL},
    "TP2xPP2xVPP2": {"world_size": 4, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2, **SELECTIVE},
}
MODELS = ("V3.2", "GLM-5", "GLM-5.2")
TRAINED = {"CP2": MODELS, "TP2xPP2": ("GLM-5.2",), "TP2xPP2xVPP2": ("V3.2", "GLM-5")}
"""Models by layout: a stage of GLM-5.2 begins with an indexer."""


def indexers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".indexer")]


def choices(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Returns tokens [1, L, k] that each layer's indexer chooses for tokens [1, L]."""
    found: list[torch.Tensor] = []
    hooks = [x.register_forward_hook(lambda _, __, indices: found.append(indices)) for x in indexers(model)]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def chosen(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Returns, per layer, which tokens each query sees, bool [L, L]."""
    nothing = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    return [nothing.scatter(1, indices[0].long(), True).tril() for indices in choices(model, tokens[None])]


def replay(model: torch.nn.Module, source: torch.nn.Module) -> None:
    """Has the indexers of `model` choose what those of `source` do."""
    taken: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args: taken.extend(choices(source, args[0])))
    for indexer in indexers(model):
        indexer.register_forward_hook(lambda *_: taken.pop(0))


@pytest.mark.parametrize("name", MODELS)
def test_the_tiny_models_choose_and_no_choice_hangs_on_rounding_or_a_tie(tmp_path: Path, name: str):
    """Else trainer and transformers would agree whatever the indexer says, or differ by chance."""
    oracle = CASES[name].make(tmp_path, list(CASES).index(name))
    oracle.model.set_experts_implementation("eager")  # the grouped product knows no float64
    sequences = [torch.from_numpy(t.token_ids[:-1].astype(np.int64)) for t in oracle.trajectories()]
    single = [chosen(oracle.model, tokens) for tokens in sequences]
    double = [chosen(oracle.model.double(), tokens) for tokens in sequences]
    for tokens, one, other in zip(sequences, single, double, strict=True):
        assert len(one) == getattr(oracle.model.config, "indexer_types", ["full"] * 4).count("full")
        assert all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))
        seen = torch.arange(1, len(tokens) + 1).clamp(max=SPARSE["index_topk"])
        assert all(torch.equal(layer.sum(1), seen) for layer in one)
    assert max(len(tokens) for tokens in sequences) > 4 * SPARSE["index_topk"]


Pair = tuple[Oracle, Oracle]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Makes, by name, a model before a step, and one with other weights that sees the tokens that the first chooses."""
    out, directory = {}, tmp_path_factory.mktemp("models")
    for name in MODELS:
        before, later = (CASES[name].make(directory / f"{name} {seed}", seed) for seed in (3, 4))
        tokens = torch.from_numpy(
            max(before.trajectories(), key=lambda t: len(t.token_ids)).token_ids[:-1].astype(np.int64)
        )
        pairs = zip(*(chosen(x.model, tokens) for x in (before, later)), strict=True)
        assert not any(torch.equal(mine, yours) for mine, yours in pairs), "both choose the same"
        replay(later.model, before.model)
        out[name] = before, later
    return out


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, models: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes NAME.safetensors: gradients of a step whose weights move between the choice and the update."""
    out, cases = tmp_path_factory.mktemp("replay"), []
    for name, (before, later) in models.items():
        if name not in TRAINED[request.param]:
            continue
        group = Group(id="g", prompt=Prompt(id="p", token_ids=[1]), trajectories=before.trajectories())
        save_groups(out / f"{name}.groups", [group])
        case = {"name": name, "path": before.path, "later": later.path, "mtp": 0}
        cases.append(case | {"groups": out / f"{name}.groups", "trainer": {"indexer_replay": "R2"}})
    layout = LAYOUTS[request.param]
    run_ranks(router_rank.train, out, layout["world_size"], {"cases": cases, "layout": layout})
    return out


@pytest.mark.parametrize(
    ("trained", "name"),
    [
        pytest.param(layout, name, marks=[pytest.mark.slow("a layout of four ranks")] if layout != "CP2" else [])
        for layout, names in TRAINED.items()
        for name in names
    ],
    indirect=["trained"],
)
def test_an_update_sees_the_tokens_that_were_chosen_before_the_first(trained: Path, models: dict[str, Pair], name: str):
    """Also where the backward pass computes layers again."""
    worst, tensor = difference(load_file(trained / f"{name}.safetensors"), models[name][1].answers[1])
    assert worst <= 2e-5, tensor
