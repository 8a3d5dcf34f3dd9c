"""Low-rank adapters are refused by name in all unproven combinations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.layout.ranks import Sizes
from slimx.models.families import read_model
from slimx.preflight.facts import model_facts
from tests.published import DEEPSEEK_V3 as V3
from tests.refusals import invalid

LORA = {"rank": 4, "alpha": 8}


def config(model: str, trainer: dict[str, Any] | None = None, **sections: Any) -> Config:
    values = {"run": {"dir": "r"}, "model": {"path": model}, "rollout": {"prompts": "p"}, **sections}
    return Config.model_validate({**values, "trainer": {"lora": LORA, **(trainer or {})}})


@pytest.mark.parametrize(
    ("trainer", "about"),
    [
        ({"pipeline": 2, "virtual_pipeline": 2, "world_size": 2}, "trainer.virtual_pipeline"),
        ({"moe": {"bias_update_rate": 0.1}}, "trainer.moe.bias_update_rate"),
        ({"optimizer": {"offload_fraction": 0.5}}, "trainer.optimizer.offload_fraction"),
        ({"distributed_optimizer": False}, "trainer.distributed_optimizer"),
        ({"megatron": {"mtp_num_layers": 1}}, "trainer.megatron.mtp_num_layers"),
    ],
)
def test_layouts_and_options_that_were_never_proven_are_refused(trainer, about):
    with invalid("unproven", about=about):
        config("m", trainer)


@pytest.mark.parametrize(
    ("sections", "about"),
    [
        ({"publish": {"quantize": "ieee"}}, "publish.quantize"),
        ({"algorithm": {"reference": True, "reference_refresh": 2}}, "algorithm.reference_refresh"),
    ],
)
def test_runs_that_were_never_proven_are_refused(sections, about):
    with invalid("unproven", about=about):
        config("m", **sections)


def test_frozen_parameters_and_adapters_exclude_each_other():
    with invalid("lora.frozen", about="trainer.freeze"):
        config("m", {"freeze": ["*"]})


def test_a_reference_with_adapters_needs_no_copy_of_the_weights(qwen):
    def copies(**trainer: Any) -> int:
        run = config(str(qwen), trainer, algorithm={"reference": True})
        return trainer_memory(run, read_model(str(qwen)), Sizes(), "cpu")[0].host_copies

    assert copies() == 0 < copies(lora=None)


def test_lora_targets_that_the_model_lacks_are_refused(qwen):
    def codes(trainer: dict[str, Any], device: str = "cpu") -> set[tuple[str | None, str | None]]:
        run = config(str(qwen), trainer)
        facts = model_facts(run, read_model(str(qwen))) | {"device": device}
        return {(p.code, p.about) for p in broken(all_rules(), facts) if p.code.startswith(("lora.", "unproven"))}

    assert not codes({})
    assert codes({"lora": {**LORA, "targets": ["attention", "mlp"]}}) == {("lora.targets", "trainer.lora.targets")}
    assert codes({"lora": {**LORA, "targets": []}}) == {("lora.targets", "trainer.lora.targets")}
    shared = {"lora": {**LORA, "targets": ["attention", "shared_experts", "router"]}}
    assert codes(shared) == {("lora.targets", "trainer.lora.targets")}
    assert not codes({"world_size": 4, "tensor": 2, "expert": 2})
    assert not codes({"world_size": 2, "tensor": 2, "lora": {**LORA, "targets": ["attention"]}})
    for targets in (["attention"], ["experts"]):
        one_kind = {"world_size": 2, "expert": 2, "lora": {**LORA, "targets": targets}}
        assert codes(one_kind) == {("lora.one_kind", "trainer.lora.targets")}
    assert not codes({"world_size": 2, "expert": 2, "lora": {**LORA, "targets": ["attention", "experts"]}})
    assert not codes({}, "cuda")


@pytest.mark.parametrize("argument", [{"enable_lora": True}, {"lora_paths": ["a=b"]}])
def test_policy_engines_and_cpu_engines_refuse_sglang_adapters(qwen, argument):
    """Covers trained adapters and runs without: a layer that SGLang has wrapped cannot be published to."""
    served = {"name": "actor", "sglang": argument}
    key = f"rollout.engines.sglang.{next(iter(argument))}"
    for lora in (LORA, None):
        with invalid("lora.served", about=key):
            config("m", {"lora": lora}, rollout={"prompts": "p", "engines": [served]})
    judge = {"name": "judge", "frozen": True, "model": "j", "sglang": argument}
    run = config(str(qwen), {"lora": None}, rollout={"prompts": "p", "engines": [{"name": "actor"}, judge]})
    for device, expected in (("cpu", {("lora.served_on_cpu", key)}), ("cuda", set())):
        facts = model_facts(run, read_model(str(qwen))) | {"device": device}
        assert {
            (p.code, p.about) for p in broken(all_rules(), facts) if p.code.startswith(("lora.", "unproven"))
        } == expected


ALONE = {"publish": {"adapters": "alone", "transport": "memory"}}
ATTENTION = {"lora": {**LORA, "targets": ["attention"]}}


def test_adapters_alone_need_adapters():
    with invalid("lora.alone", about="publish.adapters"):
        config("m", {"lora": None}, **ALONE)


@pytest.mark.parametrize(
    ("sections", "about"),
    [
        ({"numerics": {"mode": "exact", "dtype": "float32"}}, "numerics.mode"),
        ({"schedule": {"colocate": True}}, "schedule.colocate"),
        ({"publish": {**ALONE["publish"], "encoding": "local"}}, "publish.encoding"),
    ],
)
def test_runs_in_which_adapters_were_never_published_alone_are_refused(sections, about):
    with invalid("unproven", about=about):
        config("m", ATTENTION, **ALONE | sections)


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"tensor": 2}, "tensor"),
        ({"pipeline": 2}, "pipeline"),
        ({"urls": ["http://h:1"]}, "urls"),
        ({"model": "fp8"}, "model"),
        ({"sglang": {"quantization": "fp8"}}, "sglang.quantization"),
    ],
)
def test_engines_untested_with_adapters_alone_are_refused_in_any_group(engine, key):
    groups = [{"name": "plain"}, {"name": "other", **engine}]
    with invalid("unproven", about=f"rollout.engines.{key}"):
        config("m", ATTENTION, rollout={"prompts": "p", "engines": groups}, **ALONE)


def test_adapters_alone_are_those_of_dense_layers_over_memory(qwen, tmp_path):
    def codes(run: Config, model: str = str(qwen)) -> set[tuple[str | None, str | None]]:
        facts = model_facts(run, read_model(model)) | {"device": "cpu"}
        return {(p.code, p.about) for p in broken(all_rules(), facts) if p.code.startswith(("lora.", "unproven"))}

    assert not codes(config(str(qwen), ATTENTION, **ALONE))
    targets = ("lora.alone_model", "trainer.lora.targets")
    assert codes(config(str(qwen), **ALONE)) == {targets}  # routed experts among them
    routers = {"lora": {**LORA, "targets": ["attention", "router"]}}
    assert codes(config(str(qwen), routers, **ALONE)) == {targets}
    disk = {"publish": {**ALONE["publish"], "transport": "disk"}}
    assert codes(config(str(qwen), ATTENTION, **disk)) == {("lora.alone_transport", "publish.transport")}
    (tmp_path / "config.json").write_text(json.dumps(V3))
    latent = config(str(tmp_path), ATTENTION, **ALONE)
    assert codes(latent, str(tmp_path)) == {("unproven.architecture", "model.path")}
