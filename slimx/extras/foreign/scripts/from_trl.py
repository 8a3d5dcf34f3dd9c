"""Configuration from a launch command, a Python file or a YAML file of TRL."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from slimx.errors import SlimxError
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.names import Names, whole, word_of, yaml_in
from slimx.extras.foreign.scripts.python_file import arguments_in
from slimx.extras.foreign.scripts.shared import (
    NODE,
    PROMPT_TOKENS,
    longest_rollout,
    put_answers,
    put_engines,
    put_lora,
    put_model,
    put_ranks,
    put_steps,
    put_tokens,
    put_transport,
    put_updates,
    put_warmup,
)
from slimx.extras.foreign.scripts.shell.files import text_of
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of
from slimx.extras.foreign.scripts.translate import note_unneeded, put_count, put_number, translate_rest
from slimx.extras.foreign.trl import TRL

_ALGORITHMS = {"grpo": "grpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "reward": "bradley_terry"}
"""Algorithms of slimx by TRL's command, which is also the start of the names of its classes and example scripts."""
_OTHERS = "bco|cpo|distillation|gkd|gold|kto|nash_md|online_dpo|orpo|ppo|prm|xpo"
"""Starts of the names of TRL's example scripts for trainers that slimx does not have."""
_RATES = {"sft": 2e-5, "reward": 1e-4}
"""Default learning rates by command, where they are not 1e-6."""


def is_program(word: str) -> bool:
    """Returns True if `word` can be the program of a launch command of TRL: `trl`, or a Python file."""
    return word == "trl" or (word.endswith(".py") and not word.startswith("-"))


