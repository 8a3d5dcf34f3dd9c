"""The form of weights with adapters: chosen by the configuration, and the same in a server's command line."""

from __future__ import annotations

from dataclasses import replace

import torch

from slimx.config.schema import Config
from slimx.engines.server.attestation import check_ranks
from slimx.engines.server.spec import EngineSpec, server_args, server_argv
from slimx.extras.lora.attached import AttachedAdapters
from slimx.extras.lora.form import LoraForm, ServedLora
from slimx.layout.form import AttachedForm, ServedForm, WeightForm, form_of, server_form
from slimx.layout.maps import Rect
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part
from slimx.reshard.plan.copy_plan import compile_plan
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
    assert type(form_of(config_of(None))) is WeightForm and type(form_of(config_of(LORA))) is LoraForm
    assert form_of(config_of(LORA)).served() == ServedForm(), "merged weights are plain ones to an engine"
    assert form_of(config_of(LORA, "alone")).served().contract() == {"rank": 4, "scales": {"actor": 2.0}}


def test_a_server_with_adapters_must_confirm_them() -> None:
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
        return torch.full((2, 2), 3.0)


def test_weights_leave_merged_or_with_adapters_and_are_exported_merged() -> None:
    weights, adapter = {"x.weight": torch.zeros(2, 2)}, Beside()
    part = Part("x.weight", (2, 2), (0,), ("x",), (Rect(0, 0, 0, 2, 2, 0, 0),))
    plan = compile_plan([part], [part], precision=Precision("float32", "float32"), bucket_bytes=64, ranks=1)

    def made(form: AttachedForm, name: str) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Names of the tensors that leave, and what is made for the first bucket."""
        found, room = form.leaving(name, plan, 0, weights)
        room.make(0, plan.moves_of(0, 0))
        return [*found], {name: value.clone() for name, value in room.places(0).items()}

    merged = AttachedAdapters({"x.weight": adapter}, alone=False)
    alone = AttachedAdapters({"x.weight": adapter}, alone=True)
    assert made(AttachedForm(), "publish") == (["x.weight"], {})
    for form, name in ((merged, "publish"), (merged, "export"), (alone, "export")):
        names, values = made(form, name)
        assert names == [*values] == ["x.weight"] and torch.equal(values["x.weight"], adapter.merged())
    for name in ("publish", "adapters"):
        assert made(alone, name) == (["x.weight", "x.lora_a", "x.lora_b"], {})
    assert not weights["x.weight"].any()
    assert [*alone.parameters().values()] == [*adapter.parameters]
    with alone.left_out():
        assert not adapter.enabled
    assert adapter.enabled
