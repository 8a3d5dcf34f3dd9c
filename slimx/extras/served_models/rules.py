"""Configuration rules about teachers that frozen engines serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.rollout import Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slimx.data.records import Prompt
    from slimx.models.families import ModelSpec


@rule("algorithm.teacher_engine", "algorithm.teacher_engine")
def served_teacher(algorithm: Algorithm, rollout: Rollout) -> Problems:
    frozen = [group.name for group in rollout.engines if group.frozen]
    named = {f"algorithm.teacher_engines.{value}": name for value, name in algorithm.teacher_engines.items()}
    key = "algorithm.teacher_engines"
    if algorithm.teacher_engine is not None:
        key = "algorithm.teacher_engine"
        named[key] = algorithm.teacher_engine
    for option, name in named.items():
        if name not in frozen:
            yield (
                option,
                f"rollout.engines has no frozen group {name} (frozen groups: {', '.join(frozen) or 'none'}); add a "
                "group with this name, frozen: true and the teacher's model",
            )
    if not named:
        return
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(rollout.sampling, name)
        default = Sampling.model_fields[name].default
        if value != default:
            yield (
                key,
                f"SGLang scores tokens at temperature 1 over the whole vocabulary, not with "
                f"rollout.sampling.{name}={value:g}; set {name} to {default:g}, or use algorithm.teacher, which the "
                "trainers score with the policy's sampling parameters",
            )


@rule("teacher.top_k", "algorithm.teacher_top_k")
def within_vocabulary(algorithm: Algorithm, spec: ModelSpec) -> Problems:
    if algorithm.teacher_top_k > spec.vocab_size:
        yield (
            f"algorithm.teacher_top_k is {algorithm.teacher_top_k}, but the vocabulary of {spec.path} has only "
            f"{spec.vocab_size} tokens; set algorithm.teacher_top_k to at most {spec.vocab_size}"
        )


@rule("teacher.vocabulary", "algorithm.teacher_engine")
def same_vocabulary(algorithm: Algorithm, served: ServedEngines, tokenizer: PreTrainedTokenizerBase) -> Problems:
    """Refuses a teacher whose vocabulary differs from the policy's, because the teacher receives the policy's token
    ids.

    External servers are compared when the run starts, by `slimx.extras.served_models.teacher.check_vocabulary`.
    """
    from slimx.data.chat.tokens import load_tokenizer  # imports transformers, which slimx plan does not need

    for group in served.frozen:
        if group.name not in algorithm.served_teachers or group.urls or group.model is None:
            continue
        policy = tokenizer.get_vocab()
        teacher = load_tokenizer(group.model).get_vocab()
        if policy != teacher:
            key = "teacher_engine" if group.name == algorithm.teacher_engine else "teacher_engines"
            token = min((policy.items() ^ teacher.items()), key=lambda item: (item[1], item[0]))[0]
            yield (
                f"algorithm.{key}",
                f"the vocabulary of teacher {group.name} ({group.model}) differs from the policy's: token {token!r} "
                f"has id {teacher.get(token)} in the teacher and {policy.get(token)} in the policy; serve a model with "
                "the policy's tokenizer",
            )


@rule("teacher.prompt", "algorithm.teacher_engines")
def taught(algorithm: Algorithm, prompts: Sequence[Prompt]) -> Problems:
    if algorithm.teacher_engines:
        from slimx.extras.served_models.teacher import check_taught  # imports clients, which slimx plan does not need

        check_taught(algorithm, prompts)
    yield from ()
