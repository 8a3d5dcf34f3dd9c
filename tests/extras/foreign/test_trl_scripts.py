"""Launches, updates, rewards and adapters of TRL become the keys that they mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slimx.extras.foreign.scripts.command import trl_app
from tests.extras.foreign.script_drafts import accepted, trl

BATCH = "--steps_per_generation 8 --gradient_accumulation_steps 2"  # 4 updates of TRL per step


def written(folder: Path, name: str, text: str) -> tuple[dict, list[str]]:
    """Returns the configuration that from-trl writes for a script, and the names that are to be supplied."""
    (folder / name).write_text(text)
    result = CliRunner().invoke(trl_app, [str(folder / name)], catch_exceptions=False)
    supply = result.stdout.partition("# You must still supply:\n")[2].partition("\nrun:")[0]
    names = [line[4:].partition(": ")[0] for line in supply.splitlines() if not line.startswith("#     ")]
    return yaml.safe_load(result.stdout), names


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (f"--max_steps 40 {BATCH}", {"schedule.steps": 10, "schedule.updates_per_step": 4}),
        (f"--max_steps 40 --save_steps 20 {BATCH}", {"checkpoint.every": 5}),
        (f"--max_steps 40 --save_steps 0.5 {BATCH}", {"checkpoint.every": 5}),
        (f"--max_steps 40 --warmup_ratio 0.1 {BATCH}", {"trainer.optimizer.warmup_steps": 4}),
        ("--max_steps 40 --warmup_steps 0 --warmup_ratio 0.1", {"trainer.optimizer.warmup_steps": 4}),
        ("--save_steps 20 --save_strategy epoch", {"checkpoint.every": None}),
        ("--report_to wandb tensorboard x", {"track.wandb": True, "track.tensorboard": True}),
        ("--top_k None --min_p None", {"rollout.sampling.top_k": None}),
        ("--top_k 0", {"rollout.sampling.top_k": -1}),
        ("--use_vllm no", {"algorithm.correction.kind": None}),
        ("--max_steps 40 --num_iterations 2", {"schedule.steps": 20, "schedule.updates_per_step": None}),
        (
            "--max_steps 40 --steps_per_generation 1 --gradient_accumulation_steps 4 --num_generations 8",
            {"schedule.steps": 40, "rollout.prompts_per_step": 4, "schedule.updates_per_step": None},
        ),
        ("--trainer dpo --beta 0.3", {"algorithm.advantages.beta": 0.3, "algorithm.kl_coef": None}),
        ("--trainer dpo", {"algorithm.advantages.beta": 0.1}),
        ("--weight_decay 0.1 --seed 3", {"trainer.optimizer.weight_decay": 0.1, "run.seed": 3}),
        ("--data_seed 4 --seed 3", {"run.seed": 4}),
        ("--reward_funcs mine.right", {"reward.function": "trl:mine.right"}),
        ("--reward_funcs accuracy_reward", {"reward.function": "trl:trl.rewards.accuracy_reward"}),
        ("--reward_funcs a.x b.y", {"reward.parts.1.name": "y", "reward.parts.1.function": "trl:b.y"}),
        ("--lr_scheduler_type cosine", {"trainer.optimizer.decay": "cosine"}),
        ("--learning_rate 1e-5", {"trainer.optimizer.decay": "linear"}),
        ("--nproc_per_node 4 --nnodes 2", {"trainer.world_size": 8, "rollout.engines.0.count": 8}),
    ],
)
def test_units_and_defaults_of_trl_are_those_of_its_source(flags, keys):
    settings = accepted(trl(flags))
    assert {key: settings.get(key) for key in keys} == keys


def test_what_slimx_lacks_of_a_script_of_trl_is_named():
    draft = trl(f"--max_steps 40 --eval_steps 20 {BATCH}")
    assert "eval.every" not in draft.settings
    assert ["eval.prompts" in note and note.endswith(" 5") for name, note in draft.left.items() if "eval" in name] == [
        True
    ]
    assert "--num_generations_eval" in trl("--num_generations_eval 4").left
    assert "--num_iterations 2" in trl("--num_iterations 2").left
    assert "trainer.world_size" in trl("").supply and "trainer.world_size" not in trl("--num_processes 2").supply
    assert "reward" not in trl("--reward_funcs mine.right").supply
    assert "accuracy_reward" in trl("--reward_funcs accuracy_reward").supply["reward"]
    assert "o/judge" in trl("--reward_funcs o/judge").supply["reward"]


@pytest.mark.parametrize(
    ("launch", "gpus"),
    [
        ("torchrun --nproc_per_node 8", 8),
        ("torchrun --nnodes=2 --nproc-per-node=4", 8),
        ("accelerate launch --num_processes 16 --num_machines 2", 16),
    ],
)
def test_processes_of_a_launcher_are_ranks(tmp_path, launch, gpus):
    config, supply = written(tmp_path, "run.sh", f"{launch} grpo.py --model_name_or_path m --dataset_name p\n")
    assert config["trainer"]["world_size"] == gpus and "trainer.world_size" not in supply


def test_a_file_of_settings_that_is_missing_is_to_be_supplied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "accelerate launch --config_file zero2.yaml grpo.py --config recipe.yaml --model_name_or_path m\n"
    _, supply = written(tmp_path, "run.sh", command)
    assert {"--config recipe.yaml", "--config_file zero2.yaml"} <= {*supply}
    Path("recipe.yaml").write_text("num_generations: 4\n")
    Path("zero2.yaml").write_text("num_processes: 2\n")
    config, supply = written(tmp_path, "run.sh", command)
    assert not any("yaml" in name for name in supply)
    assert (config["rollout"]["group_size"], config["trainer"]["world_size"]) == (4, 2)


def test_a_mapping_in_a_file_of_settings_is_kept(tmp_path):
    text = "trainer: grpo\nmodel_name_or_path: m\nchat_template_kwargs: {a: false, b: null, c: [1, {d: x}]}\n"
    template = {"a": False, "b": None, "c": [1, {"d": "x"}]}
    assert written(tmp_path, "a.yaml", text)[0]["rollout"]["template"] == template
    text = f"from trl import GRPOConfig\nGRPOConfig('o', chat_template_kwargs={template})\n"
    assert written(tmp_path, "a.py", text)[0]["rollout"]["template"] == template


def test_a_file_of_settings_that_the_script_writes_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "cat > r.yaml <<EOF\nnum_generations: $N\nmodel_name_or_path: m\nEOF\ntrl grpo --config r.yaml\n"
    config, supply = written(tmp_path, "run.sh", f"N=4\n{text}")
    assert config["rollout"]["group_size"] == 4 and "--config r.yaml" not in supply


PROGRAM = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from rewards import right
{more}
GRPOTrainer(
    model="m", args=GRPOConfig(output_dir="o"), reward_funcs={reward}, peft_config={adapters}, train_dataset=data
)
"""


@pytest.mark.parametrize(
    ("adapters", "lora"),
    [("LoraConfig(r=4, lora_alpha=12)", {"rank": 4, "alpha": 12}), ("LoraConfig()", {"rank": 8, "alpha": 8})],
)
def test_adapters_of_a_python_file_are_read(tmp_path, adapters, lora):
    config, _ = written(tmp_path, "a.py", PROGRAM.format(more="", reward="right", adapters=adapters))
    assert config["trainer"]["lora"] == lora and config["reward"]["function"] == "trl:rewards.right"
    config, _ = written(tmp_path, "a.py", PROGRAM.format(more=f"x = {adapters}", reward="right", adapters="x"))
    assert config["trainer"]["lora"] == lora


def test_adapters_and_rewards_that_need_a_hand_are_to_be_supplied(tmp_path):
    more = "def mine(completions): ..."
    config, supply = written(tmp_path, "a.py", PROGRAM.format(more=more, reward="mine", adapters="made()"))
    assert {"reward", "--peft_config"} <= {*supply} and config["reward"]["function"] == "trl:a.mine"
    config, supply = written(tmp_path, "a.py", PROGRAM.format(more="", reward="'o/judge'", adapters="None"))
    assert "reward" in supply and "lora" not in config["trainer"]
