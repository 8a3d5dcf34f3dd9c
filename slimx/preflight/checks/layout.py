"""Rules about how a model is split over the configured ranks: layers, experts, heads, vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slimx.config.rule import Told, broken, refuse, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.patterns import select
from slimx.layout.ranks import Sizes, sizes_of
from slimx.models.families import ModelSpec
from slimx.models.flops import delta_net_layers
from slimx.models.state_space import PATTERN, layers_of

DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks for which DeepEP has settings (`get_dispatch_config` in `deep_ep/buffers/legacy.py`)."""
DEEP_EP_NODE = 8
"""Ranks of a node to DeepEP, however many GPUs it has (`LEGACY_NUM_MAX_NVL_PEERS`)."""


@rule("layout.divides", about="trainer")
def sizes_divide(sizes: Sizes, spec: ModelSpec) -> Iterator[Told]:
    for key, size, what, count in (
        ("trainer.expert", sizes.expert, "experts", spec.experts),
        ("trainer.tensor", sizes.tensor, "query groups (num_key_value_heads)", spec.transformer["num_query_groups"]),
        ("trainer.tensor", sizes.tensor, "vocabulary entries", spec.vocab_size),
        (
            "trainer.expert_tensor",
            sizes.expert_tensor,
            "columns of an expert",
            spec.transformer["moe_ffn_hidden_size"] if spec.experts else 0,
        ),
    ):
        if count % size:
            nearest = min(
                (n for n in range(1, count + 1) if count % n == 0), key=lambda n, size=size: (abs(n - size), n)
            )
            told = f"{key}={size} does not divide the {count} {what} of {spec.path}; the nearest that does is "
            yield key, f"{told}{key}={nearest}"
    if spec.experts and spec.transformer.get("add_bias_linear") and sizes.expert_tensor > 1:
        yield (
            "trainer.expert_tensor",
            f"trainer.expert_tensor={sizes.expert_tensor} splits the experts of {spec.path}, which have biases: "
            "megatron-core would add them on every rank; set trainer.expert_tensor=1 and trainer.expert to 2 or more",
        )


@rule("layout.delta_net", about="trainer.tensor")
def shares_key_heads(sizes: Sizes, spec: ModelSpec) -> Iterator[Told]:
    if not delta_net_layers(spec.transformer):
        return
    heads = spec.transformer["linear_num_key_heads"]
    if heads % sizes.tensor:
        yield (
            "trainer.tensor",
            f"trainer.tensor={sizes.tensor} does not divide the {heads} key heads of the delta nets of {spec.path}; "
            f"choose a divisor of {heads}",
        )
    elif heads // sizes.tensor % sizes.context:
        yield (
            "trainer.context",
            f"trainer.context={sizes.context} does not divide the {heads // sizes.tensor} key heads that a rank of "
            f"trainer.tensor={sizes.tensor} has in each delta net of {spec.path}, and its ranks exchange tokens for "
            f"heads; choose a divisor of {heads // sizes.tensor}",
        )


@rule("layout.state_space", about="trainer.tensor")
def shares_groups(sizes: Sizes, spec: ModelSpec) -> Iterator[Told]:
    if not layers_of(spec.transformer, "M"):
        return
    groups = spec.transformer["mamba_num_groups"]
    if groups % sizes.tensor:
        yield (
            "trainer.tensor",
            f"trainer.tensor={sizes.tensor} does not divide the {groups} groups of the Mamba-2 layers of {spec.path}; "
            f"choose a divisor of {groups}",
        )
    if sizes.context > 1:
        yield (
            "trainer.context",
            f"trainer.context={sizes.context} cuts sequences, and that was never proven for the Mamba-2 layers of "
            f"{spec.path}, which megatron-core 0.19.2 puts together by Transformer Engine; set trainer.context=1",
        )


@rule("layout.hybrid_values", about="model.path")
def has_no_values(algorithm: Algorithm, critic: Critic | None, spec: ModelSpec) -> Iterator[str]:
    if spec.transformer.get(PATTERN) and (algorithm.scores or critic is not None):
        what = "a critic" if critic is not None else "a reward model"
        yield (
            f"{spec.path} has the layers of megatron-core's HybridModel, on which {what} cannot be built here; choose "
            "an algorithm without values (algorithm.name)"
        )


