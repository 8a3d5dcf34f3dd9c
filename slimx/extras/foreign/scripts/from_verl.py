"""Configuration from a launch command of verl: main_ppo, its fully asynchronous trainer, and sft_trainer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slimx.extras.foreign.commented_yaml import on_one_line
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.names import Names, readable, whole, yaml_in
from slimx.extras.foreign.scripts.shared import (
    NODE,
    layers_of,
    longest_rollout,
    put_answers,
    put_balance,
    put_engines,
    put_family,
    put_lora,
    put_model,
    put_mtp,
    put_ranks,
    put_stages,
    put_steps,
    put_tokens,
    put_transport,
    put_updates,
)
from slimx.extras.foreign.scripts.shell.expansion import computed
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of, keys_of
from slimx.extras.foreign.scripts.translate import note_unneeded, put_count, put_number, translate_rest
from slimx.extras.foreign.scripts.verl_algorithm import (
    files_in,
    hydra_value,
    names_of,
    put_algorithm,
    put_distillation,
    put_evaluation,
    put_optimizer,
    put_reward,
)
from slimx.extras.foreign.verl import SHORT, VERL

_SFT = {
    "model.": "actor_rollout_ref.model.",
    "optim.": "actor_rollout_ref.actor.optim.",
    "engine.": "actor_rollout_ref.actor.megatron.",
}
"""Sections of verl's sft_trainer, and those with the same keys in main_ppo."""
_APART = {"rollout.nnodes": "1", "rollout.n_gpus_per_node": "8"}
_ASYNCHRONOUS = {
    ".fully_async": {
        "async_training.staleness_threshold": "0.1",
        "async_training.partial_rollout": "true",
        "rollout.total_rollout_steps": "100",
        **_APART,
    },
    ".one_step_off": {
        "algorithm.rollout_correction.bypass_mode": "true",
        "trainer.v1.trainer_mode": "separate_async",
        **_APART,
    },
}
"""Defaults of verl's asynchronous trainers that the others do not have, by a part of the name of their module."""
_DEFAULTS = {
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "512",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
"""Defaults of verl to which values of a script refer."""
_DEFAULT_FILE = re.compile(r"((fully_async_|one_step_off_)?ppo(_megatron)?_trainer|sft_trainer_engine)(\.yaml)?")
"""Names of verl's own files of defaults, which are known here."""


def is_program(word: str) -> bool:
    """Returns True if `word` is the module of one of verl's trainers."""
    return re.fullmatch(r"verl\.(\w+\.)*(main_\w+|\w+_main|sft_trainer)", word) is not None


def read_verl(launch: Launch, draft: Draft) -> None:
    """Adds what `launch` means to `draft`. Raises SlimxError for a key whose value is not known or no number."""
    sft = launch.program.endswith("sft_trainer")
    values: dict[str, str] = {}
    for part, defaults in _ASYNCHRONOUS.items():
        if part in launch.program:
            values |= defaults
    overrides, others = keys_of(launch.arguments)
    for key, value in [*_stored(others, draft).items(), *overrides.items()]:
        tree = hydra_value(value)
        for inner, part in _flat(tree, key + ".") if isinstance(tree, dict) else [(key, value)]:
            values[_plain(inner, sft=sft)] = part.strip("'\"") if part[:1] in ("'", '"') else part
    known = values if sft else _DEFAULTS | values
    words = {key: [_interpolated(value, known, sft=sft)] for key, value in values.items()}
    keys = Names(draft, words, lambda name: name)
    _model(keys, draft, sft=sft)
    _prompts(keys, draft, sft=sft)
    if sft:
        note_unneeded(
            keys,
            "torchrun starts the ranks, and sft evaluates nothing without engines",
            "data.val_files",
            "trainer.test_freq",
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
        )
        _sft_ranks(keys, draft, launch)
    else:
        _ranks(keys, draft)
        _batches(keys, draft)
    _trainer(keys, draft, sft=sft)
    _optimizer(keys, draft, sft=sft)
    if sft:
        put_answers(draft, "demonstrations", "sft_trainer")
        draft.put("algorithm.name", "sft", "sft_trainer")
    else:
        put_algorithm(keys, draft)
        put_reward(keys, draft)
        put_evaluation(keys, draft)
        put_distillation(keys, draft)
    translate_rest(keys, (VERL,))
    if draft.get("rollout.filter") is not None:
        draft.supply["rollout.filter"] = "examples/varied.py of slimx's repository, next to this file"
    put_family(draft, "")
    put_transport(draft)


def _stored(words: Sequence[str], draft: Draft) -> dict[str, str]:
    """Returns the values in the file that --config-name names, by dotted key; none if it is verl's own. Notes a file
    that is not here, and `words` of the command that name none."""
    flags = flags_of(words)
    known = [value for flag in ("config_name", "config_path") for value in flags.get(flag, [])[:1]]
    for word in words:
        if word not in known and not word.startswith("--config-"):
            draft.left[readable(word)] = "no key is read from this word"
    name = readable((flags.get("config_name") or [""])[0])
    folder = readable((flags.get("config_path") or ["."])[0])
    if not name or _DEFAULT_FILE.fullmatch(name):
        return {}
    file = Path(folder, name if name.endswith(".yaml") else name + ".yaml")
    if not file.is_file():
        draft.supply["--config-name " + name] = f"its settings; there is no file {file} here to be read"
        return {}
    return dict(_flat(yaml_in(file), ""))


def _flat(tree: Mapping[str, object], above: str) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, above + name + ".")
        elif f"{above}{name}" != "defaults":
            yield above + name, value if isinstance(value, str) else on_one_line(value)


