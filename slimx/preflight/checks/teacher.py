"""Whether a teacher fits the policy: one in the trainers has its tensors and the numbers of its configuration, one in
an engine its vocabulary."""

from __future__ import annotations

from typing import Any

from slimx.config.engines import Engines
from slimx.data.tokens import load_tokenizer
from slimx.errors import SlimxError
from slimx.models.families import ModelSpec, read_model
from slimx.models.files.reader import CheckpointReader


def check_teacher(path: str, spec: ModelSpec) -> None:
    """Raise SlimxError naming what differs between the model in `path` and the policy's `spec`.

    Tensors are compared by name and shape, and what they do not show (norm's epsilon, rope's base, experts per token)
    by Megatron's configuration of both. How long a sequence may be is not compared.
    """
    teacher = read_model(path, mtp_layers=spec.table.mtp_layers, family=spec.family)
    for own, other in ((spec.transformer, teacher.transformer), (spec.gpt, teacher.gpt)):
        for field in sorted((own.keys() | other.keys()) - {"max_sequence_length"}):
            if own.get(field) != other.get(field):
                raise SlimxError(
                    f"algorithm.teacher {path} is not of the architecture of {spec.path}: {field} is "
                    f"{other.get(field)}, not {own.get(field)}; its weights take turns in the policy's memory: give "
                    "a teacher of the same sizes"
                )
    CheckpointReader(path).check(spec.table)


def check_served_teacher(group: Engines, tokenizer: Any) -> None:
    """Raise SlimxError naming a token whose id differs between the policy's `tokenizer` and that of the model which the
    frozen `group` serves: it is given the policy's token ids. Of servers that run already the texts are compared when
    the run starts (`slimx.rollout.client.teacher.check_vocabulary`)."""
    if group.urls:
        return
    own, other = tokenizer.get_vocab(), load_tokenizer(group.model).get_vocab()
    if own == other:
        return
    token = min((own.items() ^ other.items()), key=lambda item: (item[1], item[0]))[0]
    raise SlimxError(
        f"algorithm.teacher_engine {group.name}: {group.model} has another vocabulary than the policy: {token!r} is "
        f"token {other.get(token)} there and {own.get(token)} here; serve a model with the policy's tokenizer"
    )
