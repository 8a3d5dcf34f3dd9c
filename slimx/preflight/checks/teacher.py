"""Rules about a teacher beside its policy: one in the trainers has its tensors and the numbers of its configuration,
one in an engine its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimx.config.rule import rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.rollout import Rollout
from slimx.models.families import ModelSpec, read_model


@rule("teacher.architecture", about="algorithm.teacher")
def same_architecture(spec: ModelSpec, teacher_weights: Path | None) -> Iterator[str]:
    """Tensors are compared by name and shape, and what they do not show (norm's epsilon, rope's base, experts per
    token) by Megatron's configuration of both. How long a sequence may be is not compared."""
    if teacher_weights is None:
        return
    # It imports torch, which a plan does without.
    from slimx.models.files.reader import CheckpointReader

    path = str(teacher_weights)
    teacher = read_model(path, mtp_layers=spec.table.mtp_layers, family=spec.family)
    for own, other in ((spec.transformer, teacher.transformer), (spec.gpt, teacher.gpt)):
        for field in sorted((own.keys() | other.keys()) - {"max_sequence_length"}):
            if own.get(field) != other.get(field):
                yield (
                    f"algorithm.teacher {path} is not of the architecture of {spec.path}: {field} is "
                    f"{other.get(field)}, not {own.get(field)}; its weights take turns in the policy's memory: give "
                    "a teacher of the same sizes"
                )
                return
    CheckpointReader(path).check(spec.table)


@rule("teacher.top_k", about="algorithm.teacher_top_k")
def within_vocabulary(algorithm: Algorithm, spec: ModelSpec) -> Iterator[str]:
    if algorithm.teacher_top_k > spec.vocab_size:
        yield (
            f"algorithm.teacher_top_k is {algorithm.teacher_top_k}, and the vocabulary of {spec.path} has "
            f"{spec.vocab_size} tokens; set it to that or less"
        )


@rule("teacher.vocabulary", about="algorithm.teacher_engine")
def same_vocabulary(algorithm: Algorithm, rollout: Rollout, tokenizer: Any) -> Iterator[str]:
    """The group is given the policy's token ids. Of servers that run already the texts are compared when the run starts
    (`slimx.rollout.client.teacher.check_vocabulary`)."""
    from slimx.data.tokens import load_tokenizer  # imports transformers, which a plan does without

    for group in rollout.frozen_engines:
        if group.name not in algorithm.served_teachers or group.urls:
            continue
        own, other = tokenizer.get_vocab(), load_tokenizer(group.model).get_vocab()
        if own != other:
            token = min((own.items() ^ other.items()), key=lambda item: (item[1], item[0]))[0]
            yield (
                f"the teacher {group.name}: {group.model} has another vocabulary than the policy: "
                f"{token!r} is token {other.get(token)} there and {own.get(token)} here; serve a model with the "
                "policy's tokenizer"
            )
