"""Section `critic`: the value model of PPO."""

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
    """Optimizer of the critic: the keys of `trainer.optimizer`, with a larger default learning rate."""

    lr: Positive = 1e-5
    """Peak learning rate of the critic."""


class Critic(Section):
    """Value model of PPO: the policy's architecture with one output per token instead of logits. Settings that are not
    listed here (attention, recompute, deadline, ...) are taken from section `trainer`."""

    load: PathText | None = None
    """Hugging Face directory with the initial weights of all layers except the value head; null: the policy's initial
    weights."""
    head: Literal["zero", "normal"] = "zero"
    """Initialization of the value head. zero: zeros; normal: normally distributed with standard deviation 1/sqrt(hidden
    size + 1)."""
    placement: Literal["shared", "own"] = "shared"
    """Ranks of the critic. shared: the trainer's ranks, which alternate between policy and critic; own: separate ranks
    (`layout`)."""
    layout: RankLayout | None = None
    """Parallel sizes of the critic's separate ranks (`placement: own`); null: one rank."""
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: Weight = 0.2
    """Clip range of values: once a value has changed by more than this within a step, a further change does not lower
    the loss; 0: no clipping."""
    warmup_steps: Count = 0
    """Number of steps at the start of the run that train only the critic and leave the policy unchanged; 0: none."""

    def _faults(self) -> Faults:
        if self.placement == "shared" and self.layout is not None:
            yield (
                "critic.placement",
                "critic.layout",
                "critic.layout is set, but critic.placement is shared and the critic is sharded like the trainer; "
                "set critic.placement=own or remove critic.layout",
            )


def critic_trainer(trainer: Trainer, critic: Critic) -> Trainer:
    """Returns section `trainer` with the settings of the critic's ranks. Raises Refusal if `critic.layout` is invalid
    in combination with the other settings."""
    megatron = dict(trainer.megatron)
    # Multi-token-prediction layers are trained on token labels, which a critic does not have.
    megatron.pop("mtp_num_layers", None)
    changes: dict[str, object] = {
        "load": critic.load or trainer.load,
        "optimizer": critic.optimizer,
        "freeze": (),  # its globs select parameters of the policy
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
    """Rewrites errors raised in the `with` block, which checks the critic as if it were a trainer: replaces keys of
    section `trainer` with the keys of section `critic` that the user sets."""

    def renamed(text: str) -> str:
        text = text.replace("trainer.optimizer.", "critic.optimizer.")
        if critic.placement == "own":
            text = text.replace("trainer.", "critic.layout.")
        return text

    try:
        yield
    except SlimxError as error:
        raise SlimxError(renamed(str(error)), code=error.code, about=renamed(error.about)) from None