def launch_values(launch: Launch, files: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the values of a launch command by name, with those of its Python file and of the files of settings that
    it names, if they are here; the entries `config` and `config_file` have the others. `files`: texts by path of the
    files that the script writes."""
    values: dict[str, list[str]] = {}
    arguments = list(launch.arguments)
    if launch.program == "trl" and arguments:
        values["trainer"] = [arguments.pop(0)]
    elif Path(launch.program).is_file():
        values |= arguments_in(Path(launch.program), text_of(Path(launch.program)))
    before = flags_of(launch.before)
    flags = flags_of(arguments)
    missing: dict[str, list[str]] = {"config": [], "config_file": []}
    for name, absent in missing.items():
        for path in flags.pop(name, before.get(name, [])):
            if path in files or Path(path).is_file():
                values |= yaml_values(Path(path), files.get(path))
            else:
                absent.append(path)
    for name in ("num_processes", "num_machines", "nproc_per_node", "nnodes"):
        if name in before:
            values[name] = before[name]
    trainer = re.match(f"({'|'.join(_ALGORITHMS)}|{_OTHERS})[_.]", Path(launch.program).name)
    if trainer:
        values.setdefault("trainer", [trainer[1]])
    return values | flags | missing


def yaml_values(file: Path, text: str | None = None) -> dict[str, list[str]]:
    """Returns the values of a YAML file of TRL or accelerate by name, as words of a command line. `text`: what it
    contains, if it is not here. Raises SlimxError if it is not YAML."""
    values = {}
    for name, value in yaml_in(file, text).items():
        values[str(name)] = [*map(word_of, value if isinstance(value, list) else [value])]
    return values


def read_trl(values: dict[str, list[str]], draft: Draft) -> None:
    """Adds what `values`, words by name, mean to `draft`. Raises SlimxError for a value that is no number."""
    names = Names(draft, values, lambda name: "--" + name)
    trainer = _trainer(names)
    if names.text("trainer") is None:
        draft.supply.setdefault("algorithm.name", "the script does not name a trainer of TRL; grpo is assumed")
    for name in ("config", "config_file"):
        for path in names.listed(name):
            draft.supply[f"--{name} {path}"] = "its settings; there is no such file here to be read"
    name = _ALGORITHMS[trainer]
    sampled = name in ("grpo", "rloo")
    _model(names, draft)
    _prompts(names, draft)
    processes = _placement(names, draft, sampled=sampled)
    _batches(names, draft, trainer, processes, sampled=sampled)
    _optimizer(names, draft, trainer)
    draft.put("algorithm.name", name, "the trainer")
    if name == "grpo":
        _objective(names, draft)
    elif name == "rloo":
        _rloo(names, draft)
    else:
        _learned_from_data(names, draft, name)
    if sampled:
        _reward(names, draft)
    translate_rest(names, (TRL,))
    put_transport(draft)


def _trainer(names: Names) -> str:
    """Returns TRL's command for the trainer; grpo if the script names none. Raises SlimxError for a trainer that slimx
    does not have."""
    trainer = names.text("trainer") or "grpo"
    command = trainer.removesuffix("Config").lower()
    if command not in _ALGORITHMS:
        raise SlimxError(
            f"{names.script} uses TRL's {trainer}, which slimx does not have; give a script of one of "
            f"{', '.join(_ALGORITHMS)}",
            code="foreign.trainer",
            about=trainer,
        )
    return command


def _model(names: Names, draft: Draft) -> None:
    put_model(names, "model_name_or_path")
    seed = names.number("data_seed", "seed")
    if seed is not None:
        draft.put("run.seed", int(seed), "--data_seed, or --seed")
    folder = names.text("output_dir") or "runs/trl"
    draft.put("run.dir", folder, "--output_dir")
    draft.put("run.name", names.text("run_name") or Path(folder).name, "--run_name")


def _prompts(names: Names, draft: Draft) -> None:
    put = draft.put
    dataset = names.text("dataset_name") or "PROMPTS"
    split, bracket, part = (names.text("dataset_train_split") or "train").partition("[")
    if bracket:
        draft.left[f"split {split}[{part}"] = "a split is read as a whole; write the rows to a file of their own"
    owner, *rest = dataset.split("/")
    if Path(dataset).expanduser().exists():
        put("rollout.prompts", dataset, "--dataset_name")
    elif rest:
        name, subset = rest[0], names.text("dataset_config") or "/".join(rest[1:])
        whole = not subset and split == "train"
        ending = "" if whole else f"/{subset or 'default'}/{split}"
        put("rollout.prompts", f"hf://{owner}/{name}{ending}", "--dataset_name")
    else:
        put("rollout.prompts", dataset, "--dataset_name")
        draft.supply["rollout.prompts"] = "file of prompts, or hf://OWNER/NAME"
    put("rollout.fields.prompt", "prompt", "TRL's column")
    draft.supply["rollout.fields"] = "the columns of the data set, if code of the script maps its rows"
    limit = names.number("max_prompt_length")
    source = "TRL has no limit; raise it for longer prompts" if limit is None else "--max_prompt_length"
    put("rollout.max_prompt_tokens", PROMPT_TOKENS if limit is None else int(limit), source)


def _placement(names: Names, draft: Draft, *, sampled: bool) -> int:
    """Sets ranks and engines, and returns the number of processes, each of which trains on a GPU."""
    per_node = names.count("nproc_per_node", NODE if "nproc_per_node" in names.values else 1)
    processes = names.count("num_processes", per_node * names.count("nnodes", 1))
    if not names.values.keys() & {"num_processes", "nproc_per_node"}:
        draft.supply["trainer.world_size"] = "the number of GPUs, which the script does not name; 1 is assumed"
    names.words("num_machines")
    mode = names.text("vllm_mode") or "colocate"
    tensor = names.count("vllm_tensor_parallel_size", 1)
    apart = mode == "server" and sampled
    put_ranks(draft, processes, tensor if apart else 0, NODE, "--num_processes, or --nproc_per_node x --nnodes")
    if not sampled:
        return processes
    names.words("use_vllm")
    put_engines(draft, tensor if apart else processes, tensor, NODE, "--num_processes / --vllm_tensor_parallel_size", 1)
    put_number(names, "rollout.engines.0.sglang.mem_fraction_static", "vllm_gpu_memory_utilization", 0.3)
    if not apart:
        draft.put("schedule.colocate", True, "--vllm_mode colocate")
    return processes


def _batches(names: Names, draft: Draft, trainer: str, processes: int, *, sampled: bool) -> None:
    put = draft.put
    size = names.count("per_device_train_batch_size", 8)
    steps = names.count("gradient_accumulation_steps", 1)
    usual = 2 if trainer == "rloo" else 8
    group = names.count("num_generations", usual) if sampled else 1
    update = processes * size * steps
    per_generation = names.number_or(steps, "steps_per_generation")
    total = max(update, names.number_or(processes * size * per_generation, "generation_batch_size"))
    prompts = total / group
    times = "--steps_per_generation" if names.values.get("steps_per_generation") else "--gradient_accumulation_steps"
    source = (
        f"--num_processes {processes} x --per_device_train_batch_size {size} x {times} {per_generation:g} / {group}"
    )
    if prompts < 1 or prompts != int(prompts):
        draft.left["--per_device_train_batch_size"] = (
            f"a step has {total:g} completions, which are no whole groups of {group}; one group is set"
        )
    put("rollout.prompts_per_step", max(1, int(prompts)), source)
    put("rollout.group_size", group, "--num_generations")
    updates = total / update
    if updates > 1:
        put_updates(draft, updates, "--steps_per_generation / --gradient_accumulation_steps")
    passes = names.count("num_iterations", 1)
    if passes > 1:
        draft.left[f"--num_iterations {passes}"] = "every rollout is trained on once"
    updates *= passes
    if sampled:
        put_count(names, "rollout.sampling.max_new_tokens", "max_completion_length", 512)
    put_tokens(draft, size * longest_rollout(draft), "--per_device_train_batch_size x the longest rollout")
    put_steps(names, "max_steps", "num_train_epochs", 3, updates)
    for name in ("save_steps", "eval_steps"):
        every = names.number(name)
        if [*names.values.get(name.replace("steps", "strategy"), ()), "steps"][0] != "steps":
            note_unneeded(names, "with this strategy it has no effect", name)
        elif every:
            every *= draft.count("schedule.steps") if every < 1 else 1 / updates
            source = f"--{name} / {updates:g} updates of TRL per step"
            if name == "save_steps":
                put("checkpoint.every", max(1, round(every)), source)
            else:
                draft.left[source] = f"set eval.prompts to a file, and eval.every to {max(1, round(every))}"
    counts = [names.number(name) for name in ("warmup_steps", "warmup_ratio")]
    warmup = counts[0] or counts[1] or 0
    if warmup >= 1:
        put("trainer.optimizer.warmup_steps", int(warmup), "--warmup_steps")
    elif warmup:
        put_warmup(draft, "trainer", warmup, "--warmup_ratio, or --warmup_steps below 1")


def _optimizer(names: Names, draft: Draft, trainer: str) -> None:
    put_number(names, "trainer.optimizer.lr", "learning_rate", _RATES.get(trainer, 1e-6))
    betas = [names.number_or(0.9, "adam_beta1"), names.number_or(0.999, "adam_beta2")]
    draft.put("trainer.optimizer.betas", betas, "--adam_beta1, --adam_beta2")
    draft.put("trainer.optimizer.decay", "linear", "--lr_scheduler_type")
    note_unneeded(names, "numerics.dtype is bfloat16 by default", "bf16", "fp16")
    names.text("peft_config")
    for tracker in names.listed("report_to"):
        if tracker in ("wandb", "tensorboard", "swanlab"):
            draft.put("track." + tracker, True, "--report_to")
        elif tracker not in ("", "none"):
            draft.left["--report_to " + tracker] = "track has wandb, tensorboard, swanlab and the URI of mlflow"
    if names.has("use_peft"):
        put_lora(names, "lora_r", "lora_alpha", (16, 32))
        modules = names.words("lora_target_modules")
        if modules:
            draft.left["--lora_target_modules"] = (
                "set trainer.lora.targets: attention, mlp, shared_experts, experts, router"
            )


def _objective(names: Names, draft: Draft) -> None:
    """Sets loss, KL term, advantages and correction of GRPO."""
    put = draft.put
    kind = names.text("loss_type") or "dapo"
    level = names.text("importance_sampling_level") or "token"
    low = names.number_or(0.2, "epsilon")
    high = names.number("epsilon_high")
    if kind == "cispo":  # TRL clips the ratio at epsilon_high itself, and not from below
        put("algorithm.name", kind, "--loss_type")
        put("algorithm.loss.low", 1.0, "no lower bound")
        if high is not None and high > 1:
            put("algorithm.loss.high", round(high - 1, 9), "--epsilon_high - 1")
        else:
            draft.supply["algorithm.loss.high"] = (
                f"TRL would clip the ratio at {low if high is None else high:g}, below 1; the preset's bound is set"
            )
        note_unneeded(names, "the loss cispo has no lower bound", "epsilon")
    elif kind == "sapo":
        put("algorithm.name", kind, "--loss_type")
        note_unneeded(names, "the loss sapo has no such bound", "epsilon", "epsilon_high")
    else:
        if level == "sequence":
            put("algorithm.name", "gspo", "--importance_sampling_level sequence")
        put("algorithm.loss.low", low, "--epsilon")
        put("algorithm.loss.high", low if high is None else high, "--epsilon_high, or --epsilon")
    units = {"grpo": "sample", "sapo": "sample", "dr_grpo": "constant"}
    put("algorithm.aggregation", units.get(kind, "token"), "--loss_type " + kind)
    if kind not in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo"):
        draft.left["--loss_type " + kind] = "write this loss as a hook (algorithm.loss)"
    beta = names.number("beta")
    if beta:
        put("algorithm.reference", True, "--beta")
        put("algorithm.kl_coef", whole(beta), "--beta")
        put("algorithm.kl_estimator", "k3", "TRL's estimator")
    scale = (names.text("scale_rewards") or "group").lower()
    if names.words("scale_rewards") is not None and not names.has("scale_rewards"):
        scale = "none"
    if scale in ("none", "batch"):
        put("algorithm.advantages.normalize_std", False, "--scale_rewards")
    else:
        put("algorithm.advantages.eps", 1e-4, "TRL's")
    if scale == "batch":
        draft.left["--scale_rewards batch"] = (
            "no advantages are divided by the standard deviation of all rewards of a step; they are not divided at all"
        )
    put("algorithm.old_logprobs", "recompute", "TRL's default: the trainer's")
    correction = "vllm_importance_sampling_correction"
    mode = names.text("vllm_importance_sampling_mode") or "sequence_mask"
    bounds = ["vllm_importance_sampling_" + name for name in ("clip_max", "cap", "clip_min")]
    if names.has("use_vllm") and (names.words(correction) is None or names.has(correction)):
        kind = "icepop" if mode.endswith("mask") else "truncate"
        put("algorithm.correction.kind", kind, "vLLM's correction: " + mode)
        put("algorithm.correction.level", mode.partition("_")[0], "vLLM's correction: " + mode)
        put("algorithm.correction.high", whole(names.number_or(3.0, *bounds[:2])), f"--{bounds[0]}, --{bounds[1]}")
        least = names.number(bounds[2])
        if least is not None:
            put("algorithm.correction.low", whole(least), "--" + bounds[2])
    else:
        note_unneeded(names, "it corrects samples of vLLM", *bounds, "vllm_importance_sampling_mode")


def _rloo(names: Names, draft: Draft) -> None:
    """Sets the loss of RLOO, and notes what differs from TRL's."""
    put = draft.put
    low = names.number_or(0.2, "epsilon")
    put("algorithm.loss.low", low, "--epsilon")
    put("algorithm.loss.high", names.number_or(low, "epsilon_high"), "--epsilon_high, or --epsilon")
    draft.left["the ratio per sequence of RLOO"] = "the loss clips the ratio of every token"
    put("algorithm.aggregation", "constant", "TRL adds up the log-probs of a sequence")
    put("algorithm.old_logprobs", "recompute", "TRL's default: the trainer's")
    beta = names.number_or(0.05, "beta")
    if beta:
        draft.left[f"--beta {beta:g} (TRL's default: 0.05)"] = (
            "TRL subtracts the KL from the rewards of rloo; algorithm.kl_coef is a term of the loss"
        )


def _reward(names: Names, draft: Draft) -> None:
    put = draft.put
    functions = list(filter(None, names.listed("reward_funcs")))
    weights = names.listed("reward_weights")
    if not functions:
        put("reward.function", "math", "")
        draft.supply["reward.function"] = "the reward; the script names none"
        return
    for index, function in enumerate(functions):
        module, _, name = function.rpartition(".")
        if "/" in function:
            draft.supply["reward"] = function + " is a reward model; a hook asks a frozen group of rollout.engines"
        elif not module:
            draft.supply["reward"] = function + " is a function of TRL, which must be installed"
        elif module == Path(names.script).stem:
            draft.supply["reward"] = f"move {name} out of {names.script} into a file that trains nothing"
        path = f"trl:{module or 'trl.rewards'}.{name}"
        if len(functions) == 1:
            put("reward.function", path, "--reward_funcs")
            return
        put(f"reward.parts.{index}.name", name, "--reward_funcs")
        put(f"reward.parts.{index}.function", path, "--reward_funcs")
        with contextlib.suppress(IndexError, ValueError):
            put(f"reward.parts.{index}.weight", whole(float(weights[index])), "--reward_weights")


def _learned_from_data(names: Names, draft: Draft, name: str) -> None:
    """Sets what training on demonstrations or preferences has instead of rollouts."""
    put = draft.put
    longest = put_count(names, "rollout.max_prompt_tokens", "max_length", 1024)
    put_tokens(draft, longest * names.count("per_device_train_batch_size", 8), "--per_device_train_batch_size")
    put_answers(draft, "demonstrations" if name == "sft" else "preferences", "the data set has the answers")
    if name != "sft":
        put("rollout.group_size", 2, "a pair: the chosen and the rejected answer")
        put("rollout.fields.answer", "chosen", "TRL's column")
        put("rollout.fields.rejected", "rejected", "TRL's column")
    else:
        put("rollout.fields.answer", "completion", "TRL's column")
    if name == "dpo":
        put("algorithm.reference", True, "DPO compares with the initial weights")
        put_number(names, "algorithm.advantages.beta", "beta", 0.1)
