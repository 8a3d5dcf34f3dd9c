"""Section `algorithm`: advantages, loss, reference and teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from slimx.config.section import Count, Faults, Objective, PathText, Positive, Real, Section, Weight
from slimx.config.sections.objectives import (
    OBJECTIVES,
    PRESETS,
    Advantages,
    Correction,
    Grpo,
    Loss,
    Name,
    Rejection,
    TokenRewards,
    read_objective,
    unknown_kind,
)

CREDITS = ("own", "shared")
"""Built-in values of `credit`, the default first; any other value is the dotted path of a hook."""


class Algorithm(Section):
    name: Name = "grpo"
    """Published algorithm whose settings become the defaults of the other keys of this section (table in
    docs/algorithms.md)."""
    advantages: Advantages = Field(default={}, validate_default=True)
    """Advantage estimator: a kind, a mapping with `kind` and its parameters, or the dotted path of a hook
    `advantages(groups)`, which returns for every trajectory of L tokens one number or an array [L-1]."""
    loss: Loss = Field(default={}, validate_default=True)
    """Objective per token: a kind, a mapping with `kind` and its parameters, or the dotted path of a hook
    `loss(inputs)`, which returns (loss, metrics) and replaces the whole loss."""
    credit: str = "own"
    """Credit assignment among the trajectories of a rollout, before advantages are estimated. own: each trajectory
    keeps its reward; shared: every trajectory gets the mean reward of its rollout; a dotted path: a hook
    `credit(group)`, which returns one reward per trajectory of the group (docs/policies.md)."""
    aggregation: Literal["token", "sample", "prompt", "constant", "sum"] = "token"
    """Unit that has equal weight in the loss of an update (docs/algorithms.md). token: each trained token; sample: each
    rollout; prompt: each group; constant: each rollout, with the sum over its tokens divided by
    rollout.sampling.max_new_tokens; sum: each group, with the sum over its tokens."""
    reference: bool = False
    """Compute and log the KL to a reference model with the initial weights, at the cost of one more forward pass."""
    reference_refresh: Count = 0
    """Number of steps between refreshes of the reference; 0: never. A refresh replaces the reference with the current
    weights and saves it in RUN/reference-NNNNNN for resumed runs."""
    kl_coef: Weight = 0.0
    """Weight of KL(policy || reference) in the loss; 0: no KL term. Needs `reference`."""
    kl_estimator: Literal["k1", "k2", "k3", "low_variance"] = "k3"
    """Estimator of the KL in the loss (`kl_coef`), with d = log policy - log reference. k1: d; k2: d^2 / 2; k3: d +
    exp(-d) - 1; low_variance: k3, clamped as in verl."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the importance ratio, which makes its gradient unbiased."""
    kl_reward_coef: Weight = 0.0
    """Weight of KL(policy || reference) subtracted from each trained token's reward; 0: none. Needs `reference`."""
    kl_reward_estimator: Literal["k1", "k2", "k3", "low_variance"] = "k1"
    """Estimator of the KL in the reward (`kl_reward_coef`), as defined for `kl_estimator`."""
    entropy_coef: Real = 0.0
    """Weight of the entropy bonus in the loss; a positive value raises the policy's entropy, 0 turns it off."""
    teacher: PathText | None = None
    """Hugging Face directory of a teacher with the policy's architecture; null: none. The trainers compute the
    teacher's log-probs of the rollouts (metric kl/teacher), at the cost of one more forward pass and one more copy of
    the weights in host memory."""
    teacher_engine: str | None = None
    """Name of a frozen group of rollout.engines that serves the teacher, instead of `teacher`; null: none. The teacher
    may have any architecture but must have the policy's vocabulary."""
    teacher_engines: dict[str, str] = {}
    """Names of the frozen groups of rollout.engines that serve teachers, by value of the prompts' metadata field
    `teacher_field`, such as {math: math-teacher, code: code-teacher}. Prompts with another value are sent to
    `teacher_engine`; without a `teacher_engine` they are an error."""
    teacher_field: str = "dataset"
    """Metadata field of the prompts that selects among `teacher_engines`; dataset: the name of the prompt's source."""
    teacher_coef: Weight = 0.0
    """On-policy distillation: weight of log teacher - log engine in each token's advantage; 0: none."""
    teacher_top_k: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of most likely tokens for which a served teacher returns log-probs at each trained position, for
    `teacher_kl_coef`; 0: none. Each token takes 8 bytes in memory and in checkpoints."""
    teacher_kl_coef: Weight = 0.0
    """Distribution-level distillation: weight, in the loss, of the KL between teacher and policy, which is computed
    over the teacher's `teacher_top_k` most likely tokens plus one bin for all other tokens; 0: none."""
    teacher_kl: Literal["reverse", "forward"] = "reverse"
    """Direction of the KL that `teacher_kl_coef` weights. reverse: KL(policy || teacher), which `teacher_coef`
    estimates from single tokens; forward: KL(teacher || policy)."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Log-probs in the denominator of the importance ratio. rollout: the engine's; recompute: the trainer's under the
    weights at the start of the step (one more forward pass)."""
    correction: Correction = Correction()
    rejection: Rejection = Rejection()
    opsm_delta: Positive | None = None
    """Threshold of off-policy sequence masking (slime's default: 1e-4). Tokens with a negative advantage are masked if
    the mean of (engine's log-prob - policy's log-prob) over the trained tokens of their sequence exceeds the threshold.
    null: no masking."""
    mask_stale_tokens: bool = False
    """For a trajectory sampled with several weight versions, train only on the tokens of the newest version and use its
    other tokens only as context."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        preset = PRESETS.get(str(values.get("name")), {})
        merged = {**preset, **values}
        correction = values.get("correction")
        base = preset.get("correction")
        if isinstance(correction, dict) and isinstance(base, Correction):
            merged["correction"] = {**dict(base), **correction}
        return merged

    @field_validator("advantages", "loss", mode="before")
    @classmethod
    def _objective(cls, value: object, info: ValidationInfo) -> Objective:
        preset = PRESETS.get(str(info.data.get("name")), {})
        key = str(info.field_name)
        return read_objective(key, value, preset.get(key, {}))

    def _faults(self) -> Faults:
        first: dict[str, tuple[str, str, str]] = {}  # one fault per key, because a second one may demand the opposite
        for code, key, sentence in self._conflicts():
            first.setdefault(key, (f"algorithm.{code}", f"algorithm.{key}", sentence))
        yield from first.values()
        yield from unknown_kind("credit", self.credit, CREDITS)

    def _conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Yields the error code, the key (without the section's name) and the message of each conflict between keys."""
        for key, (used, reason) in NEEDS.items():
            if getattr(self, key) != self.default(key) and not used(self):
                yield (
                    "unused",
                    key,
                    f"algorithm.{key} {reason}, but algorithm.name is {self.name} (loss {self.loss}, advantages "
                    f"{self.advantages}); remove it",
                )
        estimator = self.advantages
        if isinstance(estimator, Grpo) and estimator.eps != Grpo(kind="grpo").eps and not estimator.normalize_std:
            yield (
                "unused",
                "advantages.eps",
                "algorithm.advantages.eps has no effect, because normalize_std is false and advantages are not "
                "divided by the standard deviation; remove it",
            )
        for key in ("kl_coef", "kl_reward_coef"):
            if getattr(self, key) > 0 and not self.reference:
                yield (
                    "reference",
                    key,
                    f"algorithm.{key} is positive but algorithm.reference is false; set algorithm.reference=true",
                )
        if not _rolled_out(self) and estimator.kind != "none":
            yield (
                "sft_advantages",
                "advantages",
                f"algorithm.advantages is {estimator.kind}, but algorithm.loss={self.loss} does not use advantages; "
                f"set algorithm.name={self.loss}",
            )
        learns = estimator.kind != "none" or self.teacher_coef or self.teacher_kl_coef
        if _policy_gradient(self) and not learns:
            yield (
                "no_advantages",
                "advantages",
                "algorithm.advantages is none and algorithm.teacher_coef is 0, so every advantage would be 0; set an "
                "estimator, or algorithm.name=distillation",
            )
        yield from self._teacher_conflicts()
        for key in ("correction", "rejection"):
            if getattr(self, key).active and self.old_logprobs != "recompute":
                yield (
                    "old_logprobs",
                    key,
                    f"algorithm.{key} compares the trainer's old log-probs with the engine's, and "
                    "algorithm.old_logprobs is rollout, so the two would be equal; set "
                    "algorithm.old_logprobs=recompute",
                )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_unbiased:
            yield (
                "kl_estimator",
                "kl_estimator",
                "algorithm.kl_estimator is k1, whose gradient has mean 0 for any reference; use k2 or k3, or "
                "set algorithm.kl_unbiased=true",
            )

    def _teacher_conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Yields the conflicts between keys that concern teachers, in the form that `_conflicts` yields."""
        if self.teacher is not None and self.served_teachers:
            key = "teacher_engine" if self.teacher_engine is not None else "teacher_engines"
            yield (
                "two_teachers",
                key,
                f"algorithm.teacher and algorithm.{key} both set a teacher; remove one of the two",
            )
        if self.teacher_coef and not self.taught:
            yield (
                "no_teacher",
                "teacher_coef",
                "algorithm.teacher_coef is positive but no teacher is set; set algorithm.teacher, "
                "algorithm.teacher_engine or algorithm.teacher_engines",
            )
        if self.teacher_kl_coef and not (self.teacher_top_k and self.served_teachers):
            missing = "teacher_top_k" if self.served_teachers else "teacher_engine"
            yield (
                "teacher_kl",
                missing,
                "algorithm.teacher_kl_coef is positive and needs the most likely tokens of a served teacher; set "
                f"algorithm.{missing} too",
            )

    def default(self, key: str) -> object:
        """Returns the default of `key` for the algorithm `name`."""
        return PRESETS[self.name].get(key, type(self).model_fields[key].default)

    @property
    def group_relative(self) -> bool:
        """True if advantages compare only rollouts of the same group."""
        compared = ("grpo", "rloo", "opo", "gpg", "reinforce_baseline", "gdpo", "gigpo")
        return self.advantages.kind in compared or self.advantages.demonstrated

    @property
    def compares(self) -> bool:
        """True if all advantages of a group with equal rewards are 0: they compare rollouts of a group, and no teacher
        contributes."""
        return self.group_relative and not (self.teacher_coef or self.teacher_kl_coef)

    @property
    def scores(self) -> bool:
        """True if the trained model is a reward model, whose output is a score instead of logits."""
        return self.loss.scores

    @property
    def taught(self) -> bool:
        """True if a teacher computes log-probs of the rollouts, on the trainers or on an engine."""
        return self.teacher is not None or bool(self.served_teachers)

    @property
    def served_teachers(self) -> tuple[str, ...]:
        """Names of the frozen engine groups that serve teachers, without duplicates."""
        names = list(self.teacher_engines.values())
        if self.teacher_engine is not None:
            names.append(self.teacher_engine)
        return tuple(dict.fromkeys(names))

    @property
    def needs_whole_step(self) -> bool:
        """True if advantages, or the loss's selection of tokens, are computed from all trajectories of a step
        together."""
        return self.advantages.whole_step or self.loss.whole_step

    @property
    def hooks(self) -> list[str]:
        """Those of the keys `advantages` and `loss` whose value is a user's hook."""
        return [key for key, records in OBJECTIVES.items() if getattr(self, key).kind not in records]


