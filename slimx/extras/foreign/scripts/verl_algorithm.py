"""Algorithm, reward, evaluation and distillation of a launch command of verl."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from slimx.extras.foreign.scripts.draft import Draft, scalar
from slimx.extras.foreign.scripts.names import Names, whole
from slimx.extras.foreign.scripts.shared import NODE, algorithm_of, put_discounts, put_kl, put_teacher, put_warmup
from slimx.extras.foreign.scripts.translate import note_unneeded, put_count, put_number

_DEFAULT = "verl's default"
_LOSSES = ("gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov")
_COVARIANCE = {
    "clip_cov": [
        ("clip_cov_ratio", "share", 2e-4),
        ("clip_cov_lb", "covariance_low", 1),
        ("clip_cov_ub", "covariance_high", 5),
    ],
    "kl_cov": [("kl_cov_ratio", "share", 2e-4), ("ppo_kl_coef", "coef", 0.1)],
}
"""verl's and slimx's names of parameters by loss, and verl's defaults."""
_UNITS = {"seq-mean-token-mean": "sample", "seq-mean-token-sum": "constant", "seq-mean-token-sum-norm": "constant"}


def hydra_value(text: str) -> object:
    """Returns the value of `text` in an override of Hydra, whose mappings need no blank after a colon, and which has no
    aliases, as YAML has."""
    if "&" in text:
        return text
    return scalar(re.sub(r"""([{,]\s*[\w.'"-]+):(?=\S)""", r"\1: ", text) if text.startswith("{") else text)


def files_in(text: str) -> list[str]:
    """Returns the paths in `text`: one, or those of a list."""
    value = hydra_value(text)
    return [str(entry) for entry in value] if isinstance(value, list) else [text]


def names_of(paths: list[str]) -> dict[str, str]:
    """Returns `paths` by unique names: those of their files, of the folders that these are in, or with a number."""
    files = [Path(path) for path in paths]
    numbered = [f"{file.stem}-{number}" for number, file in enumerate(files, 1)]
    for names in ([file.stem for file in files], [file.parent.name for file in files], numbered):
        if len({*names}) == len(paths):
            break
    return dict(zip(names, paths, strict=True))


def put_optimizer(keys: Names, draft: Draft, owner: str, optim: str, rate: float) -> None:
    """Sets the optimizer of `owner`, trainer or critic, from verl's section `optim`. `rate`: verl's default."""
    ours = owner + ".optimizer"
    put_number(keys, ours + ".lr", optim + ".lr", rate)
    put_number(keys, ours + ".weight_decay", optim + ".weight_decay", 0.01)
    betas = keys.text(optim + ".betas")
    draft.put(ours + ".betas", [0.9, 0.999] if betas is None else scalar(betas), optim + ".betas")
    warmup = keys.number(optim + ".lr_warmup_steps")
    share = keys.number(optim + ".lr_warmup_steps_ratio")
    if warmup is not None and warmup > 0:
        draft.put(ours + ".warmup_steps", int(warmup), optim + ".lr_warmup_steps")
    elif share:
        put_warmup(draft, owner, share, optim + ".lr_warmup_steps_ratio")
    least = keys.number(optim + ".min_lr_ratio")
    if least:
        draft.put(ours + ".min_lr", least * float(str(draft.get(ours + ".lr"))), optim + ".min_lr_ratio x lr")


