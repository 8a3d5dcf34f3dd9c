"""Whether a model can be split over the configured ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.patterns import select
from slimx.layout.ranks import Sizes, sizes_of
from slimx.models.families import ModelSpec
from slimx.models.trunk import read_trunk


def check_layout(config: Config, spec: ModelSpec) -> Sizes:
    """Whether the model can be split as configured: layers, experts, heads, vocabulary.

    Raises SlimxError with every reason and the nearest size that fits, or for patterns of parameters that match
    none."""
    if problems := layout_problems(config, spec):
        raise SlimxError("; ".join(problems))
    return sizes_of(config.trainer)


def layout_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Why the model cannot be split as configured, a sentence for each reason."""
    sizes = sizes_of(config.trainer)
    problems = list(divisor_problems(sizes, spec))
    split = not problems
    for check in (lambda: _check_parts(spec, sizes, prove=split), lambda: _check_patterns(config, spec)):
        try:
            check()
        except SlimxError as error:
            # Of experts that cannot be shared, what was said above names the nearest number that can.
            if split or "experts" not in str(error):
                problems.append(str(error))
    return problems


def divisor_problems(sizes: Sizes, spec: ModelSpec) -> Iterator[str]:
    """Sizes that do not divide what they split, or split what must stay whole."""
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
            yield (
                f"{key}={size} does not divide the {count} {what} of {spec.path}; the nearest that does is "
                f"{key}={nearest}"
            )
    if spec.experts and spec.transformer.get("add_bias_linear") and sizes.expert_tensor > 1:
        yield (
            f"trainer.expert_tensor={sizes.expert_tensor} splits the experts of {spec.path}, which have biases: "
            "megatron-core would add them on every rank; set trainer.expert_tensor=1 and trainer.expert to 2 or more"
        )


def _check_parts(spec: ModelSpec, sizes: Sizes, *, prove: bool) -> None:
    layout = MegatronLayout(spec.table, sizes)
    if prove:
        check_coverage(spec.table.sources(), layout.parts())


def check_critic_layout(config: Config) -> tuple[ModelSpec, Sizes]:
    """The critic's trunk and its sizes. Raises SlimxError as `check_layout` does, naming the keys that belong to it."""
    spec = read_trunk(config)
    with critic_keys(config):
        return spec, check_layout(config.as_critic(), spec)


@contextmanager
def critic_keys(config: Config) -> Iterator[None]:
    """What is refused in the block was found in the critic's view of the `trainer` section: name the keys that the user
    wrote."""
    try:
        yield
    except SlimxError as error:
        told = str(error).replace("trainer.optimizer.", "critic.optimizer.")
        if config.critic is not None and config.critic.placement == "own":
            told = told.replace("trainer.", "critic.layout.")
        raise SlimxError(told) from None


def _check_patterns(config: Config, spec: ModelSpec) -> None:
    select(spec.table, config.trainer.optimizer.no_weight_decay, "trainer.optimizer.no_weight_decay")
    frozen = select(spec.table, config.trainer.freeze, "trainer.freeze")
    if frozen and all(entry.sources in frozen for entry in spec.table.entries()):
        raise SlimxError("trainer.freeze matches every parameter of the model, so nothing would train; narrow it")