def _interpolated(value: str, values: Mapping[str, str], *, sft: bool) -> str:
    """Returns `value` with Hydra's `${dotted.key}` replaced by the value that the script gives to this key; one without
    such a value is marked as computed."""

    def found(match: re.Match[str]) -> str:
        name = _plain(match[1], sft=sft)
        if name not in values:
            return computed(match[0])
        others = dict(values)
        return _interpolated(others.pop(name), others, sft=sft)

    return re.sub(r"\$\{([^{}]*)\}", found, value)


def _plain(key: str, *, sft: bool) -> str:
    """Returns `key` by the name that it has for main_ppo with the engine megatron."""
    if sft:
        section = next((start for start in _SFT if key.startswith(start)), None)
        if section is not None:
            key = _SFT[section] + key.removeprefix(section)
    for section in ("actor_rollout_ref.actor.engine.", "actor_rollout_ref.actor.megatron."):
        rest = key.removeprefix(section)
        if rest != key:
            return "actor_rollout_ref.actor.megatron." + SHORT.get(rest, rest)
    return key


def _model(keys: Names, draft: Draft, *, sft: bool) -> None:
    put = draft.put
    put_model(keys, "actor_rollout_ref.model.path")
    project = keys.text("trainer.project_name") or ("gsm8k-sft" if sft else "verl_examples")
    name = keys.text("trainer.experiment_name") or ("test" if sft else "gsm8k")
    folder = keys.text("trainer.default_local_dir")
    put("run.name", name, "trainer.experiment_name")
    put("run.dir", folder or f"checkpoints/{project}/{name}", "trainer.default_local_dir")
    put("track.project", project, "trainer.project_name")
    logger = keys.text("trainer.logger")
    if logger is not None:
        for tracker in ("wandb", "swanlab", "tensorboard"):
            if tracker in logger:
                put("track." + tracker, True, "trainer.logger")
        if "mlflow" in logger:
            draft.left["trainer.logger: mlflow"] = "set track.mlflow to the URI of its server"


def _prompts(keys: Names, draft: Draft, *, sft: bool) -> None:
    put = draft.put
    files = files_in(keys.text("data.train_files") or "~/data/rlhf/gsm8k/train.parquet")
    if len(files) == 1:
        put("rollout.prompts", files[0], "data.train_files")
    else:
        for index, (name, path) in enumerate(names_of(files).items()):
            put(f"rollout.sources.{index}.path", path, "data.train_files")
            put(f"rollout.sources.{index}.name", name, "the name of its folder")
    put_count(keys, "rollout.prompts_per_step", "data.train_batch_size", 256 if sft else 1024)
    if sft:
        column = keys.text("data.messages_key") or "messages"
        put("rollout.fields.prompt", column, "data.messages_key")
        draft.supply["rollout.fields.prompt"] = (
            "verl's column has whole conversations, whose last turn slimx reads from the column `answer`"
        )
        put_count(keys, "rollout.max_prompt_tokens", "data.max_length", 1024)
        return
    put("rollout.fields.prompt", keys.text("data.prompt_key") or "prompt", "data.prompt_key")
    put("rollout.fields.answer", "reward_model.ground_truth", "verl's format")
    if len(files) == 1:
        put("rollout.fields.dataset", keys.text("data.reward_fn_key") or "data_source", "data.reward_fn_key")
    images = keys.text("data.image_key")
    if images is not None:
        put("rollout.fields.images", images, "data.image_key")
        put("trainer.vision", {"train": "none"}, "data.image_key")
    put_count(keys, "rollout.max_prompt_tokens", "data.max_prompt_length", 512)
    put_count(keys, "rollout.sampling.max_new_tokens", "data.max_response_length", 512)
    put_count(keys, "rollout.group_size", "actor_rollout_ref.rollout.n", 1)


