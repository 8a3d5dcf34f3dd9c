"""Configuration from a launch command, a Python file or a YAML file of TRL."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from slimx.extras.foreign.scripts.draft import Draft, joined
from slimx.extras.foreign.scripts.names import Names, whole
from slimx.extras.foreign.scripts.python_file import arguments_in
from slimx.extras.foreign.scripts.shared import PROMPT_TOKENS, put_epochs, put_ranks, put_tokens, put_transport
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of
from slimx.extras.foreign.scripts.translate import put_outputs, sets_key, translate
from slimx.extras.foreign.trl import TRL

_TRAINERS = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "reward": "RewardConfig",
}
"""Classes of settings by the name of their command, which is also the start of the names of TRL's example scripts."""
_NAMES = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RewardConfig": "bradley_terry",
}
"""Algorithms of slimx by class of settings."""
_RATES = {"SFTConfig": 2e-5, "RewardConfig": 1e-4}
"""Default learning rates, where they are not 1e-6."""
_DEFAULT = "TRL's default"


def is_program(word: str) -> bool:
    """Returns True if `word` can be the program of a launch command of TRL: `trl`, or a Python file."""
    return word == "trl" or (word.endswith(".py") and not word.startswith("-"))


def launch_values(launch: Launch) -> dict[str, list[str]]:
    """Returns the values of a launch command by name, with those of its Python file and of `--config` if they are
    here."""
    values: dict[str, list[str]] = {}
    arguments = list(launch.arguments)
    if launch.program == "trl" and arguments:
        values["trainer"] = [_TRAINERS.get(arguments.pop(0), "GRPOConfig")]
    elif Path(launch.program).is_file():
        values |= arguments_in(Path(launch.program), Path(launch.program).read_text())
    before = flags_of(launch.before)
    flags = flags_of(arguments)
    config = flags.pop("config", [])
    for path in [*config, *before.get("config_file", [])]:
        if Path(path).is_file():
            values |= yaml_values(Path(path).read_text())
    for name in ("num_processes", "num_machines"):
        if name in before:
            values[name] = before[name]
    stem = Path(launch.program).stem
    kind = next((kind for name, kind in _TRAINERS.items() if stem.startswith(name) or stem == f"g{name[1:]}"), None)
    if kind is not None and "trainer" not in values:
        values["trainer"] = [kind]
    return values | flags