def put_algorithm(keys: Names, draft: Draft) -> None:
    """Sets advantages, loss, critic, KL terms and corrections."""
    put = draft.put
    estimator = keys.text("algorithm.adv_estimator") or "gae"
    mode = (keys.text("actor_rollout_ref.actor.policy_loss.loss_mode") or "vanilla").replace("-", "_")
    name = algorithm_of(draft, estimator, "algorithm.adv_estimator")
    loss = mode if mode in _LOSSES else "clip"
    if mode in _LOSSES and estimator == ("gpg" if mode == "gpg" else "grpo"):
        name = mode  # slimx's algorithm has both
    elif mode in _LOSSES or estimator == "gpg":
        put("algorithm.loss.kind", "plain" if loss == "gpg" else loss, "policy_loss.loss_mode")
    if mode not in ("vanilla", *_LOSSES):
        draft.left["actor_rollout_ref.actor.policy_loss.loss_mode=" + mode] = (
            "write the loss as a hook (algorithm.loss)"
        )
    put("algorithm.name", name, f"algorithm.adv_estimator={estimator}, policy_loss.loss_mode={mode}")
    if name == "ppo":
        put_number(keys, "critic.value_clip", "critic.cliprange_value", 0.5)
        put_optimizer(keys, draft, "critic", "critic.optim", 1e-5)
        load = keys.text("critic.model.path")
        if load is not None and load != draft.get("model.path"):
            put("critic.load", load, "critic.model.path")
        for key in [key for key in keys.values if key.startswith("critic.megatron.")]:
            keys.words(key)
            draft.unneeded["critic.megatron"] = "the critic is sharded like the trainer (critic.placement: shared)"
    else:
        critics = [key for key in keys.values if key.startswith("critic.")]
        note_unneeded(keys, "only ppo has a critic", "trainer.critic_warmup", *critics)
    if loss not in ("sapo", "gpg", "kl_cov"):
        for side in ("low", "high"):
            key = "actor_rollout_ref.actor.clip_ratio_" + side
            null = keys.words(key) is not None and keys.text(key) is None
            put_number(keys, "algorithm.loss." + side, "actor_rollout_ref.actor.clip_ratio" if null else key, 0.2)
        note_unneeded(keys, "verl's clip_ratio_low and clip_ratio_high count", "actor_rollout_ref.actor.clip_ratio")
    else:
        note_unneeded(
            keys,
            "the loss of " + loss + " has no such bound",
            "actor_rollout_ref.actor.clip_ratio",
            "actor_rollout_ref.actor.clip_ratio_low",
            "actor_rollout_ref.actor.clip_ratio_high",
        )
    if loss == "clip":
        put_number(keys, "algorithm.loss.dual", "actor_rollout_ref.actor.clip_ratio_c", 3.0)
    else:
        note_unneeded(keys, "the loss of " + loss + " has no such bound", "actor_rollout_ref.actor.clip_ratio_c")
    for theirs, ours, default in _COVARIANCE.get(loss, ()):
        put_number(keys, "algorithm.loss." + ours, "actor_rollout_ref.actor.policy_loss." + theirs, default)
    unit = keys.text("actor_rollout_ref.actor.loss_agg_mode") or "token-mean"
    if loss in ("gspo", "sapo"):
        put("algorithm.aggregation", "sample", "verl's " + loss + ", whatever loss_agg_mode is")
    else:
        put("algorithm.aggregation", _UNITS.get(unit, "token"), "actor_rollout_ref.actor.loss_agg_mode=" + unit)
        if unit.endswith("-sum"):
            draft.left["actor_rollout_ref.actor.loss_agg_mode=" + unit] = (
                "slimx divides such sums by a constant or the number of tokens"
            )
    normalized = "algorithm.norm_adv_by_std_in_grpo"
    if keys.words(normalized) is not None and estimator == "grpo":
        put("algorithm.advantages.normalize_std", keys.has(normalized), normalized)
    put_kl(keys, "actor_rollout_ref.actor.", 0.001, "low_var_kl")
    put_discounts(keys, "algorithm.gamma", "algorithm.lam")
    _token_kl(keys, draft, name)
    _correction(keys, draft)


def _token_kl(keys: Names, draft: Draft, name: str) -> None:
    kl = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if not keys.has("algorithm.use_kl_in_reward"):
        note_unneeded(keys, "without use_kl_in_reward it has no effect", *kl)
    elif name not in ("ppo", "reinforce_pp", "reinforce_pp_baseline"):
        draft.left["algorithm.use_kl_in_reward"] = (
            name + " has no reward per token; algorithm.kl_coef is a term of the loss"
        )
        note_unneeded(keys, name + " has no KL in its rewards", *kl)
    else:
        draft.put("algorithm.reference", True, "algorithm.use_kl_in_reward")
        put_number(keys, "algorithm.kl_reward_coef", "algorithm.kl_ctrl.kl_coef", 0.001)


