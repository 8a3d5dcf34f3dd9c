"""The form of weights with adapters: chosen by the configuration, and the same in a server's command line."""

from __future__ import annotations

from dataclasses import replace

import torch

from slimx.config.schema import Config
from slimx.engines.server.attestation import check_ranks
from slimx.engines.server.spec import EngineSpec, server_args, server_argv
from slimx.extras.lora.attached import AttachedAdapters
from slimx.extras.lora.form import Lora, ServedLora
from slimx.layout.form import AttachedForm, ServedForm, WeightForm, form_of, server_form
from tests.refusals import refused
from tests.unit.engines.attestation_stand import attesting

CPU = EngineSpec("e", "/model", "float32", "cpu", 31000)
LORA = {"rank": 4, "alpha": 8}


def config_of(lora: dict[str, float] | None, publish: str = "merged") -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "r"},
            "model": {"path": "m"},
            "rollout": {"prompts": "p"},
            "trainer": {"lora": lora},
            "publish": {"adapters": publish, "transport": "memory"},
        }
    )


def test_a_run_has_the_form_that_it_configures() -> None:
    assert type(form_of(config_of(None))) is WeightForm and type(form_of(config_of(LORA))) is Lora
    assert form_of(config_of(LORA)).served() == ServedForm(), "merged weights are plain ones to an engine"
    assert form_of(config_of(LORA, "alone")).served().contract() == {"rank": 4, "scales": {"actor": 2.0}}


def test_a_server_that_computes_with_adapters_is_started_with_them_and_must_attest_them() -> None:
    spec = replace(CPU, form=ServedLora({"actor": 8.0}, 4, ("q_proj", "o_proj")))
    argv = server_argv(spec)
    assert (server_form(argv), server_form(server_argv(CPU))) == (ServedLora({"actor": 8.0}), ServedForm())
    line = " ".join(argv)
    for option in ("--enable-lora ", "--max-lora-rank 4", "--lora-target-modules q_proj o_proj --", "torch_native"):
        assert option in line
    assert "enable_lora" not in server_args(CPU) and "lora_backend" not in server_args(replace(spec, device="cuda"))
    attested = {"rank": 4, "scales": {"actor": 2.0}}
    check_ranks([attesting(adapters=attested)], spec)
    check_ranks([attesting()], CPU)
    for one, other in (
        (spec, None),
        (CPU, attested),
        (spec, attested | {"scales": {"actor": 1.0}}),
        (spec, attested | {"scales": {"judge": 2.0}}),
        (spec, attested | {"rank": 8}),
    ):
        with refused("engine.adapters", about="e rank 0"):
            check_ranks([attesting(adapters=other)], one)
    two = replace(spec, form=replace(spec.form, alphas={"actor": 8.0, "judge": 2.0}))
    assert server_form(server_argv(two)).policies == two.form.policies == ("actor", "judge")
    assert server_args(two)["max_loras_per_batch"] == 3
    check_ranks([attesting(adapters=attested | {"scales": {"actor": 2.0, "judge": 0.5}})], two)


class Beside:
    """An adapter of two numbers."""

    sources, enabled = "q + k", True

    def __init__(self) -> None:
        self.parameters = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.zeros(1))

    def merged(self) -> torch.Tensor:
        return torch.full((1,), 3.0)


def test_weights_leave_merged_or_with_their_adapters_beside_them_and_are_exported_merged() -> None:
    weights, adapter = {"x.weight": torch.zeros(1)}, Beside()
    assert AttachedForm().leaving("publish", weights) == (weights, {})
    merged = AttachedAdapters({"x.weight": adapter}, alone=False)
    alone = AttachedAdapters({"x.weight": adapter}, alone=True)
    for found, makers in (merged.leaving("publish", weights), merged.leaving("export", weights)):
        assert found is weights and makers["x.weight"]() == 3.0
    assert alone.leaving("export", weights)[1].keys() == {"x.weight"}
    for plan in ("publish", "adapters"):
        found, makers = alone.leaving(plan, weights)
        assert (list(found), makers) == (["x.weight", "x.lora_a", "x.lora_b"], {})
    assert list(alone.parameters()) == ["A of the adapter of q + k", "B of the adapter of q + k"]
    with alone.left_out():
        assert not adapter.enabled
    assert adapter.enabled
