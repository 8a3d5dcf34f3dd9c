"""Section critic: the value model of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import ValidationError

from slimx.config.rule import Refusal
from slimx.config.section import Count, Faults, PathText, Positive, Section, Weight
from slimx.config.sections.trainer import Optimizer, RankLayout, Trainer
from slimx.errors import SlimxError


class CriticOptimizer(Optimizer):
    """The keys of `trainer.optimizer`, with a larger learning rate by default."""

    lr: Positive = 1e-5
    """Peak learning rate."""


class Critic(Section):
    """The value model of PPO: the policy's architecture with one number per token instead of logits. Other settings
    (attention, recompute, deadline, ...) are those of section trainer."""

    load: PathText | None = None
    """Hugging Face directory of the trunk's initial weights; null: those of the policy."""
    head: Literal["zero", "normal"] = "zero"
    """Initial value head: zero, or normal with standard deviation 1/sqrt(hidden size + 1)."""
    placement: Literal["shared", "own"] = "shared"
    """shared: in the trainer's ranks, which train policy and critic in turn; own: in separate ranks (`layout`)."""
    layout: RankLayout | None = None
    """Parallel sizes of the critic's separate ranks (`placement: own`); null: one rank."""
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: Weight = 0.2
    """Clip range of values: a change beyond it within a step does not lower the loss; 0: no clipping."""
    warmup_steps: Count = 0
    """Number of first steps that train only the critic and leave the policy unchanged."""

    def _faults(self) -> Faults:
        if self.placement == "shared" and self.layout is not None:
            yield (
                "critic.placement",
                "critic.layout",
                "critic.layout is set but critic.placement is shared, where the critic is sharded like the trainer; "
                "set critic.placement=own or leave critic.layout out",
            )


def critic_trainer(trainer: Trainer, critic: Critic) -> Trainer:
    """Returns the `trainer` section for the critic's ranks. Raises SlimxError for a layout that does not fit them."""
    megatron = dict(trainer.megatron)
    # Layers of multi-token prediction learn from labels, which a critic does not have.
    megatron.pop("mtp_num_layers", None)
    changes: dict[str, object] = {
        "load": critic.load or trainer.load,
        "optimizer": critic.optimizer,
        "freeze": (),  # globs of the policy's parameters
        "lora": None,
        "megatron": megatron,
    }
    if critic.placement == "own":
        changes |= dict(critic.layout or RankLayout())
    try:
        return Trainer.model_validate({**dict(trainer), **changes})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ").replace("trainer.", "critic.layout.")
        raise Refusal(message, code="critic.layout", about="critic.layout") from None


@contextmanager
def critic_keys(critic: Critic) -> Iterator[None]:
    """Renames keys in refusals raised in the block, from the critic's view of section `trainer` to section `critic`."""

    def renamed(text: str) -> str:
        text = text.replace("trainer.optimizer.", "critic.optimizer.")
        if critic.placement == "own":
            text = text.replace("trainer.", "critic.layout.")
        return text

    try:
        yield
    except SlimxError as error:
        raise SlimxError(renamed(str(error)), code=error.code, about=renamed(error.about)) from None
