"""Values of a script that need care: 0, nothing, computed ones, and those that the framework reads otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slimx.extras.foreign.commented_yaml import lines_of, loaded, tree_of
from slimx.extras.foreign.scripts.command import slime_app, trl_app, verl_app
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.shell.expansion import COMPUTED, END
from slimx.extras.foreign.scripts.verl_algorithm import names_of
from tests.extras.foreign.script_drafts import ACTOR, ROLLOUT, SFT, accepted, slime, trl, verl
from tests.refusals import refused

OUTPUT = f"{COMPUTED}(nvidia-smi -L){END}"


@pytest.mark.parametrize(
    ("draft", "name", "key"),
    [
        (lambda: slime(f"--actor-num-gpus-per-node '{OUTPUT}'"), "--actor-num-gpus-per-node", "trainer.world_size"),
        (lambda: slime(f"--actor-num-nodes '2{OUTPUT}'"), "--actor-num-nodes", "cluster.nodes"),
        (lambda: slime(f"--lr '{OUTPUT}'"), "--lr", "trainer.optimizer.lr"),
        (lambda: slime(f"--rollout-temperature '{OUTPUT}'"), "--rollout-temperature", "rollout.sampling.temperature"),
        (lambda: verl(f"trainer.nnodes='{OUTPUT}'"), "trainer.nnodes", "trainer.world_size"),
        (lambda: verl("trainer.nnodes='${oc.env:N}'"), "trainer.nnodes", "trainer.world_size"),
        (lambda: trl(f"--num_processes '{OUTPUT}'"), "--num_processes", "rollout.engines.0.count"),
    ],
)
def test_a_computed_number_is_to_be_supplied_where_it_counts(draft, name, key):
    found = draft()
    text, _ = found.text()
    assert key in found.supply[name]
    if key in found.settings:
        (line,) = [line for line in text.splitlines() if line.lstrip("- ").startswith(f"{key.rpartition('.')[2]}: ")]
        assert "supply" in line
    assert COMPUTED not in text and END not in text


@pytest.mark.parametrize(
    ("draft", "key", "marked"),
    [
        (slime(""), "trainer.optimizer.lr", True),
        (slime("--lr 1e-6"), "trainer.optimizer.lr", False),
        (slime("--eps-clip 0.3"), "algorithm.loss.high", False),
        (slime("--actor-num-nodes 2"), "trainer.world_size", False),
        (verl(""), "rollout.max_prompt_tokens", True),
        (verl("data.max_prompt_length=512"), "rollout.max_prompt_tokens", False),
        (trl(""), "trainer.world_size", True),
    ],
)
def test_a_default_is_told_from_a_value_of_the_script(draft, key, marked):
    assert ("(default)" in draft.sources[key]) == marked


def test_an_unknown_part_of_a_text_is_left_out_with_a_note():
    assert "run.dir" in slime(f"--save '{OUTPUT}/x'").supply["--save"]  # not /x
    draft = slime(f"--save 'runs/{OUTPUT}'")
    assert draft.settings["run.dir"] == "runs" and any(OUTPUT[1:-1] in name for name in draft.left)


@pytest.mark.parametrize(
    ("draft", "keys"),
    [
        (slime("--adam-beta1 0 --adam-beta2 0"), {"trainer.optimizer.betas": [0.0, 0.0]}),
        (slime("--lr 0 --weight-decay 0"), {"trainer.optimizer.lr": 0, "trainer.optimizer.weight_decay": 0}),
        (slime("--optimizer-cpu-offload --optimizer-offload-fraction 0"), {"trainer.optimizer.offload_fraction": 0}),
        (slime("--advantage-estimator ppo --value-clip 0 --gamma 0 --lambd 0"),
         {"critic.value_clip": 0, "algorithm.advantages.gamma": 0, "algorithm.advantages.lam": 0}),
        (slime("--use-opsm --opsm-delta 0"), {"algorithm.opsm_delta": 0}),
        (slime("--use-opd --opd-kl-coef 0"), {"algorithm.teacher_coef": 0}),
        (slime("--eps-clip 0.1 --eps-clip-high 0"), {"algorithm.loss.low": 0.1, "algorithm.loss.high": 0}),
        (verl(f"{ACTOR}.optim.lr=0 {ACTOR}.optim.weight_decay=0"), {"trainer.optimizer.lr": 0}),
        (verl("algorithm.adv_estimator=gae critic.cliprange_value=0"), {"critic.value_clip": 0}),
        (verl(f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0"), {"algorithm.kl_coef": None}),
        (verl(f"{ACTOR}.clip_ratio_c=0", ), {"algorithm.loss.dual": 0}),
        (verl(f"{ROLLOUT}.gpu_memory_utilization=0"), {"rollout.engines.0.sglang.mem_fraction_static": 0}),
        (verl("data.val_files=v trainer.test_freq=0"), {"eval.every": None, "eval.prompts": None}),
        (verl("actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.alpha=0"),
         {"trainer.lora": {"rank": 8, "alpha": 0}}),
        (verl("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=1 "
              "reward.reward_kwargs.max_resp_len=2 reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0"),
         {"reward.parts.1.weight": 0}),
        (trl("--adam_beta1 0 --learning_rate 0"), {"trainer.optimizer.betas": [0, 0.999], "trainer.optimizer.lr": 0}),
        (trl("--use_vllm --vllm_importance_sampling_clip_max 0"), {"algorithm.correction.high": 0}),
        (trl("--beta 0 --epsilon 0"), {"algorithm.kl_coef": None, "algorithm.loss.low": 0, "algorithm.loss.high": 0}),
        (trl("--num_train_epochs 0 --max_prompt_length 0"), {"rollout.max_prompt_tokens": 0}),
    ],
)  # fmt: skip
def test_a_zero_is_not_replaced_by_a_default(draft, keys):
    assert {key: draft.settings.get(key) for key in keys} == keys


def test_only_flags_of_the_script_are_said_to_need_no_key():
    assert set(slime("").unneeded) == set(verl("").unneeded) == set(trl("").unneeded) == set()
    assert "--expert-tensor-parallel-size" in slime("--expert-tensor-parallel-size 1").unneeded
    assert set(slime("--kl-loss-type k1").unneeded) == {"--kl-loss-type"}


@pytest.mark.parametrize("value", ["", "null", "None", "False", "0"])
def test_a_flag_without_a_value_is_off_in_verl(value):
    assert "algorithm.reference" not in verl(f"{ACTOR}.use_kl_loss={value}").settings


def test_a_flag_that_depends_on_an_unset_variable_is_refused(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m {ACTOR}.use_kl_loss=$KL\n")
    with refused("foreign.variable", about="KL"):
        CliRunner().invoke(verl_app, [str(script)], catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize("name", ["run.sh", "models.sh", "grpo.py", "grpo.yaml"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("source models.sh\npython grpo.py --config grpo.yaml")
    Path(name).write_bytes(b"# mod\xe8l\noutput_dir: a\n")
    with refused("foreign.not_utf8", about=name):
        CliRunner().invoke(trl_app, ["run.sh"], catch_exceptions=False, standalone_mode=False)


def test_arguments_of_a_script_are_given_by_number(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('f() { echo "$2"; }\nN=$2; shift\npython train.py --hf-checkpoint m --save $N/$2$(f) "$@"\n')
    with refused("foreign.variable", about="2"):
        CliRunner().invoke(slime_app, [str(script), "1=x"], catch_exceptions=False, standalone_mode=False)
    words = [str(script), "10=y", "1=x", "2=runs", "3=--lr", "4=3e-6"]
    found = yaml.safe_load(CliRunner().invoke(slime_app, words, catch_exceptions=False).stdout)
    assert (found["run"]["dir"], found["trainer"]["optimizer"]["lr"]) == ("runs/--lr", 3e-6)


def test_a_file_of_a_script_that_is_not_here_is_told(tmp_path):
    (tmp_path / "run.sh").write_text("source models/tiny.sh\n. $HOME/.nothing\npython train.py --hf-checkpoint m\n")
    text = CliRunner().invoke(slime_app, [str(tmp_path / "run.sh")], catch_exceptions=False).stdout
    told = [line.partition(": ")[0] for line in text.splitlines() if line.startswith(("#   source", "#   ."))]
    assert told == ["#   source models/tiny.sh", "#   . ~/.nothing"]


@pytest.mark.parametrize(
    ("draft", "name"),
    [
        (lambda: trl("--nproc_per_node gpu"), "--nproc_per_node"),
        (lambda: verl("", SFT, "torchrun --nproc_per_node=auto --nnodes 1:4 -m"), "nproc_per_node"),
        (lambda: verl("", SFT, "torchrun --nproc-per-node cpu -m"), "nproc_per_node"),
    ],
)
def test_all_processors_of_a_node_are_to_be_counted(draft, name):
    found = draft()
    assert accepted(found)["trainer.world_size"] == 8 and "trainer.world_size" in found.supply[name]


HOSTILE = ["a: b", "a # b", "*a", "&a b", "- a", "line\nbreak: 1", "\u2028a", "{a: b", "'", '"\\', "yes", "1e-6", ""]


@pytest.mark.parametrize("value", HOSTILE)
def test_any_text_is_the_same_after_it_was_written_as_yaml(value):
    tree = tree_of({"a.b": value, "a.c.0.d": [value], "a.c.1.d": {value: value}, f"x{value}": 1})
    text = "\n".join(lines_of(tree, {"a.b": value, "a.c.0.d": f"x {value}", "a.c.1.d": "", "y": value}))
    assert yaml.safe_load(text) == tree


@pytest.mark.parametrize("value", [value for value in HOSTILE if value])
def test_values_of_a_script_cannot_change_the_configuration(value):
    draft = Draft(f"run {value}.sh")
    draft.put("run.name", value, f"--save {value}")
    draft.put("model.path", value, "")
    draft.left[value] = draft.unneeded[value] = draft.supply[value] = draft.supply["run.name"] = value
    assert yaml.safe_load(draft.text()[0]) == {"run": {"name": value}, "model": {"path": value}}


def test_words_of_a_list_and_in_a_mapping_are_quoted():
    settings = slime("--rm-type 'a, b: c # d' --sglang-log-requests-target 'x, y' 'z: 1' --wandb-group 'k: v'").settings
    assert settings["reward.options"] == {"rm_type": "a, b: c # d"}
    assert settings["rollout.engines.0.sglang.log_requests_target"] == ["x, y", "z: 1"]


def test_errors_of_a_configuration_name_the_file_that_the_user_sees():
    with refused("config.value") as caught:
        loaded("model: {path: m}\nrun: {name: a, dir: b, seed: x}\n", "mine.yaml")
    assert str(caught.value).startswith("mine.yaml")


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [("", 16), ("--rollout-num-gpus 8", 8), ("--rollout-num-gpus 16", 16), ("--rollout-num-gpus 32", 16)],
)
def test_colocated_engines_of_slime_use_at_most_the_gpus_of_trainers(flags, gpus):
    draft = slime(f"--colocate --actor-num-nodes 2 --rollout-num-gpus-per-engine 2 {flags}")
    settings = accepted(draft)
    assert settings["rollout.engines.0.count"] == gpus // 2 and settings["cluster.nodes"] == 2
    assert ("--rollout-num-gpus 32" in draft.left) == flags.endswith("32")


def test_slime_evaluates_nothing_without_an_interval():
    draft = slime("--eval-prompt-data aime a.jsonl --eval-temperature 0.6")
    assert "eval.prompts" not in draft.settings and set(draft.unneeded) == {"--eval-prompt-data", "--eval-temperature"}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x.parquet", "a/y.parquet"], ["x", "y"]),
        (["a/train.parquet", "b/train.parquet"], ["a", "b"]),
        (["1/a/train.parquet", "2/a/train.parquet", "2/a/x.parquet"], ["train-1", "train-2", "x-3"]),
    ],
)
def test_each_file_of_verl_has_a_name_of_its_own(paths, names):
    assert names_of(paths) == dict(zip(names, paths, strict=True))


def test_an_interpolation_of_hydra_has_the_value_of_the_other_key():
    draft = verl(
        "data.max_response_length=77 data.max_prompt_length='${data.max_response_length}' "
        "trainer.experiment_name='x-${trainer.project_name}' trainer.project_name='${data.max_prompt_length}'"
    )
    settings = accepted(draft)
    assert settings["rollout.max_prompt_tokens"] == 77 and settings["run.name"] == "x-77"
    cyclic = verl(
        "data.max_prompt_length='${data.max_response_length}' data.max_response_length='${data.max_prompt_length}'"
    )
    assert {"data.max_prompt_length", "data.max_response_length"} <= cyclic.supply.keys()


def test_a_file_of_settings_is_read_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--config-path=conf --config-name mine data.max_prompt_length=9"
    assert "--config-name mine" in verl(words).supply
    Path("conf").mkdir()
    Path("conf/mine.yaml").write_text(
        "defaults: [ppo_trainer]\ndata: {max_prompt_length: 3, max_response_length: 4}\ntrainer: {logger: [wandb]}\n"
    )
    settings = accepted(verl(words))
    assert settings["rollout.max_prompt_tokens"] == 9 and settings["rollout.sampling.max_new_tokens"] == 4
    assert settings["track.wandb"] is True
    assert (
        verl("--config-path=config --config-name='ppo_megatron_trainer.yaml'").supply.keys() == verl("").supply.keys()
    )


def test_a_fully_asynchronous_script_of_verl_has_its_defaults():
    program = "verl.experimental.fully_async_policy.fully_async_main"
    settings = accepted(verl(f"{ACTOR}.ppo_mini_batch_size=4", program))
    assert (settings["schedule.max_staleness"], settings["rollout.partial"], settings["cluster.nodes"]) == (1, True, 2)
    assert (settings["rollout.prompts_per_step"], settings["schedule.steps"]) == (16, 6)
    assert settings["algorithm.old_logprobs"] == "rollout"


@pytest.mark.parametrize("size", ["--nproc_per_node 4", "--nproc-per-node=4"])
def test_ranks_of_torchrun_are_read_with_a_space_or_a_sign(size):
    settings = accepted(verl("", SFT, f"torchrun --standalone --nnodes 2 {size} -m"))
    assert settings["trainer.world_size"] == 8 and settings["cluster.gpus_per_node"] == 4
    assert settings["trainer.optimizer.lr"] == 1e-3


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("--loss_type cispo --epsilon_high 5", {"algorithm.loss.low": 1.0, "algorithm.loss.high": 4.0}),
        ("--loss_type cispo --epsilon_high 0.28", {"algorithm.loss.high": None}),
        ("--loss_type cispo", {"algorithm.loss.low": 1.0, "algorithm.loss.high": None}),
        ("--scale_rewards batch", {"algorithm.name": "grpo", "algorithm.advantages.normalize_std": False}),
        ("--scale_rewards batch --loss_type cispo --epsilon_high 5", {"algorithm.name": "cispo"}),
        ("--scale_rewards False", {"algorithm.advantages.normalize_std": False}),
        ("--loss_type sapo --sapo_temperature_neg 1.2", {"algorithm.name": "sapo", "algorithm.loss.tau_negative": 1.2}),
        ("--trainer rloo", {"rollout.group_size": 2, "algorithm.kl_coef": None, "algorithm.aggregation": "constant"}),
    ],
)
def test_objectives_of_trl_are_those_of_its_source(flags, keys):
    settings = accepted(trl(flags))
    assert {key: settings.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("flags", "prompts"),
    [
        ("--dataset_name o/n", "hf://o/n"),
        ("--dataset_name o/n --dataset_train_split train", "hf://o/n"),
        ("--dataset_name o/n --dataset_train_split test", "hf://o/n/default/test"),
        ("--dataset_name o/n/main", "hf://o/n/main/train"),
        ("--dataset_name o/n --dataset_config main --dataset_train_split 'train[:9]'", "hf://o/n/main/train"),
        ("--dataset_name json", "json"),
    ],
)
def test_a_data_set_of_the_hub_has_its_subset_and_split(flags, prompts):
    draft = trl(flags)
    assert draft.settings["rollout.prompts"] == prompts
    assert ("split train[:9]" in draft.left) == ("[" in flags) and ("rollout.prompts" in draft.supply) == (
        "/" not in flags
    )


def test_what_slimx_has_not_of_an_objective_of_trl_is_named():
    assert "algorithm.loss.high" in trl("--loss_type cispo").supply
    assert "--scale_rewards batch" in trl("--scale_rewards batch").left
    assert any("--beta" in name for name in trl("--trainer rloo").left)
    assert not any("--beta" in name for name in trl("--trainer rloo --beta 0").left)


@pytest.mark.parametrize(
    ("name", "text", "about"),
    [
        ("run.sh", "trl kto --model_name_or_path m\n", "kto"),
        ("run.sh", "accelerate launch examples/scripts/kto.py --model_name_or_path m\n", "kto"),
        ("a.py", "from trl import PPOConfig, PPOTrainer\nPPOTrainer(args=PPOConfig(output_dir='x'))\n", "PPOConfig"),
        ("a.py", "import trl\ntrl.KTOTrainer(args=trl.KTOConfig(output_dir='x'))\n", "KTOConfig"),
        ("a.yaml", "trainer: gkd\noutput_dir: x\n", "gkd"),
    ],
)
def test_a_trainer_of_trl_that_slimx_does_not_have_is_refused(tmp_path, name, text, about):
    (tmp_path / name).write_text(text)
    with refused("foreign.trainer", about=about):
        CliRunner().invoke(trl_app, [str(tmp_path / name)], catch_exceptions=False, standalone_mode=False)


def test_an_unnamed_trainer_of_trl_is_to_be_supplied(tmp_path):
    (tmp_path / "run.sh").write_text("accelerate launch mine.py --model_name_or_path m\n")
    result = CliRunner().invoke(trl_app, [str(tmp_path / "run.sh")], catch_exceptions=False)
    assert any(line.startswith("#   algorithm.name: ") for line in result.stdout.splitlines())


def test_arguments_that_a_python_file_computes_are_to_be_supplied(tmp_path):
    (tmp_path / "grpo.py").write_text("""
