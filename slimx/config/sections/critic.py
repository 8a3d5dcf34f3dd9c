"""Section critic: the value model of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

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
    """The value model of PPO: the policy's architecture with one number per token instead of logits. What is not said
    here (attention, recompute, deadline, ...) is the trainer's."""

    load: PathText | None = None
    """Hugging Face directory of the trunk's initial weights; null: the policy's own."""
    head: Literal["zero", "normal"] = "zero"
    """Value head at the start: zero, or normal with standard deviation 1/sqrt(hidden size + 1)."""
    placement: Literal["shared", "own"] = "shared"
    """shared: in the trainer's ranks, one after the other; own: in ranks of its own (layout)."""
    layout: RankLayout | None = None
    """Placement own: sizes of the critic, beside those of the trainer; null: one rank."""
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: Weight = 0.2
    """A value that moved further than this in a step gains nothing by it; 0: no clipping."""
    warmup_steps: Count = 0
    """First steps of the run that train the critic only; the policy stays as it is."""

    def _faults(self) -> Faults:
        if self.placement == "shared" and self.layout is not None:
            yield (
                "critic.placement",
                "critic.layout",
                "critic.layout is given but critic.placement is shared, where the critic is split as the trainer is; "
                "set critic.placement=own or leave critic.layout out",
            )


def critic_trainer(trainer: Trainer, critic: Critic) -> Trainer:
    """The `trainer` section that the critic's ranks follow. Raises SlimxError for a layout that does not fit them."""
    changes: dict[str, Any] = {
        "load": critic.load or trainer.load,
        "optimizer": critic.optimizer,
        "freeze": (),  # patterns for the policy
        "lora": None,
        # Layers of multi-token prediction learn from labels; a critic has none.
        "megatron": {key: value for key, value in trainer.megatron.items() if key != "mtp_num_layers"},
    }
    if critic.placement == "own":
        changes |= dict(critic.layout or RankLayout())
    try:
        return Trainer.model_validate({**dict(trainer), **changes})
    except ValidationError as error:
        told = error.errors()[0]["msg"].removeprefix("Value error, ").replace("trainer.", "critic.layout.")
        raise Refusal(told, code="critic.layout", about="critic.layout") from None


@contextmanager
def critic_keys(critic: Critic) -> Iterator[None]:
    """Refusals in the block are about the critic's view of the `trainer` section: name the keys that the user wrote."""
    try:
        yield
    except SlimxError as error:
        sentence, about = (
            text.replace("trainer.optimizer.", "critic.optimizer.") for text in (str(error), error.about)
        )
        if critic.placement == "own":
            sentence, about = (text.replace("trainer.", "critic.layout.") for text in (sentence, about))
        raise SlimxError(sentence, code=error.code, about=about) from None
