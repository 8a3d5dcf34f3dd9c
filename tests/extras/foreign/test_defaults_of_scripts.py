"""Defaults, units and combinations in which a framework differs from slimx, by the framework's source."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from slimx.extras.foreign.scripts.command import slime_app
from tests.extras.foreign.script_drafts import ACTOR, ROLLOUT, SFT, accepted, slime, verl

ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
OPTIMIZER = "critic.optimizer"
CHANGED, LOSS_MODE = f"{ACTOR}.megatron.override_transformer_config", f"{ACTOR}.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (
            "--advantage-estimator ppo --lr 3e-6 --weight-decay 0.1 --adam-beta2 0.98 --clip-grad 0.5",
            {f"{OPTIMIZER}.lr": 3e-6, f"{OPTIMIZER}.weight_decay": 0.1, f"{OPTIMIZER}.betas": [0.9, 0.98],
             f"{OPTIMIZER}.clip_grad": 0.5, f"{OPTIMIZER}.decay": "linear"},
        ),
        (
            "--advantage-estimator ppo --critic-lr 1e-5 --lr 1e-6",
            {f"{OPTIMIZER}.lr": 1e-5, "trainer.optimizer.lr": 1e-6},
        ),
        ("--lr 3e-6", {f"{OPTIMIZER}.lr": None}),
        (
            "--advantage-estimator ppo --kl-coef 0.1 --kl-loss-type low_var_kl",
            {"algorithm.kl_reward_coef": 0.1, "algorithm.kl_reward_estimator": "low_variance"},
        ),
        ("--eval-prompt-data a b --eval-interval 1 --eval-top-k 1 --eval-temperature 0.6", {"eval.temperature": 0}),
        ("--seed 3", {"run.seed": 3}),
        ("--rollout-seed 4 --seed 3", {"run.seed": 4}),
        ("--eps-clip-c 3", {"algorithm.loss.dual": 3}),
        ("--use-tis --tis-clip 3 --tis-clip-low 0.1", {"algorithm.correction.low": 0.1}),
        ("--lr-decay-style wsd", {"trainer.optimizer.decay": "linear"}),
        ("--deterministic-mode", {"trainer.megatron.deterministic_mode": True}),
        ("--num-rollout 3 --num-epoch 9", {"schedule.steps": 3}),
        ("--gamma 0.9 --lambd 0.9", {"algorithm.advantages.gamma": None, "algorithm.advantages.lam": None}),
        ("--lora-rank 8 --lora-dropout 0.0", {"trainer.lora": {"rank": 8, "alpha": 16}}),
        ("--sglang-expert-parallel-size 2 --rollout-num-gpus-per-engine 2",
         {"rollout.engines.0.expert": 2, "rollout.engines.0.sglang.expert_parallel_size": None}),
        ("--micro-batch-size 2 --rollout-max-response-len 952", {"trainer.max_tokens_per_microbatch": 6000}),
        ("--moe-aux-loss-coeff 1e-3", {"trainer.moe.aux_loss_coef": 1e-3, "trainer.moe.aux_loss_type": "aux_loss"}),
        ("--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type none", {"trainer.moe.aux_loss_coef": None}),
    ],
)  # fmt: skip
def test_defaults_and_combinations_of_slime_are_those_of_its_source(flags, keys):
    settings = accepted(slime(flags))
    assert {key: settings.get(key) for key in keys} == keys


def test_what_slimx_lacks_of_a_script_of_slime_is_named():
    assert "--eps-clip-c" in slime("--advantage-estimator gspo --eps-clip-c 3").left
    assert "--eps-clip-c" in slime("--advantage-estimator cispo --eps-clip-c 3").unneeded
    assert "--kl-loss-type" not in slime("--advantage-estimator ppo --kl-coef 0.1 --kl-loss-type k2").unneeded
    assert "--apply-chat-template" in slime("--apply-chat-template").unneeded
    template = "no --apply-chat-template"
    assert template in slime("").left and template not in slime("--loss-type sft_loss").left
    assert "--lr-decay-style" in slime("--lr-decay-style wsd").left


def test_warm_up_as_a_share_of_unknown_steps_is_to_be_supplied():
    warmup = "trainer.optimizer.warmup_steps"
    assert warmup in slime("--num-epoch 2 --lr-warmup-fraction 0.1").supply
    assert warmup not in slime("--num-rollout 50 --lr-warmup-fraction 0.1").supply
    assert warmup in verl(f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1").supply


def test_the_program_of_slime_is_no_default():
    draft = slime("--rollout-num-gpus 8", "train_async.py")
    draft.text()
    assert "(default)" not in draft.sources["schedule.max_staleness"]


def test_one_step_off_policy_of_verl_is_one_version_behind():
    settings = accepted(verl("algorithm.adv_estimator=grpo", ONE_STEP_OFF))
    assert settings["schedule.max_staleness"] == 1 and settings["algorithm.old_logprobs"] == "rollout"
    assert "schedule.colocate" not in settings and settings["rollout.engines.0.count"] == 4
    recomputed = accepted(verl("algorithm.rollout_correction.bypass_mode=false", ONE_STEP_OFF))
    assert recomputed["algorithm.old_logprobs"] == "recompute"


def test_trainers_and_engines_share_the_nodes_of_verl():
    parts = "trainer.nnodes=2 trainer.n_gpus_per_node=6 rollout.nnodes=2 rollout.n_gpus_per_node=2"
    settings = accepted(verl(f"algorithm.adv_estimator=grpo {parts}", ONE_STEP_OFF))
    assert settings["cluster.nodes"] == 2 and settings["trainer.world_size"] == 12


TAUGHT = "distillation.enabled=True distillation.nnodes=1 distillation.teacher_models.teacher_model.model_path=t"
LOSS = "distillation.distillation_loss"


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (
            f"{TAUGHT} {LOSS}.loss_mode=forward_kl_topk {LOSS}.distillation_loss_coef=0.5",
            {"algorithm.name": "grpo", "algorithm.teacher_top_k": 32, "algorithm.teacher_kl_coef": 0.5,
             "algorithm.teacher_kl": "forward"},
        ),
        (
            f"{TAUGHT} {LOSS}.loss_mode=reverse_kl_topk {LOSS}.use_task_rewards=False {LOSS}.distillation_loss_coef=5",
            {"algorithm.name": "distillation", "algorithm.teacher_kl_coef": 1, "algorithm.teacher_kl": "reverse"},
        ),
        (f"{TAUGHT} {LOSS}.loss_mode=k1", {"algorithm.teacher_coef": 1, "algorithm.teacher_kl_coef": None}),
        (
            "algorithm.adv_estimator=gae critic.optim.weight_decay=0.1 critic.optim.clip_grad=0.3",
            {f"{OPTIMIZER}.lr": 1e-5, f"{OPTIMIZER}.weight_decay": 0.1, f"{OPTIMIZER}.betas": [0.9, 0.999],
             f"{OPTIMIZER}.clip_grad": 0.3},
        ),
        (
            "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token",
            {"algorithm.old_logprobs": "rollout", "algorithm.correction.kind": None},
        ),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size=2 {ACTOR}.use_dynamic_bsz=True "
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            {"trainer.context": 2, "trainer.max_tokens_per_microbatch": 2000},
        ),
        ("algorithm.adv_estimator=gae algorithm.gamma=0.9", {"algorithm.advantages.gamma": 0.9}),
        (f"{ACTOR}.optim.lr=1e-5 {ACTOR}.optim.min_lr_ratio=0.1", {"trainer.optimizer.min_lr": pytest.approx(1e-6)}),
        ("trainer.v1.trainer_mode=separate_async rollout.nnodes=1", {"schedule.max_staleness": 1}),
        ("trainer.v1.trainer_mode=colocate_async", {"schedule.max_staleness": None, "schedule.colocate": True}),
        (f"{ROLLOUT}.max_num_seqs=64", {"rollout.engines.0.sglang.max_running_requests": 64}),
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=512", {"publish.bucket_mib": 512}),
        ("algorithm.adv_estimator=gae trainer.critic_warmup=7", {"critic.warmup_steps": 7}),
        (f"{ACTOR}.use_kl_loss=True", {"algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "low_variance"}),
        ("trainer.total_training_steps=7 trainer.total_epochs=3", {"schedule.steps": 7}),
        (f"{CHANGED}.moe_aux_loss_coeff=1e-3", {"trainer.moe.aux_loss_coef": None}),
        (
            f"{CHANGED}.moe_aux_loss_coeff=1e-3 {CHANGED}.moe_router_load_balancing_type=aux_loss",
            {"trainer.moe.aux_loss_coef": 1e-3, "trainer.moe.aux_loss_type": "aux_loss"},
        ),
        (
            f"algorithm.adv_estimator=grpo {LOSS_MODE}=kl_cov",
            {"algorithm.name": "kl_cov", "algorithm.loss.coef": 0.1, "algorithm.loss.share": 2e-4},
        ),
        (
            f"algorithm.adv_estimator=grpo {LOSS_MODE}=clip_cov {ACTOR}.policy_loss.clip_cov_ub=4",
            {"algorithm.loss.share": 2e-4, "algorithm.loss.covariance_low": 1, "algorithm.loss.covariance_high": 4},
        ),
        (f"algorithm.adv_estimator=gae {LOSS_MODE}=gspo", {"algorithm.name": "ppo", "algorithm.loss.kind": "gspo"}),
        (f"algorithm.adv_estimator=rloo {LOSS_MODE}=gpg", {"algorithm.name": "rloo", "algorithm.loss.kind": "plain"}),
        (f"algorithm.adv_estimator=grpo {LOSS_MODE}=gpg", {"algorithm.name": "grpo", "algorithm.loss.kind": "plain"}),
        (f"algorithm.adv_estimator=gpg {LOSS_MODE}=gpg", {"algorithm.name": "gpg", "algorithm.loss.kind": None}),
        (f"algorithm.adv_estimator=gpg {ACTOR}.clip_ratio_high=0.3",
         {"algorithm.loss.kind": "clip", "algorithm.loss.high": 0.3}),
        (f"algorithm.adv_estimator=opo {ACTOR}.clip_ratio_high=0.3", {"algorithm.loss.high": 0.3}),
        ("algorithm.adv_estimator=grpo_vectorized", {"algorithm.name": "grpo"}),
        ("trainer.logger=['console','tensorboard']", {"track.tensorboard": True}),
        ("+data.apply_chat_template_kwargs={enable_thinking:False,'x':1}",
         {"rollout.template.enable_thinking": False, "rollout.template.x": 1}),
        ("algorithm.gamma=0.9 algorithm.lam=0.9", {"algorithm.advantages.gamma": None}),
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9 algorithm.lam=0.9",
         {"algorithm.advantages.gamma": 0.9, "algorithm.advantages.lam": None}),
        (f"{ACTOR}.optim.optimizer=AdamW", {"trainer.optimizer.kind": "adam"}),
        (f"{CHANGED}.recompute_modules=[moe_act,mlp] {CHANGED}.recompute_granularity=selective",
         {"trainer.recompute.modules": ["moe_act", "mlp"]}),
        ("trainer.default_local_dir=${trainer.project_name}/x", {"run.dir": "verl_examples/x"}),
        (f"+{CHANGED}={{recompute_granularity:full}}", {"trainer.recompute.granularity": "full"}),
    ],
)  # fmt: skip
def test_defaults_and_combinations_of_verl_are_those_of_its_source(keys, settings):
    words = keys if "adv_estimator" in keys else f"algorithm.adv_estimator=grpo {keys}"
    found = accepted(verl(words))
    assert {key: found.get(key) for key in settings} == settings


def test_what_slimx_lacks_of_a_script_of_verl_is_named():
    unit = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"
    assert unit in verl(unit).left and f"{unit}-norm" not in verl(f"{unit}-norm").left
    assert "rollout.filter" in verl("algorithm.filter_groups.enable=True").supply
    weight = "algorithm.rollout_correction.rollout_is=token"
    assert weight in verl(f"algorithm.rollout_correction.bypass_mode=True {weight}").left
    assert "trainer.v1.trainer_mode" in verl("trainer.v1.trainer_mode=colocate_async").left
    assert f"{LOSS}.loss_mode=k3" in verl(TAUGHT).left
    left = verl(
        f"-m --config-name=ppo_trainer $MORE {ACTOR}.loss_agg_mode=token-sum algorithm.kl_ctrl.type=adaptive"
    ).left
    assert {"-m", "$MORE", f"{ACTOR}.loss_agg_mode=token-sum", "algorithm.kl_ctrl.type"} <= left.keys()
    assert (
        "--config-name=ppo_trainer" not in left
        and "algorithm.kl_ctrl.type" in verl("algorithm.kl_ctrl.type=fixed").unneeded
    )


def test_supervised_training_of_verl_has_its_own_defaults():
    settings = accepted(verl("", SFT, "torchrun --nnodes 1"))
    assert (settings["trainer.world_size"], settings["run.dir"]) == (1, "checkpoints/gsm8k-sft/test")


def test_a_pass_over_the_prompts_has_only_whole_steps(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "input": "a"}\n' * 15)
    size = f"data.train_batch_size=4 {ACTOR}.ppo_mini_batch_size=4 trainer.total_epochs=3"
    assert accepted(verl(f"data.train_files={tmp_path}/p.jsonl {size}"))["schedule.steps"] == 9
    flags = f"--prompt-data {tmp_path}/p.jsonl --rollout-batch-size 4 --num-epoch 3"
    assert accepted(slime(flags))["schedule.steps"] == 9


def test_sets_of_a_file_of_slime_have_their_columns(tmp_path):
    (tmp_path / "e.yaml").write_text(
        "eval:\n  defaults: {top_p: 0.7, label_key: a}\n  datasets:\n"
        "  - {name: x, path: x.jsonl, input_key: q, top_k: 3}\n"
    )
    draft = slime(f"--eval-interval 5 --eval-config {tmp_path}/e.yaml")
    assert accepted(draft)["eval.prompts"] == {
        "x": {"path": "x.jsonl", "top_p": 0.7, "fields": {"prompt": "q", "answer": "a"}}
    }
    assert "e.yaml: top_k of x" in draft.left and "--sglang-config" in slime("--sglang-config e.yaml").left


@pytest.mark.parametrize(
    "choice",
    [
        "if nvidia-smi | grep -q H200; then TP=8; else TP=4; fi",
        "TP=4; nvidia-smi | grep -q H200 && TP=8",
        "TP=4; nvidia-smi || TP=8",
        "TP=4; case $(hostname) in a*) TP=8 ;; *) ;; esac",
        "TP=4; case x1 in x[[:digit:]]) TP=8 ;; esac",
        "TP=4; if [[ x1 == @(x1|x2) ]]; then TP=8; fi",
    ],
)
def test_a_condition_that_is_not_known_is_told_with_what_it_decides(tmp_path, choice):
    (tmp_path / "run.sh").write_text(
        f"{choice}\nif true; then A=1; fi\n"
        "python train.py --hf-checkpoint m --prompt-data p --n-samples-per-prompt 2 --tensor-model-parallel-size $TP\n"
    )
    text = CliRunner().invoke(slime_app, [str(tmp_path / "run.sh")], catch_exceptions=False).stdout
    assert yaml.safe_load(text)["trainer"]["tensor"] == 4
    (line,) = [line for line in text.splitlines() if line.startswith("#   conditions ")]
    assert line.endswith(" tensor_model_parallel_size")
