"""Algorithm, reward, evaluation and distillation of a launch command of verl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slimx.extras.foreign.scripts.draft import Draft, scalar
from slimx.extras.foreign.scripts.names import Names, whole
from slimx.extras.foreign.scripts.shared import NODE, put_kl

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_DEFAULT = "verl's default"


def files_in(text: str) -> list[str]:
    """Returns the paths in `text`: one, or those of a list."""
    value = scalar(text)
    return [str(entry) for entry in value] if isinstance(value, list) else [text]


def names_of(paths: list[str]) -> dict[str, str]:
    """Returns `paths` by unique names: those of their files, or of the folders that these are in."""
    stems = {Path(path).stem: path for path in paths}
    return stems if len(stems) == len(paths) else {Path(path).parent.name: path for path in paths}


def put_demonstrations(draft: Draft) -> None:
    """Sets what supervised fine-tuning has."""
    draft.put("rollout.generate", "demonstrations", "sft_trainer")
    draft.put("rollout.engines", [], "demonstrations are not sampled")
    draft.put("rollout.group_size", 1, "a demonstration per prompt")
    draft.put("reward.function", None, "demonstrations have no reward")
    draft.put("algorithm.name", "sft", "sft_trainer")


def put_algorithm(keys: Names, draft: Draft) -> None:
    """Sets advantages, loss, critic, KL terms and corrections."""
    put = draft.put
    estimator = keys.text("algorithm.adv_estimator") or "gae"
    mode = keys.text(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    losses = ("gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov")
    names = {
        "gae": "ppo",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    }
    name = mode.replace("-", "_") if mode.replace("-", "_") in losses else names.get(estimator, estimator)
    put("algorithm.name", name, f"algorithm.adv_estimator={estimator}, policy_loss.loss_mode={mode}")
    if mode != "vanilla" and name != mode.replace("-", "_"):
        draft.left[f"{ACTOR}.policy_loss.loss_mode={mode}"] = "write the loss as a hook (algorithm.loss)"
    if name == "ppo":
        put("critic.value_clip", keys.number("critic.cliprange_value") or 0.5, "critic.cliprange_value")
        warmup = keys.number("trainer.critic_warmup")
        if warmup:
            put("critic.warmup_steps", int(warmup), "trainer.critic_warmup")
        load = keys.text("critic.model.path")
        if load is not None and load != draft.get("model.path"):
            put("critic.load", load, "critic.model.path")
        for key in [key for key in keys.values if key.startswith("critic.megatron.")]:
            keys.words(key)
            draft.unneeded["critic.megatron"] = "the critic is sharded like the trainer (critic.placement: shared)"
    else:
        for key in [key for key in keys.values if key.startswith("critic.")] + ["trainer.critic_warmup"]:
            if keys.words(key) is not None:
                draft.unneeded[key] = "only ppo has a critic"
    if name in ("grpo", "ppo", "gspo", "clip_cov", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "cispo"):
        both = keys.number(f"{ACTOR}.clip_ratio")
        for side in ("low", "high"):
            bound = keys.number(f"{ACTOR}.clip_ratio_{side}")
            bound = next((item for item in (bound, both, 0.2) if item is not None), 0.2)
            put(f"algorithm.loss.{side}", bound, f"{ACTOR}.clip_ratio_{side}")
    else:
        for side in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            if keys.words(f"{ACTOR}.{side}") is not None:
                draft.unneeded[f"{ACTOR}.{side}"] = f"the loss of {name} has no such bound"
    dual = keys.number(f"{ACTOR}.clip_ratio_c")
    if name not in losses:
        put("algorithm.loss.dual", whole(3.0 if dual is None else dual), f"{ACTOR}.clip_ratio_c; {_DEFAULT}: 3.0")
    elif dual is not None:
        draft.unneeded[f"{ACTOR}.clip_ratio_c"] = f"the loss of {name} has no such bound"
    modes = {"seq-mean-token-mean": "sample", "seq-mean-token-sum": "constant", "seq-mean-token-sum-norm": "constant"}
    unit = keys.text(f"{ACTOR}.loss_agg_mode") or "token-mean"
    put("algorithm.aggregation", modes.get(unit, "token"), f"{ACTOR}.loss_agg_mode={unit}")
    normalized = keys.text("algorithm.norm_adv_by_std_in_grpo")
    if normalized is not None and estimator == "grpo":
        put("algorithm.advantages.normalize_std", normalized.lower() == "true", "algorithm.norm_adv_by_std_in_grpo")
    if keys.has(f"{ACTOR}.use_kl_loss"):
        coef = keys.number(f"{ACTOR}.kl_loss_coef")
        kind = keys.text(f"{ACTOR}.kl_loss_type") or "low_var_kl"
        names = {"on": f"{ACTOR}.use_kl_loss", "coef": f"{ACTOR}.kl_loss_coef", "kind": f"{ACTOR}.kl_loss_type"}
        put_kl(draft, 0.001 if coef is None else coef, kind, names)
    else:
        for key in ("kl_loss_coef", "kl_loss_type"):
            if keys.words(f"{ACTOR}.{key}") is not None:
                draft.unneeded[f"{ACTOR}.{key}"] = "without use_kl_loss it has no effect"
    _token_kl(keys, draft, name)
    _correction(keys, draft)


def _token_kl(keys: Names, draft: Draft, name: str) -> None:
    coef = keys.number("algorithm.kl_ctrl.kl_coef")
    penalty = keys.text("algorithm.kl_penalty")
    if not keys.has("algorithm.use_kl_in_reward"):
        for key, value in (("algorithm.kl_ctrl.kl_coef", coef), ("algorithm.kl_penalty", penalty)):
            if value is not None:
                draft.unneeded[key] = "without use_kl_in_reward it has no effect"
    elif name not in ("ppo", "reinforce_pp", "reinforce_pp_baseline"):
        draft.left["algorithm.use_kl_in_reward"] = (
            f"{name} has no reward per token; algorithm.kl_coef is a term of the loss"
        )
    else:
        draft.put("algorithm.reference", True, "algorithm.use_kl_in_reward")
        draft.put("algorithm.kl_reward_coef", 0.001 if coef is None else coef, "algorithm.kl_ctrl.kl_coef")


def _correction(keys: Names, draft: Draft) -> None:
    section = "algorithm.rollout_correction"
    bypass = keys.has(f"{section}.bypass_mode") or keys.has(f"{ACTOR}.use_rollout_log_probs")
    bypass = bypass or keys.number("async_training.staleness_threshold") is not None
    source = f"{section}.bypass_mode" if bypass else f"{_DEFAULT}: the trainer's"
    draft.put("algorithm.old_logprobs", "rollout" if bypass else "recompute", source)
    level = keys.text(f"{section}.rollout_is") or keys.text("algorithm.rollout_is")
    bounds = keys.text(f"{section}.rollout_is_threshold") or keys.text("algorithm.rollout_is_threshold") or "2.0"
    if level is None or level.lower() == "false":
        return
    low, between, high = bounds.rpartition("_")
    draft.put("algorithm.correction.kind", "icepop" if between else "truncate", f"{section}.rollout_is_threshold")
    draft.put("algorithm.correction.level", "sequence" if level == "sequence" else "token", f"{section}.rollout_is")
    draft.put("algorithm.correction.high", float(high), f"{section}.rollout_is_threshold")
    if between:
        draft.put("algorithm.correction.low", float(low), f"{section}.rollout_is_threshold")


def put_reward(keys: Names, draft: Draft) -> None:
    """Sets the reward, with the penalty for long answers as a part of its own."""
    path = keys.text("custom_reward_function.path") or keys.text("reward.custom_reward_function.path")
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    name = next((text for text in map(keys.text, names) if text is not None), "compute_score")
    keys.text("reward_model.reward_manager")
    keys.text("reward.reward_manager.name")
    options = {}
    for key in [key for key in keys.values if "reward_kwargs." in key]:
        options[key.partition("reward_kwargs.")[2]] = keys.text(key)
    function = "math"
    if path is not None:
        function = "verl_reward.reward"
        draft.supply["reward"] = f"a hook that calls {name} of {path}, as in docs/guides/coming-from.md"
    else:
        draft.supply["reward"] = "verl chooses the grading by the column data_source; `math` compares final answers"
    length = _overlong(options)
    if length is None:
        draft.put("reward.function", function, "the reward manager")
        return
    draft.put("reward.parts.0.name", "answer", "the reward manager")
    draft.put("reward.parts.0.function", function, "the reward manager")
    draft.put("reward.parts.1.name", "overlong", "overlong_buffer_cfg")
    draft.put("reward.parts.1.function", "overlong", "overlong_buffer_cfg")
    factor = options.get("overlong_buffer_cfg.penalty_factor")
    draft.put("reward.parts.1.weight", whole(float(factor or 1.0)), "overlong_buffer_cfg.penalty_factor")
    draft.put("reward.parts.1.options", length, "max_resp_len, overlong_buffer_cfg.len")


def _overlong(options: Mapping[str, str | None]) -> dict[str, int] | None:
    """Returns the options of the reward `overlong`; None if the script does not turn the penalty on."""
    limit, buffer = options.get("max_resp_len"), options.get("overlong_buffer_cfg.len")
    enabled = (options.get("overlong_buffer_cfg.enable") or "").lower() == "true"
    if not enabled or limit is None or buffer is None:
        return None
    return {"limit": int(limit), "buffer": int(buffer)}


def put_evaluation(keys: Names, draft: Draft) -> None:
    """Sets the held-out prompts and their sampling."""
    every = keys.number("trainer.test_freq")
    files = keys.text("data.val_files")
    section = f"{ROLLOUT}.val_kwargs"
    names = [f"{section}.{name}" for name in ("n", "temperature", "top_p", "do_sample", "top_k")]
    if every is None or every < 0 or files is None:
        for name in [*names, "data.val_files", "trainer.test_freq"]:
            if keys.words(name) is not None:
                draft.unneeded[name] = "without trainer.test_freq nothing is evaluated"
        return
    paths = files_in(files)
    draft.put("eval.prompts", paths[0] if len(paths) == 1 else names_of(paths), "data.val_files")
    draft.put("eval.every", int(every), "trainer.test_freq")
    for key in ("prompt", "answer", "dataset"):
        value = draft.get(f"rollout.fields.{key}")
        if value is not None:
            draft.put(f"eval.fields.{key}", value, "as for training")
    samples = keys.count(f"{section}.n", 1)
    temperature = keys.number(f"{section}.temperature") or 0.0
    sampled = keys.has(f"{section}.do_sample") and temperature > 0
    draft.put("eval.temperature", whole(temperature) if sampled else 0, f"{section}.temperature with do_sample")
    draft.put("eval.samples", samples if sampled else 1, f"{section}.n")
    share = keys.number(f"{section}.top_p")
    if sampled and share is not None:
        draft.put("eval.top_p", whole(share), f"{section}.top_p")
    top = keys.number(f"{section}.top_k")
    if top is not None and top > 0:
        draft.left[f"{section}.top_k"] = "evaluation supports only eval.top_p"


def put_distillation(keys: Names, draft: Draft) -> None:
    """Sets up a served teacher for verl's on-policy distillation with a KL over the most likely tokens."""
    names = [key for key in keys.values if key.startswith("distillation.")]
    if not keys.has("distillation.enabled"):
        return
    teacher = next((key for key in names if key.endswith(".model_path")), None)
    section = (teacher or "").removesuffix("model_path")
    gpus = keys.count("distillation.nnodes", 1) * keys.count("distillation.n_gpus_per_node", NODE)
    size = keys.count(f"{section}inference.tensor_model_parallel_size", 1)
    put = draft.put
    per_node = keys.count("trainer.n_gpus_per_node", NODE)
    nodes = int(str(draft.get("cluster.nodes", 1))) + -(-gpus // max(per_node, NODE))
    put("cluster.nodes", nodes, f"{gpus} more GPUs of the teacher")
    put("cluster.ray_address", "auto", "several nodes are a running Ray cluster")
    put("rollout.engines.1.name", "teacher", "distillation")
    put("rollout.engines.1.frozen", True, "distillation")
    put("rollout.engines.1.model", keys.text(teacher or "") or "TEACHER", "distillation.teacher_models")
    put("rollout.engines.1.count", max(1, gpus // size), "distillation.n_gpus_per_node / tensor_model_parallel_size")
    put("rollout.engines.1.tensor", size, "inference.tensor_model_parallel_size")
    share = keys.number(f"{section}inference.gpu_memory_utilization")
    if share is not None:
        put("rollout.engines.1.sglang.mem_fraction_static", share, "inference.gpu_memory_utilization")
    loss = keys.text("distillation.distillation_loss.loss_mode") or ""
    put("algorithm.teacher_engine", "teacher", "distillation.enabled")
    if not keys.has("distillation.distillation_loss.use_task_rewards"):
        put("algorithm.name", "distillation", "distillation_loss.use_task_rewards=False")
        draft.remove("algorithm.advantages")
    if "topk" in loss:
        put("algorithm.teacher_coef", 0, f"distillation_loss.loss_mode={loss}")
        put("algorithm.teacher_kl_coef", 1, f"distillation_loss.loss_mode={loss}")
        put(
            "algorithm.teacher_kl",
            "forward" if loss.startswith("forward") else "reverse",
            "distillation_loss.loss_mode",
        )
        put("algorithm.teacher_top_k", keys.count("distillation.distillation_loss.topk", 64), "distillation_loss.topk")
    for name in names:
        if name not in keys.read:
            keys.words(name)
            draft.left[name] = "the teacher's KL has no such bound or option"
