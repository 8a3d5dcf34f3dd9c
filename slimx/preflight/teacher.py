"""Whether a teacher can be scored in the policy's place: the same tensors, the same numbers in its configuration."""

from __future__ import annotations

from slimx.errors import SlimxError
from slimx.models.checkpoint_reader import CheckpointReader
from slimx.models.families import ModelSpec, read_model


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
