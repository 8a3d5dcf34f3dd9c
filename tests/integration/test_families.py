"""A model of every family in the trainer computes what transformers computes, in every layout, and comes back bit for
bit.

Each layout is one start of real processes (`family_rank.py`) that load the models of all families (`family_cases.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.integration.family_cases import CASES
from tests.integration.family_laboratory import ENGINE, ENGINE_STAGES, SIZES, difference, quick, thorough
from tests.integration.saved_tensors import saved_tensors, written_by_0_16

pytestmark = pytest.mark.integration


def models(chosen: Callable[[str, str], bool]) -> pytest.MarkDecorator:
    """Every model in every layout that it can be split into, and that is chosen for it."""
    return pytest.mark.parametrize(
        ("layout", "model"),
        [
            pytest.param(
                layout,
                model,
                marks=[] if quick(layout, model) else [pytest.mark.slow("full grid of layouts and families")],
            )
            for layout, sizes in SIZES.items()
            for model, case in CASES.items()
            if case.fits(sizes) and chosen(layout, model)
        ],
    )


every_model = models(lambda *_: True)


@every_model
def test_logits_are_those_of_transformers_at_every_position(families, layout, model):
    ran = families(layout, model)
    found = ran.logits()
    wanted, _ = families.oracle(model).answers
    assert found.keys() == wanted.keys()
    for tokens, expected in wanted.items():
        assert (torch.from_numpy(found[tokens]) - expected).abs().max() <= 1e-4


@every_model
def test_a_checkpoint_comes_back_from_the_trainer_bit_for_bit(families, layout, model):
    back, weights = families(layout, model).assembled("weights"), families.oracle(model).weights
    assert back.keys() == weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(back[name], tensor)] == []


@every_model
def test_gradients_are_those_of_transformers(families, layout, model):
    ran, wanted = families(layout, model), families.oracle(model).answers[1]
    worst, name = difference(ran.assembled("gradients"), wanted)
    assert worst <= CASES[model].rounding, name
    if not CASES[model].mtp:  # whose own gradients count too
        norm = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
        for rank in range(ran.sizes.world):
            assert np.load(ran.directory / f"{model}.norm.{rank}.npy") == pytest.approx(norm.item(), rel=1e-5)


thorough_models = models(thorough)


@thorough_models
def test_a_trainers_checkpoint_gives_every_weight_back_bit_for_bit(families, layout, model):
    ran = families(layout, model)
    for rank in range(ran.sizes.world):
        saved, restored = (ran.local(kind, rank) for kind in ("after", "restored"))
        assert [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)] == []


@pytest.mark.parametrize(("layout", "model"), [("single", "V3"), ("single", "MiniMax-M2"), (ENGINE, "V3")])
def test_a_trainers_checkpoint_has_the_layout_of_megatron_core_0_16(families, layout, model):
    """Latent attention, a layer of multi-token prediction, norms over all heads; without the distributed optimizer.

    Each module of Transformer Engine keeps an object of its own for fp8 besides."""
    found, wanted = saved_tensors(families(layout, model).checkpoint), written_by_0_16(model)
    if layout == ENGINE:
        assert set(found) > set(wanted)
        found, wanted = ([line for line in each if not line.endswith("._extra_state")] for each in (found, wanted))
    assert found == wanted


@pytest.mark.parametrize(
    ("layout", "model", "own"),
    [
        (ENGINE, "V3", {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TELinear"}),
        (ENGINE_STAGES, "Qwen3", {"TELayerNormColumnParallelLinear"}),
        pytest.param(
            ENGINE_STAGES, "MiMo", {"TELayerNormColumnParallelLinear"}, marks=pytest.mark.slow("full grid of families")
        ),
    ],
)
def test_layers_are_transformer_engines_where_it_is_installed(families, layout, model, own):
    built = families(layout, model).modules()
    assert built >= {"TERowParallelLinear", "TEDotProductAttention"} | own
    assert not {"NormColumnParallelLinear", "PackedAttention", "RowParallelLinear"} & built


@thorough_models
def test_a_trainer_starts_from_the_converted_checkpoint(families, layout, model):
    ran = families(layout, model)
    for rank in range(ran.sizes.world):
        plain, released = (ran.local(kind, rank) for kind in ("weights", "released"))
        assert plain.keys() == released.keys()
        assert [name for name, tensor in plain.items() if not torch.equal(released[name], tensor)] == []