@rule("layout.hybrid_training", about="model.path")
def trained_plainly(trainer: Trainer, spec: ModelSpec) -> Iterator[Told]:
    """Fp8, adapters and offloaded activations are refused by rules of their own."""
    if not spec.transformer.get(PATTERN):
        return
    for key, given in (
        ("trainer.qat", trainer.qat is not None),
        ("trainer.optimizer.kind", trainer.optimizer.kind != "adam"),
        ("trainer.freeze", bool(trainer.freeze)),
    ):
        if given:
            yield key, f"{key} was never proven with the Mamba-2 layers of {spec.path}; leave it at its default"


@rule("layout.parts", about="trainer")
def covers(sizes: Sizes, spec: ModelSpec) -> Iterator[str]:
    split = not any(sizes_divide.ask(sizes, spec)) and not any(shares_key_heads.ask(sizes, spec))
    split = split and not any(shares_groups.ask(sizes, spec))
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


@rule("layout.freeze", about="trainer.freeze")
def trains_something(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    frozen = spec.frozen(trainer.freeze)
    if trainer.freeze and all(entry.sources in frozen for entry in spec.table.entries()):
        yield "trainer.freeze matches every parameter of the model, so nothing would train; narrow it"


@rule("layout.no_weight_decay", about="trainer.optimizer.no_weight_decay")
def decays_known(trainer: Trainer, spec: ModelSpec) -> Iterator[str]:
    select(spec.table, trainer.optimizer.no_weight_decay, "trainer.optimizer.no_weight_decay")
    yield from ()


def crosses_nodes(spec: ModelSpec) -> bool:
    """True if DeepEP's kernels between nodes take the model: its combine asserts on the GPU that a bf16 row is whole
    warps of 16 bytes (`hidden_int4 % 32 == 0`)."""
    return spec.transformer["hidden_size"] % 256 == 0


def deep_ep_lacks(ranks: int, spec: ModelSpec) -> str | None:
    """Returns in words why sgl-deep-ep 0.1.2 cannot exchange tokens of the model among `ranks`; None if it can."""
    if ranks not in DEEP_EP_RANKS:
        return f"has no settings for {ranks} ranks, only for {', '.join(map(str, DEEP_EP_RANKS))}"
    if ranks > DEEP_EP_NODE and not crosses_nodes(spec):
        return (
            f"has kernels for {ranks} ranks, more than {DEEP_EP_NODE}, only of hidden sizes that 256 divides, and "
            f"{spec.path} has {spec.transformer['hidden_size']}"
        )
    return None


@rule("layout.deep_ep", about="trainer.moe.dispatcher")
def dispatches(trainer: Trainer, sizes: Sizes, spec: ModelSpec) -> Iterator[str]:
    ranks = sizes.expert * sizes.expert_tensor
    flex = trainer.moe.dispatcher == "flex" and trainer.moe.flex_backend == "deepep"
    if flex and spec.experts and ranks > 1 and (lack := deep_ep_lacks(ranks, spec)):
        yield (
            f"trainer.moe.dispatcher=flex is DeepEP, which {lack}; set trainer.moe.dispatcher=alltoall, or other sizes "
            "(trainer.expert x trainer.expert_tensor)"
        )


SPLIT = (sizes_divide, shares_key_heads, shares_groups, covers, trains_something, decays_known, dispatches)
"""Asked of the policy and, with other keys, of the critic."""


@rule("critic.split", about="critic.layout")
def critic_splits(
    critic: Critic | None, critic_view: Trainer | None, critic_spec: ModelSpec | None, critic_sizes: Sizes | None
) -> Iterator[Told]:
    if critic is None:
        return
    try:
        with critic_keys(critic):
            refuse(broken(SPLIT, {"trainer": critic_view, "spec": critic_spec, "sizes": critic_sizes}))
    except SlimxError as error:
        yield error.about, str(error)


def check_layout(trainer: Trainer, spec: ModelSpec) -> Sizes:
    """The trainer's sizes, if the model can be split like that.

    Raises SlimxError with every reason and the nearest size that fits, or for patterns of parameters that match
    none."""
    sizes = sizes_of(trainer)
    refuse(broken(SPLIT, {"trainer": trainer, "spec": spec, "sizes": sizes}))
    return sizes


@contextmanager
def critic_keys(critic: Critic) -> Iterator[None]:
    """Refusals in the block are about the critic's view of the `trainer` section: name the keys that the user wrote."""
    try:
        yield
    except SlimxError as error:
        told, about = (text.replace("trainer.optimizer.", "critic.optimizer.") for text in (str(error), error.about))
        if critic.placement == "own":
            told, about = (text.replace("trainer.", "critic.layout.") for text in (told, about))
        raise SlimxError(told, code=error.code, about=about) from None