def _ranks(keys: Names, draft: Draft) -> None:
    per_node = keys.count("trainer.n_gpus_per_node", NODE)
    trainers = keys.count("trainer.nnodes", 1) * per_node
    apart = int(keys.number_or(0, "rollout.nnodes", "actor_rollout_ref.rollout.nnodes"))
    engine_gpus = apart * int(
        keys.number_or(per_node, "rollout.n_gpus_per_node", "actor_rollout_ref.rollout.n_gpus_per_node")
    )
    put_ranks(
        draft,
        trainers,
        engine_gpus,
        max(per_node, NODE) if engine_gpus else per_node,
        "trainer.nnodes x trainer.n_gpus_per_node",
    )
    tensor = keys.count("actor_rollout_ref.rollout.tensor_model_parallel_size", 2)
    copies = keys.count("actor_rollout_ref.rollout.data_parallel_size", 1)
    stages = keys.count("actor_rollout_ref.rollout.pipeline_model_parallel_size", 1)
    experts = keys.count("actor_rollout_ref.rollout.expert_parallel_size", 1)
    size = tensor * stages
    if copies > 1 and experts > 1:
        size *= copies
        draft.put("rollout.engines.0.dp_attention", copies, "actor_rollout_ref.rollout.data_parallel_size")
    put_engines(
        draft,
        engine_gpus or trainers,
        size,
        max(per_node, NODE),
        "all GPUs / actor_rollout_ref.rollout.tensor_model_parallel_size",
        stages,
    )
    if experts > 1:
        draft.put("rollout.engines.0.expert", min(experts, size), "actor_rollout_ref.rollout.expert_parallel_size")
    put_number(
        keys, "rollout.engines.0.sglang.mem_fraction_static", "actor_rollout_ref.rollout.gpu_memory_utilization", 0.5
    )
    if not engine_gpus:
        draft.put("schedule.colocate", True, "trainers and engines share the GPUs (hybrid_engine)")


