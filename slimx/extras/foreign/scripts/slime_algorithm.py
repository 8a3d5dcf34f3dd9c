"""Algorithm and evaluation of a launch command of slime."""

from __future__ import annotations

from pathlib import Path

from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.names import Names, whole, yaml_in
from slimx.extras.foreign.scripts.shared import algorithm_of, kl_kind, put_answers, put_discounts, put_kl, put_teacher
from slimx.extras.foreign.scripts.translate import note_unneeded, put_count, put_number

_DEFAULT = "slime's default"
_COLUMNS = {"input_key": "prompt", "label_key": "answer", "tool_key": "tools"}
_OF_SETS = {
    "n_samples_per_eval_prompt": "samples",
    "temperature": "temperature",
    "top_p": "top_p",
    "max_response_len": "max_new_tokens",
}
"""Keys of a set of eval.prompts by those of a file of slime, next to its columns."""
_TOKEN_REWARDS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


def put_demonstrations(flags: Names, draft: Draft) -> None:
    """Sets what supervised fine-tuning has, and notes the flags of reinforcement learning that it leaves out."""
    put_answers(draft, "demonstrations", "--loss-type sft_loss")
    draft.put("algorithm.name", "sft", "--loss-type sft_loss")
    draft.put("algorithm.aggregation", "sample", _DEFAULT)
    note_unneeded(
        flags,
        "algorithm.name: sft needs neither engines nor advantages",
        "debug_train_only",
        "disable_compute_advantages_and_returns",
        "advantage_estimator",
        "loss_type",
    )
    note_unneeded(
        flags,
        "algorithm.name: sft has no such term",
        "entropy_coef",
        "eps_clip",
        "eps_clip_high",
        "rollout_function_path",
        "rollout_temperature",
    )
    if flags.text("label_key") is None:
        draft.supply["rollout.fields.prompt"] = (
            "slime's column has whole conversations, whose last turn slimx reads from the column `answer`"
        )


def put_algorithm(flags: Names, draft: Draft) -> None:
    """Sets advantages, loss, KL terms, corrections and distillation."""
    put = draft.put
    estimator = flags.text("advantage_estimator") or "grpo"
    put("algorithm.name", algorithm_of(draft, estimator, "--advantage-estimator"), "--advantage-estimator")
    if estimator == "ppo":
        put_number(flags, "critic.value_clip", "value_clip", 0.2)
    else:
        note_unneeded(flags, "only ppo has a critic", "value_clip")
    low = flags.number_or(0.2, "eps_clip")
    put("algorithm.loss.low", low, "--eps-clip")
    put("algorithm.loss.high", flags.number_or(low, "eps_clip_high"), "--eps-clip-high, or --eps-clip")
    if estimator == "cispo":
        note_unneeded(flags, "the loss of cispo has no such bound", "eps_clip_c")
    elif estimator == "gspo" and flags.text("eps_clip_c") is not None:
        draft.left["--eps-clip-c"] = "slimx's loss gspo has no such bound"
    put("algorithm.aggregation", "sample", _DEFAULT)
    put("algorithm.old_logprobs", "recompute", _DEFAULT)
    if flags.has("use_unbiased_kl") and flags.number("kl_loss_coef"):
        put("algorithm.kl_unbiased", True, "--use-unbiased-kl")
    put_kl(flags, "", 0, "k1")
    reward_kl = flags.number("kl_coef") or 0
    if reward_kl and estimator in _TOKEN_REWARDS:
        put("algorithm.reference", True, "--kl-coef")
        put("algorithm.kl_reward_coef", reward_kl, "--kl-coef")
        put("algorithm.kl_reward_estimator", kl_kind(flags, "kl_loss_type", "k1"), "--kl-loss-type")
        draft.unneeded.pop("--kl-loss-type", None)
    elif reward_kl:
        draft.left[f"--kl-coef {reward_kl:g}"] = (
            estimator + " has no reward per token; algorithm.kl_coef is a term of the loss"
        )
    put_discounts(flags, "gamma", "lambd")
    whiten = flags.has("normalize_advantages")
    if estimator in _TOKEN_REWARDS:
        put("algorithm.advantages.whiten", whiten, "--normalize-advantages")
    elif whiten:
        draft.left["--normalize-advantages"] = estimator + " normalizes within groups only"
    if flags.has("use_tis"):
        put("algorithm.correction.kind", "truncate", "--use-tis")
    if flags.has("use_opd"):
        flags.words("opd_type")
        put_number(flags, "algorithm.teacher_coef", "opd_kl_coef", 1.0)
        if flags.text("opd_teacher_load") is not None:
            put("algorithm.teacher", flags.text("opd_teacher_load"), "--opd-teacher-load")
            draft.supply["algorithm.teacher"] = "the teacher's Hugging Face directory instead of the Megatron-LM one"
        else:
            _teacher(flags, draft)
    if flags.has("use_opsm"):
        put_number(flags, "algorithm.opsm_delta", "opsm_delta", 1e-4)


