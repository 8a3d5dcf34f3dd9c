"""Activations that are computed again or wait on the host: what is refused, and what `slimx plan --suggest` chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimx.config.load import load_config
from slimx.config.rule import broken
from slimx.config.schema import Config
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.extras.planner.plan.activation_strategies import strategy_rules
from slimx.extras.planner.plan.report import plan_report
from slimx.extras.planner.plan.suggest import Search, suggest_layouts
from slimx.extras.planner.plan.suggest_engines import suggest_engines
from slimx.extras.planner.plan.text import describe
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.trainer.device.backends import choose_backends
from tests.checkpoint_stand import DEEPSEEK_V3, QWEN3_MOE
from tests.extras.convert.convert_stand import QWEN3
from tests.refusals import invalid, refused

ROOT = Path(__file__).parents[3]
ALL = ["core_attn", "attn_proj", "expert_fc1", "moe_act"]


def settings(trainer: dict[str, Any], **sections: Any) -> Config:
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "trainer": trainer}
    return Config.model_validate(values | sections)


@pytest.mark.parametrize(
    ("trainer", "code", "about"),
    [
        ({"recompute": {"granularity": "full"}}, "activations.recompute", "trainer.recompute.granularity"),
        ({"recompute": {"granularity": "selective"}}, "activations.recompute", "trainer.recompute.granularity"),
        ({"offload_activations": ["attn_proj"]}, "activations.attn_proj", "trainer.offload_activations"),
        ({"lora": {"rank": 4, "alpha": 4}}, "unproven", "trainer.lora"),
        ({"freeze": ["*router*"]}, "unproven", "trainer.freeze"),
        ({"qat": "int4"}, "unproven", "trainer.qat"),
        ({"world_size": 2, "pipeline": 2, "virtual_pipeline": 2}, "unproven", "trainer.virtual_pipeline"),
        ({"fp8": "mxfp8"}, "unproven", "trainer.fp8"),
        (
            {"optimizer": {"kind": "muon"}, "distributed_optimizer": False},
            "unproven",
            "trainer.optimizer.kind",
        ),
        ({"moe": {"dispatcher": "flex"}}, "unproven", "trainer.moe.dispatcher"),
        ({"megatron": {"mtp_num_layers": 1}}, "unproven", "trainer.megatron.mtp_num_layers"),
    ],
)
def test_features_unproven_with_offloaded_activations_are_refused(trainer, code, about):
    settings({"offload_activations": ALL})
    with invalid(code, about=about):
        settings({"offload_activations": ALL} | trainer)


@pytest.mark.parametrize(
    ("sections", "about"), [({"numerics": {"mode": "exact"}}, "numerics.mode"), ({"critic": {}}, "critic")]
)
def test_exact_mode_and_critics_are_refused_with_offloaded_activations(sections, about):
    with invalid("unproven", about=about):
        settings({"offload_activations": ALL}, **sections)


@pytest.mark.parametrize(
    "key",
    [
        "fine_grained_activation_offloading",
        "offload_modules",
        "activation_offload_fraction",
        "cpu_offloading",
    ],
)
def test_offloading_fields_of_megatron_are_not_passed(key):
    with invalid("trainer.megatron", about=f"trainer.megatron.{key}"):
        settings({"megatron": {key: 1}})


@pytest.mark.parametrize(
    ("model", "device", "trainer", "expected"),
    [
        (QWEN3_MOE, "cuda", {"offload_activations": ALL}, set()),
        (QWEN3_MOE, "cpu", {"offload_activations": ALL}, {("activations.device", "trainer.offload_activations")}),
        (QWEN3, "cuda", {"offload_activations": ["core_attn"]}, set()),
        (
            QWEN3,
            "cuda",
            {"offload_activations": ["moe_act"]},
            {("activations.model", "trainer.offload_activations")},
        ),
        *(
            (
                QWEN3_MOE,
                "cuda",
                {"recompute": {"granularity": "selective", "modules": [module]}},
                {("activations.model", "trainer.recompute.modules")},
            )
            for module in ("mla_up_proj", "shared_experts")
        ),
        (
            DEEPSEEK_V3,
            "cuda",
            {"recompute": {"granularity": "selective", "modules": ["mla_up_proj", "shared_experts"]}},
            set(),
        ),
    ],
)
def test_modules_that_a_model_or_device_has_not_are_refused(tmp_path, model, device, trainer, expected):
    (tmp_path / "config.json").write_text(json.dumps(model))
    facts = settings(trainer).facts | {"spec": read_model(tmp_path), "device": device}
    assert {(problem.code, problem.about) for problem in broken(strategy_rules(), facts)} == expected


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ("Qwen3-30B-A3B", False),
        ("DeepSeek-V3", False),
        ("DeepSeek-V3.2", True),
        ("Qwen3-Next-80B-A3B-Instruct", True),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", True),
        ("gpt-oss-120b-bf16", True),
    ],
)
def test_attention_whose_activations_never_moved_is_refused(model, refused):
    facts = settings({"offload_activations": ALL}).facts
    facts |= {"spec": read_model(ROOT / "configs/moe/models" / model), "device": "cuda"}
    found = {(problem.code, problem.about) for problem in broken(strategy_rules(), facts)}
    assert found == ({("unproven.layers", "trainer.offload_activations")} if refused else set())


def test_tensors_that_megatron_core_leaves_on_the_device_are_planned_there():
    """Keeps attention's tensors of fewer than 2**20 elements on the device, and moves the experts' larger ones; another
    threshold moves both."""
    spec = read_model(ROOT / "configs/moe/models/Qwen3-30B-A3B")

    def freed(tokens, **megatron):
        layout = {"world_size": 8, "tensor": 4, "expert": 4, "expert_tensor": 1}
        config = settings(
            layout | {"max_tokens_per_microbatch": tokens, "megatron": megatron}, numerics={"dtype": "bfloat16"}
        )
        parts = trainer_memory(config, spec, sizes_of(config.trainer), "cuda")[0].parts
        return {name.split()[1] for name in parts if name.startswith("offload ")}

    dispatched = 8 * spec.transformer["hidden_size"] // 4  # elements of a token on a rank
    tokens = 2**20 // dispatched
    assert freed(tokens) == {"expert_fc1"}
    assert freed(tokens - 4) == set()
    assert freed(tokens - 4, min_offloaded_tensor_size=1) == {*ALL}


def test_a_plan_names_parts_for_the_host_only_where_no_rule_refuses_them():
    def lines(file, *overrides):
        config = load_config(ROOT / "configs/moe" / file, list(overrides))
        return " ".join(line for line in describe(plan_report(config).report) if line.startswith("  parts "))

    assert "on the host core_attn" in lines("qwen3-30b-a3b.yaml")
    refusing = lines("qwen3-30b-a3b.yaml", "trainer.freeze=['*router*']")
    assert "computed again" in refusing and "on the host" not in refusing
    assert "on the host" not in lines("nemotron-3-nano-sft.yaml")


def test_a_machine_without_transformer_engine_cannot_offload():
    trainer = settings({"offload_activations": ALL}).trainer
    with refused("trainer.not_installed", about="trainer.offload_activations"):
        choose_backends(trainer, device="cuda", packages=())
    choose_backends(trainer, device="cuda", packages=("transformer_engine",))


def test_the_cheapest_recomputation_that_fits_is_chosen():
    """Uses GPUs with ever less memory: nothing, parts on the host, modules recomputed, layers recomputed, no fit."""
    config = load_config(
        ROOT / "configs/moe/qwen3-30b-a3b.yaml",
        [
            "schedule.colocate=false",
            "cluster.nodes=4",
            "publish.transport=nixl",
            "trainer.max_tokens_per_microbatch=40960",
            "trainer.memory_margin_mib=0",
        ],
    )
    planned = plan_report(config)
    search = Search(config, planned.spec, planned.machine, "cuda")
    split = next(split for split in search._possible(8) if split.sizes == sizes_of(config.trainer))
    found = []
    for gib in (100, 90, 70, 50, 40):
        search.machine = replace(planned.machine, memory=gib * 2**30)
        found.append(search.fit(split))
    assert found.pop() is None
    nothing, host, modules, layers = found
    assert not [
        suggestion for suggestion in nothing.overrides if "offload_activations" in suggestion or "modules" in suggestion
    ]
    assert 'trainer.offload_activations=["expert_fc1"]' in host.overrides
    assert 'trainer.recompute.modules=["layernorm", "moe"]' in modules.overrides
    assert [suggestion.recomputed for suggestion in (nothing, host)] == [
        0,
        0,
    ] and 0.1 < modules.recomputed < layers.recomputed < 0.34
    assert nothing.cost <= host.cost < modules.cost < layers.cost
    peaks = [suggestion.trainer_peak / 2**30 for suggestion in (nothing, host, modules, layers)]
    assert peaks == sorted(peaks, reverse=True)
    assert all(peak <= gib for peak, gib in zip(peaks, (100, 90, 70, 50), strict=True))


def test_no_layout_is_suggested_that_the_configuration_refuses():
    """Uses adapters, which were never proven with interleaved stages, nor with moments on the host."""
    file, adapters = (
        ROOT / "configs/moe/qwen3-30b-a3b.yaml",
        ["trainer.lora={rank: 8, alpha: 16}", "trainer.optimizer.offload_fraction=0"],
    )
    config = load_config(file, adapters)
    planned = plan_report(config)
    suggested, _ = suggest_layouts(config, planned.spec, replace(planned.machine, memory=70 * 2**30), "cuda")
    assert suggested
    for suggestion in suggested:
        load_config(file, [*adapters, *suggestion.overrides])


def test_no_engines_are_suggested_that_the_configuration_refuses():
    """Uses exact mode, which was never proven with data-parallel attention, the layout with most rollouts at once."""
    file = ROOT / "configs/moe/qwen3-30b-a3b.yaml"
    for mode, copies in (("fast", 2), ("exact", 1)):
        config = load_config(file, [f"numerics.mode={mode}"])
        planned = plan_report(config)
        (suggested,) = suggest_engines(config, planned.spec, planned.machine)
        assert suggested.dp_attention == copies


@pytest.mark.slow("full grid of shipped configurations")
@pytest.mark.parametrize("file", sorted((ROOT / "configs/moe").glob("*.yaml")), ids=lambda file: file.stem)
def test_layouts_suggested_for_shipped_configurations_fit(file):
    config = load_config(file, [])
    if config.cluster.gpu is None:
        pytest.skip("a quickstart of the CPU")
    planned = plan_report(config)
    suggested, _ = suggest_layouts(config, planned.spec, planned.machine, "cuda")
    assert suggested
    tried = plan_report(load_config(file, list(suggested[0].overrides)))
    assert [problem for problem in tried.problems if problem.code.startswith("memory.")] == []
