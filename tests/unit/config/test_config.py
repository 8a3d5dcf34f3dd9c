"""Configurations are checked before anything starts: a refusal is one sentence with object, place and remedy.

The refusals are met as a user meets them: through the command line, with its exit code and what it prints.
"""

from __future__ import annotations

import json

import pytest
import yaml

from slimx.config.load import load_config
from slimx.observability.tracking.run_files import read_config
from tests.refusals import numbers, refused
from tests.unit.config.command_stand import Started


def test_a_configuration_in_which_nothing_is_wrong_starts(command, file):
    with pytest.raises(Started):
        command.run(file)


# Keys ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "unknown", "named"),
    [
        ("algoritm.name=sft", "algoritm", "algorithm?"),
        ("run.nmae=x", "run.nmae", "run.name?"),
        ("trainer.optimizer.weight_deacy=0", "trainer.optimizer.weight_deacy", "trainer.optimizer.weight_decay?"),
        (
            "rollout.engines=[{name: actor}, {name: other, cuont: 2}]",
            "rollout.engines.1.cuont",
            "rollout.engines.1.count?",
        ),
        ("model.xyz=1", "model.xyz", "family, path"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(command, file, override, unknown, named):
    refusal, *_ = command.problems(file, override)
    assert (refusal.code, refusal.about) == ("config.unknown_key", unknown) and named in str(refusal)


def test_all_problems_of_a_configuration_are_reported_at_once(command, file):
    codes = command.codes(file, "run.nmae=x", "schedule.steps=0")
    assert {("config.unknown_key", "run.nmae"), ("config.value", "schedule.steps")} <= {*codes}


def test_a_missing_key_is_refused_with_how_to_set_it(command, file):
    config = yaml.safe_load(file.read_text())
    del config["run"]["dir"]
    file.write_text(yaml.safe_dump(config))
    assert ("config.missing_key", "run.dir") in command.codes(file)


@pytest.mark.parametrize(
    ("override", "code", "about"),
    [
        ("trainer.optimizer.lr=fast", "config.value", "trainer.optimizer.lr"),
        ("trainer.optimizer.lr=nan", "config.value", "trainer.optimizer.lr"),
        ("numerics.dtype=float16", "config.value", "numerics.dtype"),
        ("schedule.max_staleness=-1", "config.value", "schedule.max_staleness"),
        ("schedule.window=1", "flow.window", "schedule.window"),
        ("schedule={window: 1, max_staleness: 1}", "flow.window", "schedule.window"),
        (
            "schedule={max_staleness: 1, straggler_deadline: 60, step_deadline: 60}",
            "flow.straggler_deadline",
            "schedule.straggler_deadline",
        ),
        ("schedule.straggler_deadline=60", "flow.straggler_deadline", "schedule.straggler_deadline"),
        ("rollout.over_sampling=0.5", "config.value", "rollout.over_sampling"),
        ("rollout.partial=true", "flow.partial", "rollout.partial"),
        ("rollout.request_deadline=105", "flow.request_deadline", "rollout.request_deadline"),
        ("rollout.health.threshold=20", "flow.request_deadline", "rollout.request_deadline"),
        ("algorithm.mask_stale_tokens=true", "flow.mask_stale_tokens", "algorithm.mask_stale_tokens"),
        ("schedule={colocate: true, max_staleness: 1}", "flow.colocate", "schedule.colocate"),
        ("rollout.sampling.top_k=0", "sampling.top_k", "rollout.sampling.top_k"),
        ("rollout.sampling.top_k=5000", "sampling.top_k", "rollout.sampling.top_k"),
        ("algorithm.kl_coef=0.1", "algorithm.reference", "algorithm.kl_coef"),
        ("trainer.megatron={moe_aux_loss_coeff: 0.1}", "trainer.megatron", "trainer.megatron.moe_aux_loss_coeff"),
        ("trainer.megatron={fp8: e4m3}", "trainer.megatron", "trainer.megatron.fp8"),
        ("trainer.megatron={use_mup: true}", "trainer.megatron", "trainer.megatron.use_mup"),
        ("trainer.moe.aux_loss_coef=-1", "config.value", "trainer.moe.aux_loss_coef"),
        ("trainer.moe.aux_loss_type=aux_loss", "routing.aux_loss_type", "trainer.moe.aux_loss_type"),
        ("rollout.engines=[]", "algorithm.engines", "rollout.engines"),
        ("rollout.engines=[{name: a}, {name: a}]", "engines.name_twice", "rollout.engines"),
        ("run.dir", "config.override", "run.dir"),
        ("run.name={a", "config.override", "run.name={a"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(command, file, override, code, about):
    assert (code, about) in command.codes(file, override)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- a list\n", "config.no_sections"),
        ("run:\n\tdir: x\n", "config.not_yaml"),
        (f"trainer: {{world_size: {'9' * 5000}}}\n", "config.not_yaml"),
        ("run: " + "[" * 2000 + "]" * 2000, "config.depth"),
        ("run: {dir: a}\nrun: {dir: b}\n", "config.not_yaml"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(command, file, text, code):
    file.write_text(text)
    assert command.codes(file) == [(code, str(file))]


def test_a_file_that_does_not_exist_is_refused(command, file):
    assert command.codes(file.with_name("nowhere.yaml")) == [("config.no_file", str(file.with_name("nowhere.yaml")))]


# Overrides ----------------------------------------------------------------------------------------------------------


def test_overrides_are_applied_in_order_and_keep_what_they_do_not_name(file):
    config = load_config(
        file, ["schedule.steps=7", "trainer.optimizer.lr=1e-3", "schedule.steps=9", "reward.deadline=5"]
    )
    assert (config.schedule.steps, config.trainer.optimizer.lr, config.reward.deadline) == (9, 1e-3, 5)
    assert config.rollout.max_prompt_tokens == 64 and config.numerics.dtype == "float32"


def test_overrides_take_null_lists_and_text_with_equals_signs(file):
    config = load_config(file, ["reward.function=null", "algorithm.name=sft", "rollout.engines=[]", "run.name=a=b"])
    assert config.reward.function is None and config.rollout.engines == () and config.run.name == "a=b"


def test_a_saved_configuration_contains_no_environment_values(file, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "top-secret")
    monkeypatch.setenv("STEPS", "2")
    config = load_config(
        file,
        [
            "reward.options={headers: [{key: '${oc.env:JUDGE_KEY}'}], note: 'Bearer ${oc.env:JUDGE_KEY}'}",
            "run.name=${reward.options.note}",
            "schedule.steps=${oc.env:STEPS}",
        ],
    )
    assert config.reward.options == {"headers": [{"key": "top-secret"}], "note": "Bearer top-secret"}
    assert (config.run.name, config.schedule.steps) == ("Bearer top-secret", 2)
    # Configurations that are made from it know as much.
    for variant in (config, config.model_copy(update={"schedule": config.schedule})):
        assert "top-secret" not in variant.to_text() and "top-secret" not in json.dumps(variant.to_plain())
    written = tmp_path / "config.yaml"
    written.write_text(config.to_text())
    assert load_config(written) == config and load_config(written).to_text() == config.to_text()
    assert read_config(written.parent)["run"]["name"] == "Bearer top-secret"
    monkeypatch.delenv("JUDGE_KEY")
    assert read_config(written.parent)["run"]["name"] == "${reward.options.note}"


def test_a_configuration_cannot_be_changed_after_it_was_checked(file):
    with refused("config.frozen", about="seed"):
        load_config(file).run.seed = 2


# Layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "code", "about"),
    [
        (["trainer.expert=3", "trainer.world_size=3"], "layout.divides", "trainer.expert"),
        (
            ["trainer.tensor=2", "trainer.world_size=3"],
            "trainer.world_size",
            "trainer.world_size",
        ),
        (
            ["trainer.world_size=4", "trainer.data=2"],
            "trainer.world_size",
            "trainer.world_size",
        ),
        (
            ["trainer.world_size=2", "trainer.pipeline=2", "trainer.layers_per_stage=[2,1]"],
            "layout.layers_per_stage",
            "trainer.layers_per_stage",
        ),
        (["trainer.virtual_pipeline=2"], "layout.virtual_pipeline", "trainer.virtual_pipeline"),
        (["trainer.world_size=3", "trainer.expert=2"], "trainer.expert", "trainer.expert"),
        (["trainer.world_size=2", "trainer.expert=4"], "trainer.expert", "trainer.expert"),
        (["trainer.world_size=4", "trainer.pipeline=4"], "layout.pipeline", "trainer.pipeline"),
        (["trainer.world_size=4", "trainer.tensor=4"], "layout.divides", "trainer.tensor"),
        (
            ["trainer.world_size=2", "trainer.tensor=2", "trainer.expert_tensor=1"],
            "trainer.expert_tensor",
            "trainer.expert_tensor",
        ),
        (
            ["trainer.moe.routing_replay=R3", "rollout.routed_experts=false"],
            "routes.engine",
            "trainer.moe.routing_replay",
        ),
        (["trainer.moe.bias_update_rate=0.001"], "routing.selection_bias", "trainer.moe.bias_update_rate"),
        (
            [
                "algorithm.name=reinforce_pp",
                "rollout.prompts_per_step=1",
                "rollout.group_size=1",
                "trainer.world_size=2",
            ],
            "batch.ranks",
            "trainer.data",
        ),
        (
            [
                "algorithm.name=reinforce_pp",
                "schedule.updates_per_step=4",
                "rollout.prompts_per_step=4",
                "rollout.group_size=1",
                "trainer.data=2",
            ]
            + ["trainer.world_size=2"],
            "batch.ranks",
            "trainer.data",
        ),
        (
            [
                "rollout.max_prompt_tokens=60",
                "rollout.sampling.max_new_tokens=8",
                "trainer.max_tokens_per_microbatch=66",
            ],
            "batch.microbatch",
            "trainer.max_tokens_per_microbatch",
        ),
        (
            [
                "rollout.max_prompt_tokens=60",
                "rollout.sampling.max_new_tokens=8",
                "trainer.max_tokens_per_microbatch=67",
            ]
            + ["trainer.context=2", "trainer.world_size=2"],
            "batch.microbatch",
            "trainer.max_tokens_per_microbatch",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_key(command, file, overrides, code, about):
    assert (code, about) in command.codes(file, *overrides)


def test_a_rollout_beyond_a_micro_batch_is_refused_with_its_tokens(command, file):
    keys = ["rollout.max_prompt_tokens=60", "rollout.sampling.max_new_tokens=8", "trainer.max_tokens_per_microbatch=66"]
    refusal = {"code": "batch.microbatch", "about": "trainer.max_tokens_per_microbatch"}
    assert numbers(command.refuses(file, *keys, **refusal))[-1] == 67
    padded = ["trainer.context=2", "trainer.world_size=2"]
    assert numbers(command.refuses(file, *keys, *padded, **refusal))[-1] == 68


@pytest.mark.parametrize(
    ("overrides", "code", "about", "named"),
    [
        (
            ["trainer.megatron.moe_capacity=2"],
            "trainer.megatron_field",
            "trainer.megatron.moe_capacity",
            "TransformerConfig",
        ),
        (
            ["trainer.megatron.moe_router_dtyp=fp32"],
            "trainer.megatron_field",
            "trainer.megatron.moe_router_dtyp",
            "moe_router_dtype?",
        ),
        (
            ["trainer.recompute.granularity=selective", "trainer.recompute.modules=[mla_up_proj]"],
            "activations.model",
            "trainer.recompute.modules",
            "mla_up_proj",
        ),
        (
            ["trainer.megatron.moe_pad_expert_input_to_capacity=true"],
            "trainer.megatron_core",
            "{model}",
            "moe_expert_capacity_factor",
        ),
        (
            ["cluster.device=cpu", "trainer.attention=flash"],
            "trainer.no_cuda",
            "trainer.attention",
            "trainer.attention=auto",
        ),
        (
            ["cluster.device=cpu", "trainer.moe.dispatcher=flex"],
            "trainer.no_cuda",
            "trainer.moe.dispatcher",
            "trainer.moe.dispatcher=alltoall",
        ),
    ],
)
def test_impossible_layouts_are_refused_before_anything_starts(command, file, model, overrides, code, about, named):
    command.refuses(file, *overrides, code=code, about=about.format(model=model), named=[named])