from trl import GRPOConfig, GRPOTrainer
from mine import rate, graded
more = {"beta": 0.1}
args = GRPOConfig(output_dir=f"out/{name}", learning_rate=rate(3), num_generations=4, **more)
GRPOTrainer(model="o/m", args=args, reward_funcs=[graded, partial(graded, 2)], train_dataset=load_dataset(where))
""")
    result = CliRunner().invoke(trl_app, [str(tmp_path / "grpo.py")], catch_exceptions=False)
    head = result.stdout.partition("\nrun:")[0]
    for name in ("--learning_rate", "--output_dir", "--reward_funcs", "--dataset_name"):
        assert f"#   {name}: " in head, name
    assert "more" in result.stdout and yaml.safe_load(result.stdout)["rollout"]["group_size"] == 4


def test_numbers_of_slime_from_commands_are_supplied_through_the_command(tmp_path):
    (tmp_path / "run.sh").write_text(
        "N=$(nvidia-smi -L | wc -l)\npython train.py --hf-checkpoint m --prompt-data p --actor-num-gpus-per-node $N\n"
    )
    result = CliRunner().invoke(slime_app, [str(tmp_path / "run.sh")], catch_exceptions=False)
    assert "#   --actor-num-gpus-per-node: " in result.stdout


@pytest.mark.parametrize(
    "value",
    [
        "{" * 2000,
        "{a: &a {x: 1}" + "".join(f", b{i}: &b{i} {{p: *a, q: *a}}" for i in range(40)) + "}",
        "{a: b}:c",
    ],
)
def test_a_mapping_that_hydra_does_not_know_stays_a_text(value):
    draft = verl(f"+algorithm.x='{value}'")
    assert f"algorithm.x {value}" in draft.left