def _correction(keys: Names, draft: Draft) -> None:
    put = draft.put
    bypass = keys.has("algorithm.rollout_correction.bypass_mode") or keys.has(
        "actor_rollout_ref.actor.use_rollout_log_probs"
    )
    bypass = bypass or keys.number("async_training.staleness_threshold") is not None
    source = "algorithm.rollout_correction.bypass_mode" if bypass else _DEFAULT + ": the trainer's"
    put("algorithm.old_logprobs", "rollout" if bypass else "recompute", source)
    level = keys.text("algorithm.rollout_correction.rollout_is", "algorithm.rollout_is")
    bounds = keys.text("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_is_threshold") or "2.0"
    if level is None or level.lower() == "false":
        return
    if bypass:
        draft.left["algorithm.rollout_correction.rollout_is=" + level] = (
            "with bypass_mode the ratio of the loss is the correction"
        )
        return
    low, between, high = bounds.rpartition("_")
    put(
        "algorithm.correction.kind",
        "icepop" if between else "truncate",
        "algorithm.rollout_correction.rollout_is_threshold",
    )
    put(
        "algorithm.correction.level",
        "sequence" if level == "sequence" else "token",
        "algorithm.rollout_correction.rollout_is",
    )
    put("algorithm.correction.high", float(high), "algorithm.rollout_correction.rollout_is_threshold")
    if between:
        put("algorithm.correction.low", float(low), "algorithm.rollout_correction.rollout_is_threshold")


def put_reward(keys: Names, draft: Draft) -> None:
    """Sets the reward, with the penalty for long answers as a part of its own."""
    put = draft.put
    path = keys.text("custom_reward_function.path", "reward.custom_reward_function.path")
    name = keys.text("custom_reward_function.name", "reward.custom_reward_function.name") or "compute_score"
    keys.text("reward_model.reward_manager", "reward.reward_manager.name")
    options = {key.partition("reward_kwargs.")[2]: key for key in keys.values if "reward_kwargs." in key}
    function = "math"
    if path is not None:
        function = "verl_reward.reward"
        draft.supply["reward"] = f"a hook that calls {name} of {path}, as in docs/guides/coming-from.md"
    else:
        draft.supply["reward"] = "verl chooses the grading by the column data_source; `math` compares final answers"
    length = _overlong(keys, options)
    if length is None:
        put("reward.function", function, "the reward manager")
        return
    put("reward.parts.0.name", "answer", "the reward manager")
    put("reward.parts.0.function", function, "the reward manager")
    put("reward.parts.1.name", "overlong", "overlong_buffer_cfg")
    put("reward.parts.1.function", "overlong", "overlong_buffer_cfg")
    factor = keys.number_or(1.0, options.get("overlong_buffer_cfg.penalty_factor", ""))
    put("reward.parts.1.weight", whole(factor), "overlong_buffer_cfg.penalty_factor")
    put("reward.parts.1.options", length, "max_resp_len, overlong_buffer_cfg.len")


def _overlong(keys: Names, options: Mapping[str, str]) -> dict[str, int] | None:
    """Returns the options of the reward `overlong`; None if the script does not turn the penalty on. `options`: keys
    of verl by the name of the option."""
    for key in options.values():
        keys.words(key)
    limit = keys.number(options.get("max_resp_len", ""))
    buffer = keys.number(options.get("overlong_buffer_cfg.len", ""))
    enabled = options.get("overlong_buffer_cfg.enable")
    if enabled is None or not keys.has(enabled) or limit is None or buffer is None:
        return None
    return {"limit": int(limit), "buffer": int(buffer)}