def yaml_values(text: str) -> dict[str, list[str]]:
    """Returns the values of a YAML file of TRL or accelerate by name, as words of a command line."""
    values = {}
    content = yaml.safe_load(text)
    for name, value in (content if isinstance(content, dict) else {}).items():
        values[name] = [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    return values


def read_trl(values: dict[str, list[str]], draft: Draft) -> None:
    """Adds what `values`, words by name, mean to `draft`. Raises SlimxError for a value that is no number."""
    names = Names(draft.origin.partition(" ")[0], values, lambda name: f"--{name}")
    trainer = names.text("trainer") or "GRPOConfig"
    trainer = _TRAINERS.get(trainer, trainer)
    name = _NAMES.get(trainer, "grpo")
    sampled = name in ("grpo", "rloo")
    _model(names, draft)
    _prompts(names, draft)
    _placement(names, draft, sampled=sampled)
    _batches(names, draft, sampled=sampled)
    _optimizer(names, draft, trainer)
    draft.put("algorithm.name", name, trainer)
    if sampled:
        _objective(names, draft, name)
        _reward(names, draft)
    else:
        _learned_from_data(names, draft, name)
    for rest in names.rest():
        words = list(values[rest])
        if sets_key((TRL,), rest):
            words = [names.known(rest, word) for word in words]
        translate(draft, (TRL,), rest, joined(words) if words else None, names.shown(rest))
    put_outputs(draft, names)
    put_transport(draft, colocate=bool(draft.get("schedule.colocate")))


def _model(names: Names, draft: Draft) -> None:
    path = names.text("model_name_or_path")
    draft.put("model.path", path or "MODEL", "--model_name_or_path")
    if path is None or not Path(path).expanduser().exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        draft.supply["model.path"] = f"the directory to which you download {path or 'the model'}"
    folder = names.text("output_dir") or "runs/trl"
    draft.put("run.dir", folder, "--output_dir")
    draft.put("run.name", names.text("run_name") or Path(folder).name, "--run_name")


def _prompts(names: Names, draft: Draft) -> None:
    dataset = names.text("dataset_name")
    if dataset is None:
        draft.put("rollout.prompts", "PROMPTS", "")
        draft.supply["rollout.prompts"] = "file of prompts, or hf://OWNER/NAME"
    else:
        local = Path(dataset).expanduser().exists()
        draft.put("rollout.prompts", dataset if local else f"hf://{dataset}", "--dataset_name")
        split = (names.text("dataset_train_split") or "").partition("[")[0]
        if split and not local:
            draft.put("rollout.prompts", f"hf://{dataset}/{split}" if "/" in dataset else dataset, "--dataset_name")
    draft.put("rollout.fields.prompt", "prompt", "TRL's column")
    draft.supply["rollout.fields"] = "the columns of the data set, if code of the script maps its rows"
    limit = names.text("max_prompt_length")
    source = "--max_prompt_length" if limit else "TRL has no limit; raise it for longer prompts"
    draft.put("rollout.max_prompt_tokens", int(limit or PROMPT_TOKENS), source)


def _placement(names: Names, draft: Draft, *, sampled: bool) -> None:
    processes = names.count("num_processes", 1)
    names.count("num_machines", 1)
    mode = names.text("vllm_mode") or "colocate"
    tensor = names.count("vllm_tensor_parallel_size", 1)
    apart = mode == "server" and sampled
    put_ranks(draft, processes, tensor if apart else 0, 8, "--num_processes")
    if not sampled:
        return
    names.words("use_vllm")
    count = 1 if apart else max(1, processes // tensor)
    draft.put("rollout.engines.0.count", count, "--num_processes / --vllm_tensor_parallel_size")
    draft.put("rollout.engines.0.tensor", tensor, "--vllm_tensor_parallel_size")
    share = names.number("vllm_gpu_memory_utilization")
    source = f"--vllm_gpu_memory_utilization; {_DEFAULT}: 0.3"
    draft.put("rollout.engines.0.sglang.mem_fraction_static", 0.3 if share is None else share, source)
    if not apart:
        draft.put("schedule.colocate", True, "--vllm_mode colocate")


def _batches(names: Names, draft: Draft, *, sampled: bool) -> None:
    devices = names.count("num_processes", 1)
    size = names.count("per_device_train_batch_size", 8)
    steps = names.count("gradient_accumulation_steps", 1)
    group = names.count("num_generations", 8) if sampled else 1
    generated = names.number("generation_batch_size")
    per_generation = names.number("steps_per_generation")
    update = devices * size * steps
    total = generated or devices * size * (per_generation or steps)
    prompts = total / group
    source = f"{devices} devices x {size} x {steps} accumulation steps / {group} generations"
    if prompts < 1 or prompts != int(prompts):
        draft.left["--per_device_train_batch_size"] = (
            f"a step has {total:g} completions, which are no whole groups of {group}; one group is set"
        )
    draft.put("rollout.prompts_per_step", max(1, int(prompts)), source)
    draft.put("rollout.group_size", group, f"--num_generations; {_DEFAULT}: 8" if sampled else "an answer per prompt")
    updates = total / update
    if updates > 1 and updates == int(updates):
        draft.put("schedule.updates_per_step", int(updates), "--steps_per_generation / --gradient_accumulation_steps")
    longest = names.count("max_completion_length", 512)
    if sampled:
        draft.put("rollout.sampling.max_new_tokens", longest, f"--max_completion_length; {_DEFAULT}: 512")
    put_tokens(draft, size * (draft_tokens(draft)), "--per_device_train_batch_size x the longest rollout")
    limit = names.number("max_steps")
    if limit is not None and limit > 0:
        draft.put("schedule.steps", int(limit), "--max_steps")
        names.words("num_train_epochs")
    else:
        epochs = names.number("num_train_epochs")
        file = str(draft.get("rollout.prompts"))
        put_epochs(draft, 3 if epochs is None else epochs, file, max(1, int(prompts)), "--num_train_epochs")
    warmup = names.number("warmup_ratio")
    if warmup:
        total_steps = int(str(draft.get("schedule.steps"))) * int(str(draft.get("schedule.updates_per_step", 1)))
        draft.put(
            "trainer.optimizer.warmup_steps", int(warmup * total_steps), f"{warmup:g} of all updates (--warmup_ratio)"
        )


def draft_tokens(draft: Draft) -> int:
    """Returns the tokens of the longest rollout of `draft`, including the prompt."""
    keys = ("rollout.max_prompt_tokens", "rollout.sampling.max_new_tokens")
    return sum(int(str(draft.get(key, 0))) for key in keys)


def _optimizer(names: Names, draft: Draft, trainer: str) -> None:
    rate = names.number("learning_rate")
    default = _RATES.get(trainer, 1e-6)
    draft.put("trainer.optimizer.lr", default if rate is None else rate, f"--learning_rate; {_DEFAULT}: {default:g}")
    betas = [names.number("adam_beta1") or 0.9, names.number("adam_beta2") or 0.999]
    draft.put("trainer.optimizer.betas", betas, "--adam_beta1, --adam_beta2")
    if names.text("lr_scheduler_type") is None:
        draft.put("trainer.optimizer.decay", "linear", _DEFAULT)
    else:
        translate(draft, (TRL,), "lr_scheduler_type", names.text("lr_scheduler_type"), "--lr_scheduler_type")
    for name in ("bf16", "fp16"):
        if names.words(name) is not None:
            draft.unneeded[f"--{name}"] = "numerics.dtype is bfloat16 by default"
    if names.has("use_peft"):
        rank, alpha = names.count("lora_r", 16), names.count("lora_alpha", 32)
        draft.put("trainer.lora", {"rank": rank, "alpha": alpha}, "--use_peft, --lora_r, --lora_alpha")
        modules = names.words("lora_target_modules")
        if modules:
            draft.left["--lora_target_modules"] = (
                "set trainer.lora.targets: attention, mlp, shared_experts, experts, router"
            )


def _objective(names: Names, draft: Draft, name: str) -> None:
    put = draft.put
    kind = names.text("loss_type") or "dapo"
    low = names.number("epsilon")
    high = names.number("epsilon_high")
    level = names.text("importance_sampling_level") or "token"
    if name == "grpo" and kind in ("cispo", "sapo"):
        put("algorithm.name", kind, "--loss_type")
    elif name == "grpo" and level == "sequence":
        put("algorithm.name", "gspo", "--importance_sampling_level sequence")
    if kind != "sapo":
        put("algorithm.loss.low", 0.2 if low is None else low, f"--epsilon; {_DEFAULT}: 0.2")
        put("algorithm.loss.high", draft.get("algorithm.loss.low") if high is None else high, "--epsilon_high")
    units = {"grpo": "sample", "dr_grpo": "constant", "sapo": "sample"}
    put("algorithm.aggregation", units.get(kind, "token"), f"--loss_type {kind}")
    if kind not in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo"):
        draft.left[f"--loss_type {kind}"] = "write this loss as a hook (algorithm.loss)"
    beta = names.number("beta")
    if beta:
        put("algorithm.reference", True, "--beta")
        put("algorithm.kl_coef", whole(beta), "--beta")
        put("algorithm.kl_estimator", "k3", "TRL's estimator")
    scale = (names.text("scale_rewards") or "group").lower()
    if name == "grpo" and scale in ("none", "false"):
        put("algorithm.advantages.normalize_std", False, "--scale_rewards")
    elif scale == "batch":
        put("algorithm.name", "reinforce_pp_baseline", "--scale_rewards batch")
    put("algorithm.old_logprobs", "recompute", f"{_DEFAULT}: the trainer's")
    correction = names.text("vllm_importance_sampling_correction")
    mode = names.text("vllm_importance_sampling_mode") or "sequence_mask"
    bounds = [names.number(f"vllm_importance_sampling_{name}") for name in ("clip_max", "cap", "clip_min")]
    if names.has("use_vllm") and (correction is None or correction.lower() == "true"):
        put(
            "algorithm.correction.kind", "icepop" if mode.endswith("mask") else "truncate", f"vLLM's correction: {mode}"
        )
        put("algorithm.correction.level", mode.partition("_")[0], f"vLLM's correction: {mode}")
        put("algorithm.correction.high", whole(bounds[0] or bounds[1] or 3.0), "--vllm_importance_sampling_clip_max")
        if bounds[2]:
            put("algorithm.correction.low", whole(bounds[2]), "--vllm_importance_sampling_clip_min")


def _reward(names: Names, draft: Draft) -> None:
    functions = list(names.words("reward_funcs") or [])
    weights: Sequence[str] = names.words("reward_weights") or []
    if not functions:
        draft.put("reward.function", "math", "")
        draft.supply["reward.function"] = "the reward; the script names none"
        return
    draft.supply["reward"] = (
        "functions of TRL score a batch; the wrapper in docs/guides/coming-from.md calls one with a batch of one"
    )
    if len(functions) == 1:
        draft.put("reward.function", "trl_reward.reward", f"calls {functions[0]}")
        return
    for index, function in enumerate(functions):
        name = function.rpartition(".")[2]
        draft.put(f"reward.parts.{index}.name", name, "--reward_funcs")
        draft.put(f"reward.parts.{index}.function", f"trl_reward.{name}", f"calls {function}")
        with contextlib.suppress(IndexError, ValueError):
            draft.put(f"reward.parts.{index}.weight", whole(float(weights[index])), "--reward_weights")


def _learned_from_data(names: Names, draft: Draft, name: str) -> None:
    """Sets what training on demonstrations or preferences has instead of rollouts."""
    longest = names.count("max_length", 1024)
    draft.put("rollout.max_prompt_tokens", longest, f"--max_length; {_DEFAULT}: 1024")
    put_tokens(draft, longest * names.count("per_device_train_batch_size", 8), "--per_device_train_batch_size")
    hook = "demonstrations" if name == "sft" else "preferences"
    draft.put("rollout.generate", hook, "the data set has the answers")
    draft.put("rollout.engines", [], "nothing is sampled")
    draft.put("reward.function", None, "the data set has the answers")
    if name != "sft":
        draft.put("rollout.group_size", 2, "a pair: the chosen and the rejected answer")
        draft.put("rollout.fields.answer", "chosen", "TRL's column")
        draft.put("rollout.fields.rejected", "rejected", "TRL's column")
    else:
        draft.put("rollout.fields.answer", "completion", "TRL's column")
    if name == "dpo":
        draft.put("algorithm.reference", True, "DPO compares with the initial weights")
