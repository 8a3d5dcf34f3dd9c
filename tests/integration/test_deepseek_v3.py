"""Parts that DeepSeek-V3 brought and GLM-4.5 and Ling-2 took over, in every layout: the routes of layers, the selection
bias, the prediction layer; and trainers' checkpoints of what families split in ways of their own.

Logits, gradients and conversion: test_families, whose ranks these tests share.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimx.layout.ranks import coordinates
from tests.integration.deepseek_v3_oracle import MODELS
from tests.integration.family_laboratory import SIZES, difference, quick
from tests.integration.prediction_oracle import WRONG
from tests.integration.trainer_rank import demonstrations

pytestmark = pytest.mark.integration


def every_layout(*models: str) -> pytest.MarkDecorator:
    """Each of the models in every layout of up to four ranks."""
    return pytest.mark.parametrize(
        ("layout", "model"),
        [
            pytest.param(name, model, marks=[] if quick(name, model) else [pytest.mark.slow("full grid of layouts")])
            for name, sizes in SIZES.items()
            if sizes.world <= 4
            for model in models
        ],
    )


@every_layout(*MODELS, "GLM-4.5", "Ling-2")
def test_every_layer_routes_as_transformers_and_wrong_routes_are_found(families, layout, model):
    ran = families(layout, model)
    wrong = tuple(demonstrations(0)[WRONG[0]].token_ids.tolist())
    for rank in range(ran.sizes.world):
        assert ran.sequences(rank, "differs"), rank
        last = coordinates(rank, ran.sizes).pipeline == ran.sizes.pipeline - 1
        for tokens, differs in ran.sequences(rank, "differs").items():
            expected = [WRONG[1]] if last and tokens == wrong else []
            assert np.flatnonzero(differs).tolist() == expected, rank


@every_layout("V3")
def test_the_selection_bias_is_exact_in_bfloat16_and_not_trained(families, layout, model):
    ran = families(layout, model)
    for rank in range(ran.sizes.world):
        half = ran.local("half.weights", rank)
        before, after = (ran.local(kind, rank) for kind in ("weights", "after"))
        exact = {name for name, tensor in half.items() if tensor.dtype != torch.bfloat16}
        assert exact and exact == {name for name in half if name.endswith("expert_bias")}
        for name, tensor in before.items():
            assert torch.equal(half[name], tensor.to(half[name].dtype)), name
        assert {name for name in before if torch.equal(before[name], after[name]) and "mtp" not in name} == {
            name for name in exact if "mtp" not in name
        }


@pytest.mark.parametrize("model", ["V3", "GLM-4.5", "Ling-2", "V3.2", "GLM-5"])
@pytest.mark.parametrize(
    "layout", [pytest.param("single", marks=pytest.mark.slow("one rank repeats what two show")), "TP2xEP2"]
)
def test_the_prediction_layer_learns_as_in_transformers(families, layout, model):
    ran, oracle = families(layout, model), families.oracle(model)
    oracle.mtp.zero_grad()
    with np.load(ran.directory / f"{model}.mtp.0.npz") as arrays:
        at = 0
        for length in arrays["lengths"]:
            tokens, labels, weight, found = (
                arrays[key][at : at + length] for key in ("tokens", "labels", "weight", "logits")
            )
            at += length
            if not tokens.any():
                continue
            expected = oracle.predicted(tokens)
            assert (torch.from_numpy(found[:-1]) - expected).abs().max() <= 1e-4
            # Position t, which knows token t + 1, predicts token t + 2.
            loss = torch.nn.functional.cross_entropy(expected, torch.from_numpy(labels[1:]), reduction="none")
            (0.1 * torch.from_numpy(weight[1:]) * loss).sum().backward()
    trained = {name: each.grad for name, each in oracle.mtp.named_parameters() if each.grad is not None}
    wanted = oracle.renamed(trained)  # without an indexer's
    gradients = ran.assembled("mtp")
    worst, name = difference(gradients, wanted)
    assert worst <= 2e-5, name
    assert [name for name in gradients.keys() - wanted.keys() if gradients[name].any()] == []
