"""Other weights take turns in the memory of a rank's parameters and buffers; afterwards they are as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.trainer.model.weights import Weights
from tests.published import DEEPSEEK_V3 as V3
from tests.refusals import refused
from tests.unit.trainer.bare_module import bare_module

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rope_scaling": None,
    "quantization_config": None,
}
SIZES = Sizes(tensor=2, expert=2)
"""The model under test is rank 1 of these: its tensors are slices."""


def write(directory: Path, seed: int) -> ModelSpec:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(V3 | SMALL))
    spec = read_model(directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in spec.table.checkpoint_shapes().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return spec


@pytest.fixture
def models(tmp_path: Path) -> tuple[Weights, Path]:
    """A rank that holds one model's weights, and the directory of another."""
    spec = write(tmp_path / "policy", 1)
    write(tmp_path / "other", 2)
    layout = MegatronLayout(spec.table, SIZES)
    weights = Weights([bare_module(layout.parts_of(1))], spec, layout, 1)
    weights.load(str(tmp_path / "policy"))
    return weights, tmp_path / "other"


def values(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.parameters.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_reading_a_copy_leaves_the_current_weights_alone(models):
    weights, other = models
    before, copy = values(weights), weights.copy_of(str(other))
    assert equal(values(weights), before)
    weights.load(str(other))
    assert equal(values(weights), copy) and not equal(copy, before)
    assert any(name.endswith("expert_bias") for name in copy)


def test_a_weight_that_is_not_finite_is_refused_by_its_tensor(models):
    """Read from a Hugging Face directory by the tensor, and of any other checkpoint in its place."""
    weights, other = models
    file, name = other / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    tensors = load_file(file)
    tensors[name][0] = float("inf")
    weights.check_finite(other)
    save_file(tensors, file, {"format": "pt"})
    with refused("checkpoint.finite", about=name):
        weights.load(str(other))
    place = next(part.name for part in weights.parts if name in part.sources)
    weights.parameters[place].data[0, 0] = float("nan")
    with refused("checkpoint.finite", about=name):
        weights.check_finite(other)


def test_within_a_switch_the_same_memory_holds_a_copy(models):
    weights, other = models
    before, places = values(weights), {name: t.data_ptr() for name, t in weights.parameters.items()}
    saved, teacher = weights.snapshot(), weights.copy_of(str(other))
    with weights.switching() as switch:
        assert equal(values(weights), before)
        for copy in (teacher, saved, teacher):
            switch(copy)
            assert equal(values(weights), copy)
    assert equal(values(weights), before)
    assert {name: t.data_ptr() for name, t in weights.parameters.items()} == places
    # The next time with other present values, as after an optimizer step.
    with torch.no_grad():
        for tensor in weights.parameters.values():
            tensor.add_(1.0)
    moved = values(weights)
    with weights.switching() as switch:
        switch(teacher)
    assert equal(values(weights), moved) and equal(saved, before)


def test_an_error_within_a_switch_leaves_the_present_weights(models):
    weights, other = models
    before = values(weights)
    with pytest.raises(RuntimeError, match="in between"), weights.switching() as switch:
        switch(weights.copy_of(str(other)))
        raise RuntimeError("in between")
    assert equal(values(weights), before)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_and_nothing_changes(models):
    weights, other = models
    before = values(weights)
    shapes = weights.spec.table.checkpoint_shapes()
    missing = sorted(shapes)[0]
    save_file({n: torch.zeros(s) for n, s in shapes.items() if n != missing}, other / "model.safetensors")
    with refused("checkpoint.missing", about=missing):
        weights.copy_of(str(other))
    assert equal(values(weights), before)