def _rolled_out(a: Algorithm) -> bool:
    return not a.loss.demonstrated


def _sampled(a: Algorithm) -> bool:
    return _rolled_out(a) and not a.advantages.demonstrated


def _policy_gradient(a: Algorithm) -> bool:
    return _sampled(a) and "loss" not in a.hooks


NEEDS: dict[str, tuple[Callable[[Algorithm], bool], str]] = {
    **dict.fromkeys(
        ("kl_coef", "entropy_coef", "teacher_coef", "teacher_kl_coef"),
        (_policy_gradient, "is a term of policy-gradient losses"),
    ),
    **dict.fromkeys(
        ("reference", "teacher", "teacher_engine", "teacher_engines"),
        (_rolled_out, "needs rollouts sampled by the policy"),
    ),
    "credit": (
        lambda a: _sampled(a) and a.advantages.kind not in ("gdpo", "none", "remax"),
        "needs advantages computed from nothing but the rewards that it assigns",
    ),
    "aggregation": (lambda a: not a.scores, "needs a loss over tokens, not over one score per answer"),
    "kl_reward_coef": (
        lambda a: isinstance(a.advantages, TokenRewards),
        "needs advantages with a reward for every token: reinforce, reinforce_baseline or gae",
    ),
    "kl_reward_estimator": (lambda a: a.kl_reward_coef > 0, "needs a positive algorithm.kl_reward_coef"),
    "kl_estimator": (lambda a: a.kl_coef > 0, "needs a positive algorithm.kl_coef"),
    "kl_unbiased": (lambda a: a.kl_coef > 0, "needs a positive algorithm.kl_coef"),
    "reference_refresh": (lambda a: a.reference, "needs algorithm.reference=true"),
    "teacher_field": (lambda a: bool(a.teacher_engines), "selects among algorithm.teacher_engines"),
    "teacher_kl": (lambda a: a.teacher_kl_coef > 0, "needs a positive algorithm.teacher_kl_coef"),
    "teacher_top_k": (lambda a: a.teacher_kl_coef > 0, "needs a positive algorithm.teacher_kl_coef"),
    "old_logprobs": (_sampled, "needs a loss with an importance ratio"),
    "mask_stale_tokens": (_sampled, "masks sampled tokens"),
    "correction": (_policy_gradient, "weights policy-gradient losses"),
    "rejection": (_policy_gradient, "masks sampled tokens"),
    "opsm_delta": (_policy_gradient, "masks sampled sequences"),
}
"""Keys that have an effect only under a condition, each mapped to the condition and to the phrase that follows the key
in the error message."""