def put_evaluation(keys: Names, draft: Draft) -> None:
    """Sets the held-out prompts and their sampling."""
    put = draft.put
    every = keys.number("trainer.test_freq")
    files = keys.text("data.val_files")
    names = [
        "actor_rollout_ref.rollout.val_kwargs." + name for name in ("n", "temperature", "top_p", "do_sample", "top_k")
    ]
    if every is None or every <= 0 or files is None:
        note_unneeded(
            keys, "without trainer.test_freq nothing is evaluated", *names, "data.val_files", "trainer.test_freq"
        )
        return
    paths = files_in(files)
    put("eval.prompts", paths[0] if len(paths) == 1 else names_of(paths), "data.val_files")
    put("eval.every", int(every), "trainer.test_freq")
    for key in ("prompt", "answer", "dataset"):
        value = draft.get("rollout.fields." + key)
        if value is not None:
            put("eval.fields." + key, value, "as for training")
    samples = keys.count("actor_rollout_ref.rollout.val_kwargs.n", 1)
    temperature = keys.number_or(0, "actor_rollout_ref.rollout.val_kwargs.temperature")
    sampled = keys.has("actor_rollout_ref.rollout.val_kwargs.do_sample") and temperature > 0
    put(
        "eval.temperature",
        whole(temperature) if sampled else 0,
        "actor_rollout_ref.rollout.val_kwargs.temperature with do_sample",
    )
    put("eval.samples", samples if sampled else 1, "actor_rollout_ref.rollout.val_kwargs.n")
    share = keys.number("actor_rollout_ref.rollout.val_kwargs.top_p")
    if sampled and share is not None:
        put("eval.top_p", whole(share), "actor_rollout_ref.rollout.val_kwargs.top_p")
    top = keys.number("actor_rollout_ref.rollout.val_kwargs.top_k")
    if top is not None and top > 0:
        draft.left["actor_rollout_ref.rollout.val_kwargs.top_k"] = "evaluation supports only eval.top_p"


def put_distillation(keys: Names, draft: Draft) -> None:
    """Sets up a served teacher for verl's on-policy distillation with a KL over the most likely tokens."""
    names = [key for key in keys.values if key.startswith("distillation.")]
    if not keys.has("distillation.enabled"):
        return
    teacher, *others = [key for key in names if key.endswith(".model_path")] or [""]
    for key in others:
        draft.left[f"{key} {keys.text(key)}"] = "a run has one teacher"
    inference = f"{teacher.removesuffix('model_path')}inference"
    gpus = keys.count("distillation.nnodes", 1) * keys.count("distillation.n_gpus_per_node", NODE)
    size = keys.count(inference + ".tensor_model_parallel_size", 2)
    put = draft.put
    per_node = keys.count("trainer.n_gpus_per_node", NODE)
    nodes = draft.count("cluster.nodes", 1) + -(-gpus // max(per_node, NODE))
    put("cluster.nodes", nodes, f"more GPUs of the teacher: {gpus}")
    put("cluster.ray_address", "auto", "several nodes are a running Ray cluster")
    put_teacher(draft, 1, keys.text(teacher) or "TEACHER", "distillation.enabled")
    put("rollout.engines.1.count", max(1, gpus // size), "distillation.n_gpus_per_node / tensor_model_parallel_size")
    put("rollout.engines.1.tensor", size, "inference.tensor_model_parallel_size")
    share = keys.number(inference + ".gpu_memory_utilization")
    if share is not None:
        put("rollout.engines.1.sglang.mem_fraction_static", share, "inference.gpu_memory_utilization")
    loss = keys.text("distillation.distillation_loss.loss_mode") or "k3"
    rewarded = "distillation.distillation_loss.use_task_rewards"
    coef = whole(keys.number_or(1, "distillation.distillation_loss.distillation_loss_coef"))
    if keys.words(rewarded) is not None and not keys.has(rewarded):
        put("algorithm.name", "distillation", rewarded)
        draft.remove("algorithm.advantages")
        coef = 1
    if "topk" in loss:
        put("algorithm.teacher_coef", 0, "distillation.distillation_loss.loss_mode=" + loss)
        put("algorithm.teacher_kl_coef", coef, "distillation.distillation_loss.distillation_loss_coef")
        put(
            "algorithm.teacher_kl",
            "forward" if loss.startswith("forward") else "reverse",
            "distillation.distillation_loss.loss_mode",
        )
        put_count(keys, "algorithm.teacher_top_k", "distillation.distillation_loss.topk", 32)
    else:
        put("algorithm.teacher_coef", coef, "distillation.distillation_loss.distillation_loss_coef")
        draft.left["distillation.distillation_loss.loss_mode=" + loss] = (
            "algorithm.teacher_coef weights log teacher - log engine (k1)"
        )
    for name in names:
        if name not in keys.read:
            keys.words(name)
            draft.left[name] = "the teacher's KL has no such bound or option"