def _teacher(flags: Names, draft: Draft) -> None:
    """Adds a frozen group of engines that serves the teacher, which slime's script starts apart from the run, and
    removes the hooks that ask it."""
    note_unneeded(
        flags,
        "the teacher's log-probs come from algorithm.teacher_engine",
        "custom_rm_path",
        "custom_reward_post_process_path",
        "rm_url",
    )
    draft.put("reward.function", None, "the teacher is the only signal")
    draft.put("algorithm.name", "distillation", "--use-opd")
    draft.remove("algorithm.advantages")
    index = sum(key.endswith(".count") and key.startswith("rollout.engines.") for key in draft.settings)
    group = put_teacher(draft, index, "TEACHER", "--opd-type sglang")
    draft.supply[group + ".model"] = "the teacher's Hugging Face directory"


def put_evaluation(flags: Names, draft: Draft) -> None:
    """Sets the held-out sets and their sampling."""
    put = draft.put
    sets = _sets(flags, draft)
    every = flags.number("eval_interval")
    if not sets or every is None:
        missing = "--eval-interval" if sets else "--eval-prompt-data"
        note_unneeded(
            flags,
            "without " + missing + " nothing is evaluated",
            "eval_prompt_data",
            "eval_interval",
            "n_samples_per_eval_prompt",
            "eval_temperature",
            "eval_top_p",
            "eval_max_response_len",
            "eval_input_key",
            "eval_label_key",
            "eval_tool_key",
            "eval_top_k",
            "skip_eval_before_train",
        )
        return
    put("eval.prompts", sets, "--eval-prompt-data")
    put("eval.every", int(every), "--eval-interval")
    for name, key in _COLUMNS.items():
        value = flags.text("eval_" + name) or draft.get("rollout.fields." + key)
        if value is not None:
            put("eval.fields." + key, value, f"{flags.shown(f'eval_{name}')}, or as for training")
    put_count(flags, "eval.samples", "n_samples_per_eval_prompt", 1)
    for key in ("temperature", "top_p"):
        number = flags.number_or(1.0, "eval_" + key, "rollout_" + key)
        put("eval." + key, whole(number), f"{flags.shown(f'eval_{key}')}, or as for training")
        flags.read.remove("rollout_" + key)
    if flags.values.get("eval_top_k") == ["1"]:
        note_unneeded(flags, "eval.temperature: 0 takes the most likely token", "eval_top_k")
        put("eval.temperature", 0, "--eval-top-k 1")


def _sets(flags: Names, draft: Draft) -> dict[str, object]:
    """Returns the held-out sets by name: paths, or mappings with settings of their own."""
    words = flags.listed("eval_prompt_data")
    config = flags.text("eval_config")
    if config is not None:
        return _configured(config, draft)
    if len(words) == 1:
        words = ["aime", *words]
    sets: dict[str, object] = {}
    for name, path in zip(words[::2], words[1::2], strict=False):
        sets[name] = path.partition("@")[0]
    return sets


def _configured(config: str, draft: Draft) -> dict[str, object]:
    """Returns the held-out sets of the file `config`, which `--eval-config` names."""
    file = Path(config)
    if not file.is_file():
        draft.left["--eval-config " + config] = "the file is not here; write its sets into eval.prompts"
        return {}
    content = yaml_in(file)
    section = content.get("eval", content)
    defaults = section.get("defaults") or {}
    sets: dict[str, object] = {}
    for entry in section.get("datasets") or []:
        options = defaults | entry
        name, path, kind = (options.pop(key, None) for key in ("name", "path", "rm_type"))
        values = {ours: options.pop(theirs) for theirs, ours in _OF_SETS.items() if theirs in options}
        columns = {ours: options.pop(theirs) for theirs, ours in _COLUMNS.items() if theirs in options}
        if columns:
            usual = {key: draft.get("rollout.fields." + key) for key in _COLUMNS.values()}
            values["fields"] = {key: column for key, column in (usual | columns).items() if column}
        sets[name] = {"path": path, **values} if values else path
        for theirs in options:
            draft.left[f"{file.name}: {theirs} of {name}"] = "a set of eval.prompts has no such key"
        if kind:
            draft.left[f"{file.name}: rm_type {kind} of {name}"] = (
                "give it a part of reward.parts with `where: {dataset: NAME}`"
            )
    return sets
