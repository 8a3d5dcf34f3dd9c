"""Keys that follow from several names of a script, and the commands that write them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.suggestions import known_keys
from slimx.extras.foreign.scripts.command import slime_app, trl_app, verl_app
from tests.extras.foreign.script_drafts import ACTOR, PPO, ROLLOUT, accepted, slime, trl, verl
from tests.needed import ROOT
from tests.refusals import refused


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 4", {"trainer.world_size": 8, "cluster.nodes": 2}),
        (
            "--colocate --actor-num-nodes 2 --rollout-num-gpus-per-engine 4",
            {"trainer.world_size": 16, "rollout.engines.0.count": 4, "rollout.engines.0.tensor": 4,
             "schedule.colocate": True, "cluster.nodes": 2, "publish.transport": "nixl"},
        ),
        (
            "--colocate --actor-num-nodes 4 --rollout-num-gpus-per-engine 16 --sglang-pp-size 2",
            {"rollout.engines.0.count": 2, "rollout.engines.0.tensor": 16, "rollout.engines.0.nodes": 2},
        ),
        (
            "--rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 128 --num-rollout 7",
            {"schedule.updates_per_step": 4, "schedule.steps": 7, "rollout.group_size": 8},
        ),
        ("--max-tokens-per-gpu 8000 --context-parallel-size 2", {"trainer.max_tokens_per_microbatch": 16000}),
        ("--max-tokens-per-gpu 100", {"trainer.max_tokens_per_microbatch": 3072}),
        ("--rollout-batch-size 32 --over-sampling-batch-size 48", {"rollout.over_sampling": 1.5}),
        ("--adam-beta2 0.98 --weight-decay 0.1", {"trainer.optimizer.betas": [0.9, 0.98]}),
        ("--optimizer-cpu-offload", {"trainer.optimizer.offload_fraction": 1.0}),
        ("--update-weight-buffer-size 1073741824", {"publish.bucket_mib": 1024}),
        (
            "--eval-prompt-data a x.jsonl b y.jsonl --eval-interval 5 --n-samples-per-eval-prompt 4 "
            "--eval-max-response-len 64 --rollout-temperature 0.8 --eval-top-p 0.7",
            {"eval.prompts": {"a": "x.jsonl", "b": "y.jsonl"}, "eval.every": 5, "eval.samples": 4,
             "eval.max_new_tokens": 64, "eval.temperature": 0.8, "eval.top_p": 0.7},
        ),
        ("--advantage-estimator gspo --eps-clip 3e-4", {"algorithm.name": "gspo", "algorithm.loss.high": 3e-4}),
        (
            "--advantage-estimator ppo --gamma 0.9 --lambd 0.95 --kl-coef 0.1",
            {"algorithm.name": "ppo", "algorithm.advantages.lam": 0.95, "algorithm.kl_reward_coef": 0.1},
        ),
        ("--custom-generate-function-path a.b", {"rollout.generate": "slime:a.b"}),
        (
            "--rm-type deepscaler",
            {"reward.function": "slime:slime.rollout.rm_hub.async_rm", "reward.options": {"rm_type": "deepscaler"}},
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 4 --num-layers 46",
            {"trainer.layers_per_stage": [14, 14, 14, 4]},
        ),
        ("--use-tis --tis-clip 3", {"algorithm.correction.kind": "truncate", "algorithm.correction.high": 3}),
        ("--calculate-per-token-loss", {"algorithm.aggregation": "token"}),
        ("--sglang-mem-fraction-static 0.7", {"rollout.engines.0.sglang.mem_fraction_static": 0.7}),
    ],
)  # fmt: skip
def test_keys_of_slime_are_computed_from_all_flags(flags, keys):
    settings = accepted(slime(flags))
    assert {key: settings.get(key) for key in keys} == keys


def test_an_asynchronous_script_of_slime_is_one_version_behind():
    settings = accepted(slime("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2", "train_async.py"))
    assert settings["schedule.max_staleness"] == 1 and settings["rollout.engines.0.count"] == 4
    assert "schedule.colocate" not in settings and settings["cluster.nodes"] == 2


def test_a_kl_weight_of_zero_logs_the_kl_and_leaves_the_term_off():
    off = accepted(slime("--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl"))
    assert off["algorithm.reference"] is True
    assert "algorithm.kl_coef" not in off and "algorithm.kl_estimator" not in off
    on = accepted(slime("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl"))
    assert (on["algorithm.kl_coef"], on["algorithm.kl_estimator"]) == (0.01, "low_variance")
    without = accepted(slime("--kl-loss-coef 0.01 --kl-loss-type low_var_kl"))
    assert "algorithm.reference" not in without and "algorithm.kl_coef" not in without


def test_demonstrations_of_slime_need_neither_engines_nor_rewards():
    settings = accepted(slime("--loss-type sft_loss --debug-train-only --num-epoch 3", "train_async.py"))
    assert (settings["algorithm.name"], settings["rollout.engines"]) == ("sft", [])
    assert "schedule.max_staleness" not in settings and "algorithm.old_logprobs" not in settings


def test_epochs_are_counted_from_a_file_that_is_here(tmp_path):
    draft = slime("--num-epoch 3 --rollout-batch-size 4")
    assert "schedule.steps" in draft.supply
    file = tmp_path / "p.jsonl"
    file.write_text('{"a": 1}\n' * 12)
    draft = slime(f"--num-epoch 3 --rollout-batch-size 4 --prompt-data {file}")
    assert draft.settings["schedule.steps"] == 9 and "schedule.steps" not in draft.supply


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (
            f"data.train_batch_size=128 {ACTOR}.ppo_mini_batch_size=32 {ROLLOUT}.n=8",
            {"schedule.updates_per_step": 4, "rollout.group_size": 8},
        ),
        (
            f"trainer.nnodes=2 trainer.n_gpus_per_node=8 {ROLLOUT}.tensor_model_parallel_size=4",
            {"trainer.world_size": 16, "rollout.engines.0.count": 4, "schedule.colocate": True},
        ),
        (
            f"trainer.nnodes=4 {ROLLOUT}.data_parallel_size=4 {ROLLOUT}.expert_parallel_size=16 "
            f"{ROLLOUT}.tensor_model_parallel_size=4",
            {"rollout.engines.0.tensor": 16, "rollout.engines.0.dp_attention": 4, "rollout.engines.0.expert": 16},
        ),
        ("+data.train_files=\"['~/a/train.parquet','~/b/train.parquet']\"", {"rollout.sources.1.name": "b"}),
        (f"{ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_high=4", {"algorithm.loss.low": 0.2, "algorithm.loss.high": 4}),
        (f"{ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_low=null", {"algorithm.loss.low": 0.3}),
        (f"{ACTOR}.policy_loss.loss_mode=gspo algorithm.adv_estimator=grpo", {"algorithm.name": "gspo"}),
        (
            "algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0",
            {"algorithm.correction.kind": "icepop", "algorithm.correction.low": 0.5},
        ),
        (
            "reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=16 +reward_model.reward_kwargs.max_resp_len=64",
            {"reward.parts.1.options": {"limit": 64, "buffer": 16}},
        ),
        (
            f"data.val_files=v trainer.test_freq=5 {ROLLOUT}.val_kwargs.n=4 {ROLLOUT}.val_kwargs.do_sample=True "
            f"{ROLLOUT}.val_kwargs.temperature=0.6",
            {"eval.samples": 4, "eval.temperature": 0.6, "eval.every": 5},
        ),
        (
            "async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 rollout.nnodes=1 "
            f"rollout.n_gpus_per_node=4 trainer.n_gpus_per_node=4 {ACTOR}.ppo_mini_batch_size=32 "
            "rollout.total_rollout_steps=1280",
            {"rollout.prompts_per_step": 128, "schedule.updates_per_step": 4, "schedule.max_staleness": 1,
             "schedule.steps": 10, "cluster.nodes": 1, "rollout.engines.0.count": 2},
        ),
        (
            "algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.1",
            {"algorithm.name": "rloo", "algorithm.kl_reward_coef": None},
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=sapo +{ACTOR}.policy_loss.tau_pos=1.5 {ACTOR}.loss_agg_mode=token-mean",
            {"algorithm.name": "sapo", "algorithm.loss.tau_positive": 1.5, "algorithm.aggregation": "sample"},
        ),
        ("algorithm.adv_estimator=gae critic.optim.lr=1e-5", {"algorithm.name": "ppo", "critic.optimizer.lr": 1e-5}),
    ],
)  # fmt: skip
def test_keys_of_verl_are_computed_from_all_overrides(keys, settings):
    found = accepted(verl(f"algorithm.adv_estimator=grpo {keys}"))
    assert {key: found.get(key) for key in settings} == settings


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (
            "--num_processes 4 --per_device_train_batch_size 16 --gradient_accumulation_steps 2 --num_generations 8",
            {"rollout.prompts_per_step": 16, "trainer.world_size": 4, "rollout.engines.0.count": 4},
        ),
        ("--steps_per_generation 8 --gradient_accumulation_steps 2", {"schedule.updates_per_step": 4}),
        ("--use_vllm --vllm_mode server", {"rollout.engines.0.count": 1, "cluster.nodes": 1}),
        ("--use_vllm", {"algorithm.correction.kind": "icepop", "algorithm.correction.level": "sequence"}),
        ("--beta 0.04", {"algorithm.kl_coef": 0.04, "algorithm.reference": True}),
        ("--loss_type dr_grpo --scale_rewards none", {"algorithm.advantages.normalize_std": False}),
        ("--trainer dpo --max_length 256", {"algorithm.name": "dpo", "rollout.max_prompt_tokens": 256}),
        ("--trainer sft", {"algorithm.name": "sft", "trainer.optimizer.lr": 2e-5}),
        ("--reward_funcs a.x b.y --reward_weights 1 2", {"reward.parts.1.weight": 2, "reward.parts.0.name": "x"}),
        ("--max_steps 40 --warmup_steps 0.1", {"trainer.optimizer.warmup_steps": 4, "schedule.steps": 40}),
        ("--max_steps 40 --warmup_steps 9", {"trainer.optimizer.warmup_steps": 9}),
        ("--use_peft --lora_r 8", {"trainer.lora": {"rank": 8, "alpha": 32}}),
    ],
)
def test_keys_of_trl_are_computed_from_all_flags(flags, settings):
    found = accepted(trl(flags))
    assert {key: found.get(key) for key in settings} == settings


def test_a_variable_without_a_value_is_named_where_it_is_needed(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --hf-checkpoint $BASE/m --prompt-data p --wandb-key $KEY\n")
    with refused("foreign.variable", about="BASE"):
        CliRunner().invoke(slime_app, [str(script)], catch_exceptions=False, standalone_mode=False)
    result = CliRunner().invoke(slime_app, [str(script), "BASE=/b"], catch_exceptions=False)
    assert yaml.safe_load(result.output)["model"]["path"] == "/b/m"


def test_a_command_writes_a_file_that_slimx_loads(tmp_path):
    script, out = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(f"python3 -m {PPO} actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo {ROLLOUT}.n=4\n")
    result = CliRunner().invoke(verl_app, [str(script), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0 and load_config(out).model.path == "m"


def test_a_file_that_exists_is_overwritten_only_by_force(tmp_path):
    script, out = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text("python3 train.py --hf-checkpoint m --prompt-data p --n-samples-per-prompt 2\n")
    out.write_text("kept")
    words = [str(script), "--out", str(out)]
    assert CliRunner().invoke(slime_app, [str(script), "--out", f"{tmp_path}/new/a.yaml"]).exit_code == 0
    with refused("out.exists", about=str(out)):
        CliRunner().invoke(slime_app, words, catch_exceptions=False, standalone_mode=False)
    assert out.read_text() == "kept"
    assert CliRunner().invoke(slime_app, [*words, "--force"], catch_exceptions=False).exit_code == 0
    assert load_config(out).model.path == "m"
    with refused("out.unwritable", about=f"{out}/a.yaml"):
        words = [str(script), "--out", f"{out}/a.yaml"]
        CliRunner().invoke(slime_app, words, catch_exceptions=False, standalone_mode=False)


def test_a_configuration_that_slimx_refuses_is_written_with_the_reason(tmp_path):
    script = tmp_path / "run.txt"
    script.write_text("--hf-checkpoint m --prompt-data p\n--tensor-model-parallel-size 3\n")
    result = CliRunner().invoke(slime_app, [str(script)], catch_exceptions=False)
    assert result.exit_code == 2
    reasons = [line for line in result.stdout.splitlines() if line.startswith("#   1: ")]
    assert len(reasons) == 1 and "trainer.world_size" in reasons[0]
    assert yaml.safe_load(result.stdout)["trainer"]["tensor"] == 3


@pytest.mark.parametrize(
    ("app", "name", "text", "code"),
    [
        (slime_app, None, "", "foreign.no_script"),
        (slime_app, "a.sh", "echo nothing\n", "foreign.no_launch"),
        (slime_app, "a.sh", "python3 -m verl.trainer.main_ppo a.b=1\n", "foreign.other_framework"),
        (verl_app, "a.sh", "python3 train.py --rollout-batch-size 1\n", "foreign.other_framework"),
        (trl_app, "a.sh", "python3 -m verl.trainer.main_ppo a.b=1\n", "foreign.other_framework"),
        (verl_app, "a.yaml", "a: 1\n", "foreign.kind"),
        (slime_app, "a.py", "import os\n", "foreign.kind"),
        (trl_app, "a.py", "def\n", "foreign.not_python"),
        (slime_app, "a.sh", 'python train.py --a "b\n', "foreign.syntax"),
        (slime_app, "a.sh", "python train.py --rollout-batch-size many\n", "foreign.number"),
        (slime_app, "a.sh", "python train.py --global-batch-size 0\n", "foreign.values"),
        (verl_app, "a.sh", f"python -m {PPO} data.train_batch_size=0\n", "foreign.values"),
        (trl_app, "a.yaml", "num_generations: [\n", "foreign.not_yaml"),
        (trl_app, "a.yaml", "trl\n", "foreign.not_yaml"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused(tmp_path, app, name, text, code):
    script = tmp_path / (name or "missing.sh")
    if name is not None:
        script.write_text(text)
    with refused(code):
        CliRunner().invoke(app, [str(script)], catch_exceptions=False, standalone_mode=False)


def test_an_evaluation_file_of_slime_gives_every_set_its_own_settings(tmp_path):
    content = {"eval": {"defaults": {"top_p": 0.7}, "datasets": [
        {"name": "a", "path": "a.jsonl", "n_samples_per_eval_prompt": 16, "max_response_len": 64},
        {"name": "b", "path": "b.jsonl"},
    ]}}  # fmt: skip
    (tmp_path / "eval.yaml").write_text(json.dumps(content))
    draft = slime(f"--eval-config {tmp_path / 'eval.yaml'} --eval-interval 2")
    (tmp_path / "run.yaml").write_text(draft.text()[0])
    sets = load_config(tmp_path / "run.yaml").eval.sets
    assert (sets["a"].samples, sets["a"].max_new_tokens, sets["b"].samples, sets["b"].top_p) == (16, 64, 1, 0.7)


def test_a_missing_backslash_is_told(tmp_path):
    script = Path(tmp_path, "run.sh")
    script.write_text("python train.py --hf-checkpoint m\n --prompt-data p\n")
    result = CliRunner().invoke(slime_app, [str(script)], catch_exceptions=False)
    assert "backslash" in result.stdout and yaml.safe_load(result.stdout)["rollout"]["prompts"] == "p"


def test_every_key_in_the_table_of_ms_swift_exists():
    page = (ROOT / "docs" / "guides" / "coming-from.md").read_text()
    table = page.partition("## From ms-swift")[2].partition("## Every name")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `--")]
    keys = {key for row in rows for key in re.findall(r"`((?:\w+\.)+\w+)(?::.*?)?`", row)}
    known = known_keys(Config)
    objectives = ("algorithm.loss.", "algorithm.advantages.", "sglang.")
    unknown = {key for key in keys if not any(f"{name}.".startswith(f"{key}.") for name in known)}
    assert len(rows) > 20 and {key for key in unknown if not key.startswith(objectives)} == set()
