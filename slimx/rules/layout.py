"""Rules about the model: its weights, and how it is split over ranks (layers, experts, heads, vocabulary)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, broken, refuse, rule
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.layout.kernels import deep_ep_lacks

if TYPE_CHECKING:
    from pathlib import Path

    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec


@rule("layout.divides", "trainer")
def sizes_divide(sizes: Sizes, spec: ModelSpec) -> Problems:
    columns = spec.transformer["moe_ffn_hidden_size"] if spec.experts else 0
    for key, size, what, count in (
        ("trainer.expert", sizes.expert, "experts", spec.experts),
        ("trainer.tensor", sizes.tensor, "query groups (num_key_value_heads)", spec.transformer["num_query_groups"]),
        ("trainer.tensor", sizes.tensor, "vocabulary entries", spec.vocab_size),
        ("trainer.expert_tensor", sizes.expert_tensor, "columns of an expert", columns),
    ):
        if count % size:
            divisors = [n for n in range(1, count + 1) if count % n == 0]
            nearest = min(divisors, key=lambda n, size=size: (abs(n - size), n))
            yield (
                key,
                f"{key}={size} does not divide the {count} {what} of {spec.path}; the nearest that does is "
                f"{key}={nearest}",
            )
    if spec.experts and spec.transformer.get("add_bias_linear") and sizes.expert_tensor > 1:
        yield (
            "trainer.expert_tensor",
            f"trainer.expert_tensor={sizes.expert_tensor} splits the experts of {spec.path}, which have biases: "
            "megatron-core would add them on every rank; set trainer.expert_tensor=1 and trainer.expert to 2 or more",
        )


@rule("layout.parts", "trainer")
def covers(sizes: Sizes, spec: ModelSpec) -> Problems:
    from slimx.layout.megatron import MegatronLayout
    from slimx.layout.parts import check_coverage

    split = not any(any(each.ask(sizes, spec)) for each in (sizes_divide, *spec.layer_kind.split_rules()))
    try:
        layout = MegatronLayout(spec.table, sizes)
    except SlimxError as error:
        # `sizes_divide` names the nearest number that can share the experts.
        if split or error.code != "layout.experts":
            raise
        return
    if split:
        check_coverage(spec.table.sources(), layout.parts())
    yield from ()


@rule("layout.freeze", "trainer.freeze")
def trains_something(trainer: Trainer, spec: ModelSpec) -> Problems:
    frozen = spec.frozen(trainer.freeze)
    if trainer.freeze and all(entry.sources in frozen for entry in spec.table.entries()):
        yield "it matches every parameter of the model, so nothing would train; narrow it"


@rule("layout.no_weight_decay", "trainer.optimizer.no_weight_decay")
def decays_known(trainer: Trainer, spec: ModelSpec) -> Problems:
    from slimx.layout.patterns import select

    select(spec.table, trainer.optimizer.no_weight_decay, "trainer.optimizer.no_weight_decay")
    yield from ()


@rule("layout.deep_ep", "trainer.moe.dispatcher")
def dispatches(trainer: Trainer, sizes: Sizes, spec: ModelSpec) -> Problems:
    ranks, hidden = sizes.expert * sizes.expert_tensor, spec.transformer["hidden_size"]
    flex = trainer.moe.dispatcher == "flex" and trainer.moe.flex_backend == "deepep"
    if flex and spec.experts and ranks > 1 and (lack := deep_ep_lacks(ranks, hidden)):
        yield f"it is DeepEP, which {lack}; set it to alltoall, or other sizes (trainer.expert x trainer.expert_tensor)"


SPLIT = (sizes_divide, covers, trains_something, decays_known, dispatches)
"""Rules about how a model is split; a kind of layers may add some."""


def check_layout(trainer: Trainer, spec: ModelSpec) -> Sizes:
    """The trainer's sizes, if the model can be split like that.

    Raises SlimxError with every reason and the nearest size that fits, or for patterns of parameters that match
    none."""
    from slimx.layout.ranks import sizes_of

    sizes = sizes_of(trainer)
    refuse(split_problems(trainer, spec, sizes))
    return sizes


def split_problems(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> list[SlimxError]:
    """Refusals by `SPLIT` and the rules of the kind of layers."""
    rules = (*SPLIT, *spec.layer_kind.split_rules())
    return broken(rules, {"trainer": trainer, "spec": spec, "sizes": sizes})


@rule("weights.tensors", "trainer.load")
def has_tensors(spec: ModelSpec, weights: Path) -> Problems:
    from slimx.models.files.formats import format_of
    from slimx.models.files.reader import CheckpointReader  # it imports torch, which a plan does without

    if (found := format_of(weights)) is not None:
        found.check(weights, spec)
    else:
        reader = CheckpointReader(weights)
        reader.check(spec.table)
        reader.check_copies(spec.table)
    yield from ()
