"""A rank refuses a model, a layout or a pass that it cannot make sense of, by the name of the part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slimx.config.schema import Config
from slimx.config.sections.algorithm import Algorithm
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.rules.trainer import NOT_PASSED
from slimx.trainer.device.backends import HYBRID, choose_backends
from slimx.trainer.model.weights import Weights
from tests.checkpoint_stand import QWEN3_MOE
from tests.refusals import refused
from tests.unit.trainer.bare_module import bare_module


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    return read_model(tmp_path)


def test_a_parameter_without_a_row_of_the_table_is_named(spec: ModelSpec):
    model = bare_module(MegatronLayout(spec.table, Sizes()).parts_of(0))
    model.decoder.register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
    with refused("model.table_name", about="decoder.stray"):
        Weights([model], spec, MegatronLayout(spec.table, Sizes()), 0)


def test_a_parameter_of_another_shape_than_its_row_is_named(spec: ModelSpec):
    model = bare_module(MegatronLayout(spec.table, Sizes()).parts_of(0))
    model.decoder.final_layernorm.weight = torch.nn.Parameter(torch.zeros(3))
    with refused("model.table_shape", about="decoder.final_layernorm.weight"):
        Weights([model], spec, MegatronLayout(spec.table, Sizes()), 0)


@pytest.mark.parametrize(
    ("megatron", "code", "about"),
    [
        ({"moe_capacity": 2}, "trainer.megatron_field", "trainer.megatron.moe_capacity"),
        ({"mtp_num_layers": 1}, "trainer.mtp_layers", "trainer.megatron.mtp_num_layers"),
        (
            {"num_attention_heads": 5, "num_query_groups": 4, "tensor_model_parallel_size": 2},
            "trainer.megatron_core",
            None,
        ),
    ],
)
def test_fields_that_megatrons_configuration_rejects_are_refused(
    spec: ModelSpec, megatron: dict[str, Any], code: str, about: str | None
):
    from slimx.trainer.model.transformer import transformer_config  # imports megatron-core

    config = Config.model_validate(
        {"run": {"dir": "r"}, "model": {"path": spec.path}, "rollout": {"prompts": "p", "engines": [{}]}}
    )
    config.trainer.megatron.update(megatron)
    backends = choose_backends(config.trainer, device="cpu", packages=())
    with refused(code, about=about or spec.path):
        transformer_config(spec, config, backends, cpu=True)


def test_every_field_that_is_not_passed_through_is_one_of_megatrons():
    from megatron.core.transformer import MLATransformerConfig

    from slimx.trainer.model.transformer import check_megatron_fields  # imports megatron-core

    check_megatron_fields(NOT_PASSED, MLATransformerConfig)


@pytest.mark.parametrize(("flex_backend", "padded"), [("hybridep", True), ("deepep", False)])
def test_packed_micro_batches_are_padded_to_one_size_for_the_dispatcher(
    spec: ModelSpec, flex_backend: str, padded: bool
):
    from slimx.trainer.model.transformer import transformer_config  # imports megatron-core

    config = Config.model_validate(
        {
            "run": {"dir": "r"},
            "model": {"path": spec.path},
            "numerics": {"dtype": "bfloat16"},
            "trainer": {"world_size": 2, "expert": 2, "moe": {"dispatcher": "flex", "flex_backend": flex_backend}},
            "rollout": {"prompts": "p", "engines": [{}]},
        }
    )
    backends = choose_backends(config.trainer, device="cuda", packages={"deep_ep", HYBRID})
    transformer = transformer_config(spec, config, backends, cpu=False)
    assert transformer.moe_hybridep_pad_uneven_dispatch_inputs is padded


def test_a_norm_of_all_heads_stands_in_self_attention_only():
    from slimx.trainer.model.projection_norm import install  # imports megatron-core

    attention = SimpleNamespace(module=dict, submodules=None)
    layer = SimpleNamespace(submodules=SimpleNamespace(self_attention=attention))
    with refused("trainer.projection_norm", about=str(dict)):
        install(SimpleNamespace(layer_specs=[layer]), SimpleNamespace(qk_layernorm=False))


def test_a_router_outside_a_pass_is_a_defect():
    from slimx.trainer.moe.router import Cursor, RoutedTokens, RouterWatch  # imports megatron-core

    cursor = Cursor()
    watch = RouterWatch("the router of layer 3", cursor, 0, tally=SimpleNamespace())
    with refused("routing.outside", about="the router of layer 3"):
        watch.arrive()
    tokens = torch.zeros(2)
    cursor.tokens = RoutedTokens(counted=tokens > 0, segments=tokens.long(), sequences=1, replayed=None)
    with torch.no_grad():
        assert watch.arrive().first, "a checkpointed forward pass, to be computed again"
    cursor.tokens = None
    watch.finish(trainable=False)
    with refused("routing.not_recomputed", about="the router of layer 3"):
        watch.finish(trainable=True)
    assert not watch.arrive().first
    watch.finish(trainable=True)


def test_scores_under_weights_that_the_run_does_not_hold_are_refused():
    from slimx.trainer.step.passes import ForwardPasses  # imports megatron-core

    passes = ForwardPasses(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), Algorithm(), "none")
    with refused("trainer.no_weights", about="algorithm.teacher"):
        passes.scores([], under="teacher")