def _batches(keys: Names, draft: Draft) -> None:
    put = draft.put
    small = keys.count("actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    threshold = keys.number("async_training.staleness_threshold")
    updates = keys.count("async_training.trigger_parameter_sync_step", 4)
    batches = keys.count("async_training.require_batches", 1)
    if threshold is not None:
        put("rollout.prompts_per_step", small * batches * updates, "ppo_mini_batch_size x batches of a weight update")
        put("schedule.updates_per_step", updates, "async_training.trigger_parameter_sync_step")
        partial = keys.has("async_training.partial_rollout")
        put("schedule.max_staleness", max(1, int(threshold + 0.999)), "async_training.staleness_threshold")
        put("rollout.partial", partial, "async_training.partial_rollout")
    else:
        prompts = draft.count("rollout.prompts_per_step")
        put_updates(
            draft,
            prompts / min(small, prompts),
            f"actor_rollout_ref.actor.ppo_mini_batch_size {small}: {prompts} / {small}",
        )
    sampled = keys.number("data.gen_batch_size")
    prompts = draft.count("rollout.prompts_per_step")
    if sampled is not None and sampled > prompts:
        put("rollout.over_sampling", whole(sampled / prompts), "data.gen_batch_size / data.train_batch_size")
    samples = keys.number("rollout.total_rollout_steps")
    if samples is not None:
        put("schedule.steps", max(1, int(samples / prompts)), f"rollout.total_rollout_steps {samples:g} / {prompts}")
        note_unneeded(keys, "schedule.steps ends the run", "trainer.total_epochs")
    else:
        put_steps(keys, "trainer.total_training_steps", "trainer.total_epochs", 30)


def _sft_ranks(keys: Names, draft: Draft, launch: Launch) -> None:
    """Sets ranks and steps of sft_trainer, whose ranks torchrun starts."""
    torchrun = Names(draft, flags_of(launch.before), lambda name: "--" + name)
    per_node = torchrun.count("nproc_per_node", NODE if "nproc_per_node" in torchrun.values else 1)
    put_ranks(draft, torchrun.count("nnodes", 1) * per_node, 0, per_node, "torchrun's nnodes x nproc_per_node")
    keys.outputs |= torchrun.outputs
    put_steps(keys, "trainer.total_training_steps", "trainer.total_epochs", 4)


def _trainer(keys: Names, draft: Draft, *, sft: bool) -> None:
    context = "actor_rollout_ref.actor.megatron.context_parallel_size"
    if keys.text(context) is None and keys.text("actor_rollout_ref.actor.ulysses_sequence_parallel_size") is not None:
        context = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    copies = put_count(keys, "trainer.context", context, 1)
    dynamic = keys.has("data.use_dynamic_bsz" if sft else "actor_rollout_ref.actor.use_dynamic_bsz")
    tokens = "data.max_token_len_per_gpu" if sft else "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    size = "data.micro_batch_size_per_gpu" if sft else "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    limit = keys.number_or(8192 if sft else 16384, tokens)
    sequences = keys.number(size)
    dynamic = dynamic or (sft and keys.words("data.use_dynamic_bsz") is None)
    if dynamic or sequences is None:
        put_tokens(draft, limit * copies, f"{tokens} x {context.rpartition('.')[2]}")
    else:
        put_tokens(draft, sequences * longest_rollout(draft), size + " x the longest rollout")
    stages = put_count(keys, "trainer.pipeline", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", 1)
    chunks = keys.number("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size")
    if chunks is not None and stages > 1:
        draft.put(
            "trainer.virtual_pipeline",
            int(chunks),
            "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
        )
    _stages(keys, draft, stages)
    if put_count(keys, "trainer.expert", "actor_rollout_ref.actor.megatron.expert_model_parallel_size", 1) == 1:
        note_unneeded(
            keys,
            "it needs trainer.expert above 1",
            "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size",
        )
    modules = keys.text("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules")
    if modules is not None:
        draft.put("trainer.recompute.modules", files_in(modules), "recompute_modules")
    put_balance(keys, "actor_rollout_ref.actor.megatron.override_transformer_config.", "none")
    if keys.has("actor_rollout_ref.model.mtp.enable") and keys.has("actor_rollout_ref.model.mtp.enable_train"):
        scale = keys.number("actor_rollout_ref.model.mtp.mtp_loss_scaling_factor")
        put_mtp(draft, 1, scale, "actor_rollout_ref.model.mtp.enable_train")
    put_lora(keys, "actor_rollout_ref.model.lora.rank", "actor_rollout_ref.model.lora.alpha", (0, 32))
    put_lora(keys, "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha", (0, 16))


def _stages(keys: Names, draft: Draft, stages: int) -> None:
    """Sets the layers of every pipeline stage, if the first or the last has fewer than the others."""
    layers = layers_of(str(draft.get("model.path")))
    ends = []
    parts = [
        keys.has(
            "actor_rollout_ref.actor.megatron.override_transformer_config.account_for_" + part + "_in_pipeline_split"
        )
        for part in ("embedding", "loss")
    ]
    for name, counts in zip(("first", "last"), parts, strict=True):
        number = keys.number(
            "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_" + name + "_pipeline_stage"
        )
        if number is None and counts and layers is not None:  # the embedding or the loss takes the place of a layer
            number = (layers + sum(parts)) // stages - 1
        ends.append(number)
    if any(parts) and layers is None and stages > 1:
        draft.left["account_for_embedding/loss_in_pipeline_split"] = "set trainer.layers_per_stage"
    put_stages(draft, layers, ends[0], ends[1], stages, "num_layers_in_first/last_pipeline_stage")


def _optimizer(keys: Names, draft: Draft, *, sft: bool) -> None:
    optim = "actor_rollout_ref.actor.optim"
    put_optimizer(keys, draft, "trainer", optim, 1e-3 if sft else 1e-6)
    other = optim + ".override_optimizer_config"
    if keys.has(other + ".optimizer_cpu_offload"):
        fraction = keys.number_or(1.0, other + ".optimizer_offload_fraction", other + ".offload_fraction")
        draft.put("trainer.optimizer.offload_fraction", fraction, "optimizer_offload_fraction")
