"""Rules about INT4, in training and in publications, that need to know the model."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.publish import Publish
from slimx.config.sections.trainer import Trainer
from slimx.layout.ranks import Sizes
from slimx.layout.rounded import rounds
from slimx.models.families import ModelSpec
from slimx.models.files.int4 import GROUP


@rule("qat.experts", about="trainer.qat")
def has_experts(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Iterator[Told]:
    if any(rounds(row) for row in spec.table.rows):
        return
    for key, value in (("trainer.qat", trainer.qat), ("publish.quantise", publish.quantise)):
        if value == "int4":
            yield (
                key,
                f"{key}={value} rounds routed experts whose matrices the checkpoint stores one by one, and "
                f"{spec.path} has none; leave {key} out",
            )


@rule("qat.groups", about="trainer.qat")
def whole_groups(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Iterator[Told]:
    """A group of columns lies on one rank: its scale is that of the whole matrix's group."""
    if trainer.qat is None:
        return
    for row in filter(rounds, spec.table.rows):
        source, (_, cols) = row.sources[0]
        name = source.split(".")[-2]
        ways = sizes.expert_tensor if row.axis == 1 else 1
        if cols % GROUP:
            yield (
                "trainer.qat",
                f"trainer.qat={trainer.qat} rounds groups of {GROUP} columns, and {name} of the experts of "
                f"{spec.path} has {cols}; leave trainer.qat out",
            )
        elif cols % (GROUP * ways):
            yield (
                "trainer.expert_tensor",
                f"trainer.qat={trainer.qat} rounds groups of {GROUP} columns, and trainer.expert_tensor={ways} would "
                f"cut the {cols} columns of {name} inside one; set trainer.expert_tensor=1 "
                "with trainer.expert of 2 or more",
            )
        else:
            continue
        return
