"""Sections algorithm and critic: what the loss is made of."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from slimx.config.section import Count, Section, Share
from slimx.config.trainer import Optimizer


class Algorithm(Section):
    name: Literal["grpo", "ppo", "sft"] = Field(
        "grpo",
        description="grpo: clipped policy gradient, advantages within a group; ppo: the same loss, advantages from a "
        "critic (section critic); sft: cross entropy",
    )
    clip_low: PositiveFloat = Field(0.2, description="ratio clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="ratio clipped above 1 + clip_high")
    normalize_std: bool = Field(True, description="divide advantages by the group's standard deviation")
    advantage_eps: PositiveFloat = Field(1e-6, description="added to the standard deviation")
    aggregation: Literal["token", "sample", "prompt"] = Field(
        "token",
        description="what the loss of an update is a mean of: token: all trained tokens; sample: rollouts, each the "
        "mean of its tokens; prompt: groups, each the mean of the tokens of all its rollouts",
    )
    reference: bool = Field(False, description="log KL to the initial weights (one more forward pass)")
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy || reference), k3, in the loss")
    gamma: Share = Field(1.0, description="ppo: discount per trained token")
    gae_lambda: Share = Field(
        1.0, description="ppo: decay of generalised advantage estimation; 1: whole returns, 0: one step and the critic"
    )
    whiten: bool = Field(
        True, description="ppo: advantages of a step get mean 0 and standard deviation 1 over its trained tokens"
    )
    kl_reward_coef: float = Field(
        0.0, ge=0, description="ppo: weight of log policy - log reference, taken from each trained token's reward"
    )
    teacher: str | None = Field(
        None,
        description="Hugging Face directory of a model of the same architecture, whose log-probs of the rollouts are "
        "measured (kl/teacher; one more forward pass, one more copy of the weights in host memory); null: none",
    )
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout",
        description="log-probs that the ratio compares with: rollout: the engine's; recompute: the trainer's own, of "
        "the weights before the step (one more forward pass)",
    )

    @model_validator(mode="after")
    def _kl(self) -> Algorithm:
        for key, default in (("teacher", None), ("old_logprobs", "rollout")):
            if self.name == "sft" and getattr(self, key) != default:
                raise ValueError(
                    f"algorithm.{key} is {getattr(self, key)} but algorithm.name is sft, whose loss has no use for it; "
                    "leave it out"
                )
        if self.kl_coef > 0 and not self.reference:
            raise ValueError(
                "algorithm.kl_coef is positive but algorithm.reference is false; set algorithm.reference=true"
            )
        if self.kl_reward_coef > 0 and not self.reference:
            raise ValueError(
                "algorithm.kl_reward_coef is positive but algorithm.reference is false; set algorithm.reference=true"
            )
        if self.name != "ppo":
            own = ("gamma", "gae_lambda", "whiten", "kl_reward_coef")
            given = [key for key in own if getattr(self, key) != type(self).model_fields[key].default]
            if given:
                raise ValueError(
                    f"algorithm.{given[0]} belongs to ppo but algorithm.name is {self.name}; set algorithm.name=ppo or "
                    "leave it out"
                )
        return self


class CriticOptimizer(Optimizer):
    """As `trainer.optimizer`, with a larger default."""

    lr: PositiveFloat = Field(1e-5, description="peak learning rate")


class CriticLayout(Section):
    """Sizes of a critic on ranks of its own; each key means what the trainer's key of that name means."""

    world_size: PositiveInt = Field(1, description="number of the critic's ranks, beside those of the trainer")
    tensor: PositiveInt = Field(1, description="tensor parallel size (TP)")
    pipeline: PositiveInt = Field(1, description="pipeline parallel size (PP)")
    virtual_pipeline: PositiveInt = Field(1, description="model chunks of each pipeline rank (VPP)")
    layers_per_stage: tuple[Count, ...] | None = Field(
        None, description="decoder layers of each stage, in the order of the forward pass; null: equal"
    )
    context: PositiveInt = Field(1, description="context parallel size (CP)")
    data: PositiveInt | None = Field(None, description="data parallel size (DP); null: what remains of world_size")
    expert: PositiveInt = Field(1, description="expert parallel size (EP)")
    expert_tensor: PositiveInt | None = Field(
        None, description="tensor parallel size inside an expert (ETP); null: the critic's TP"
    )


class Critic(Section):
    """The value model of PPO: the policy's architecture with one number per token instead of logits. What is not said
    here (attention, recompute, deadline, ...) is the trainer's."""

    load: str | None = Field(
        None, description="Hugging Face directory of the trunk's initial weights; null: the policy's own"
    )
    head: Literal["zero", "normal"] = Field(
        "zero", description="value head at the start: zero, or normal with standard deviation 1/sqrt(hidden size + 1)"
    )
    placement: Literal["shared", "own"] = Field(
        "shared", description="shared: in the trainer's ranks, one after the other; own: in ranks of its own (layout)"
    )
    layout: CriticLayout | None = Field(None, description="placement own: sizes of the critic; null: one rank")
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: float = Field(
        0.2, ge=0, description="a value that moved further than this in a step gains nothing by it; 0: no clipping"
    )
    warmup_steps: Count = Field(
        0, description="first steps of the run that train the critic only; the policy stays as it is"
    )

    @model_validator(mode="after")
    def _placement(self) -> Critic:
        if self.placement == "shared" and self.layout is not None:
            raise ValueError(
                "critic.layout is given but critic.placement is shared, where the critic is split as the trainer is; "
                "set critic.placement=own or leave critic.layout out"
            )
        return self
