"""Rules about the model: its weights, and how its layers, experts, heads and vocabulary are sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, broken, refuse, rule
from slimx.config.sections.trainer import Trainer, nearest_divisor
from slimx.errors import SlimxError
from slimx.layout.kernels import deep_ep_lacks

if TYPE_CHECKING:
    from pathlib import Path

    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


@rule("layout.divides", "trainer")
def sizes_divide(sizes: Sizes, spec: ModelSpec) -> Problems:
    columns = spec.transformer["moe_ffn_hidden_size"] if spec.experts else 0
    for key, size, unit, count in (
        ("trainer.expert", sizes.expert, "experts", spec.experts),
        ("trainer.tensor", sizes.tensor, "query groups (num_key_value_heads)", spec.transformer["num_query_groups"]),
        ("trainer.tensor", sizes.tensor, "vocabulary entries", spec.vocab_size),
        ("trainer.expert_tensor", sizes.expert_tensor, "columns of an expert", columns),
    ):
        if count % size:
            nearest = nearest_divisor(count, size)
            yield (
                key,
                f"{key}={size} does not divide the number of {unit} of {spec.path}, {count}; the nearest valid size is "
                f"{key}={nearest}",
            )
    if spec.experts and spec.transformer.get("add_bias_linear") and sizes.expert_tensor > 1:
        yield (
            "trainer.expert_tensor",
            f"trainer.expert_tensor={sizes.expert_tensor} shards the experts of {spec.path}, but megatron-core would "
            "add their biases on every rank; set trainer.expert_tensor=1 and trainer.expert to 2 or more",
        )


@rule("layout.parts", "trainer")
def covers(sizes: Sizes, spec: ModelSpec) -> Problems:
    from slimx.layout.megatron import MegatronLayout
    from slimx.layout.parts import check_coverage

    refused = False
    for split_rule in (sizes_divide, *spec.layer_kind.split_rules()):
        if any(split_rule.ask(sizes, spec)):
            refused = True
            break
    try:
        layout = MegatronLayout(spec.table, sizes)
    except SlimxError as error:
        # `sizes_divide` reports this number of experts, with the nearest valid size.
        if not refused or error.code != "layout.experts":
            raise
        return
    if not refused:
        check_coverage(spec.table.sources(), layout.parts())
    yield from ()


@rule("layout.freeze", "trainer.freeze")
def trains_something(trainer: Trainer, spec: ModelSpec) -> Problems:
    frozen = spec.frozen(trainer.freeze)
    if trainer.freeze and all(entry.sources in frozen for entry in spec.table.entries()):
        yield "trainer.freeze matches all parameters, so none would be trained; remove patterns from trainer.freeze"


@rule("layout.no_weight_decay", "trainer.optimizer.no_weight_decay")
def decays_known(trainer: Trainer, spec: ModelSpec) -> Problems:
    from slimx.layout.patterns import select

    select(spec.table, trainer.optimizer.no_weight_decay, "trainer.optimizer.no_weight_decay")
    yield from ()


@rule("layout.deep_ep", "trainer.moe.dispatcher")
def has_trainer_kernels(trainer: Trainer, sizes: Sizes, spec: ModelSpec) -> Problems:
    ranks = sizes.expert * sizes.expert_tensor
    uses_deep_ep = trainer.moe.dispatcher == "flex" and trainer.moe.flex_backend == "deepep"
    if not uses_deep_ep or not spec.experts or ranks == 1:
        return
    lack = deep_ep_lacks(ranks, spec.transformer["hidden_size"])
    if lack:
        yield (
            f"trainer.moe.dispatcher is flex, but DeepEP (trainer.moe.flex_backend=deepep) {lack}; set "
            "trainer.moe.dispatcher=alltoall, or change trainer.expert or trainer.expert_tensor"
        )


SPLIT = (sizes_divide, covers, trains_something, decays_known, has_trainer_kernels)
"""Rules about how a model is sharded; a kind of decoder layer may add more rules."""


def check_layout(trainer: Trainer, spec: ModelSpec) -> Sizes:
    """Returns the parallel sizes of `trainer` if the model can be sharded by them.

    Raises a SlimxError that lists every reason why it cannot: sizes that do not divide the model's dimensions, each
    with the nearest valid size, or patterns that match no parameter."""
    from slimx.layout.ranks import sizes_of

    sizes = sizes_of(trainer)
    refuse(split_problems(trainer, spec, sizes))
    return sizes


def split_problems(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> list[SlimxError]:
    """Returns the errors of the rules in `SPLIT` and of the rules for the model's kind of decoder layers."""
    rules = (*SPLIT, *spec.layer_kind.split_rules())
    return broken(rules, {"trainer": trainer, "spec": spec, "sizes": sizes})


@rule("weights.tensors", "trainer.load")
def has_tensors(spec: ModelSpec, weights: Path) -> Problems:
    from slimx.models.files.formats import format_of
    from slimx.models.files.reader import CheckpointReader  # it imports torch, which `slimx plan` does not need

    checkpoint_format = format_of(weights)
    if checkpoint_format is not None:
        checkpoint_format.check(weights, spec)
    else:
        reader = CheckpointReader(weights)
        reader.check(spec.table)
        reader.check_copies(spec.table)
    yield from ()
