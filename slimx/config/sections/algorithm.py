"""Section algorithm: what advantages and loss are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

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
"""Ways to share out the rewards of a rollout, first the default."""


class Algorithm(Section):
    name: Name = "grpo"
    """A published algorithm: default values of the other keys (docs/algorithms.md has the table)."""
    advantages: Advantages = Field(default={}, validate_default=True)
    """Estimator: a kind, or a mapping with `kind` and its parameters; or the dotted path of a hook: advantages(groups)
    -> one number or array [L-1] per trajectory."""
    loss: Loss = Field(default={}, validate_default=True)
    """Objective of a token: a kind, or a mapping with `kind` and its parameters; or the dotted path of a hook:
    loss(inputs) -> (loss, metrics), which is then the whole loss."""
    credit: str = "own"
    """Division of a rollout's rewards among its trajectories, before advantages. own: each keeps its own; shared:
    all have the mean of the rollout's; a dotted path: credit(group) -> a reward for each trajectory of the group
    (docs/policies.md)."""
    aggregation: Literal["token", "sample", "prompt", "constant", "sum"] = "token"
    """The loss of an update is a mean over units. token: all trained tokens; sample: rollouts, each the mean of
    its tokens; prompt: groups, each the mean of the tokens of all its rollouts; constant: rollouts, each the sum of its
    tokens over rollout.sampling.max_new_tokens; sum: groups, each the sum of its tokens."""
    reference: bool = False
    """Log KL to the initial weights (one more forward pass)."""
    reference_refresh: Count = 0
    """Steps after which the reference becomes the present weights, again and again, which are also kept in
    RUN/reference-NNNNNN for a run that is resumed; 0: never."""
    kl_coef: Weight = 0.0
    """Weight of KL(policy || reference) in the loss."""
    kl_estimator: Literal["k1", "k2", "k3", "low_variance"] = "k3"
    """Estimator of the KL in the loss; low_variance: k3 with bounds."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the ratio, so that its gradient is unbiased."""
    kl_reward_coef: Weight = 0.0
    """Weight of KL(policy || reference) in each trained token's reward."""
    kl_reward_estimator: Literal["k1", "k2", "k3", "low_variance"] = "k1"
    """Estimator of the KL in the reward; k1: log policy - log reference."""
    entropy_coef: Real = 0.0
    """Weight of the policy's entropy, which is raised where it is positive."""
    teacher: PathText | None = None
    """Hugging Face directory of a model of the same architecture, whose log-probs of the rollouts are measured
    (kl/teacher; one more forward pass, one more copy of the weights in host memory); null: none."""
    teacher_engine: str | None = None
    """In place of `teacher`, a frozen group of rollout.engines that serves it, by name: a model of any architecture
    with the policy's vocabulary; null: none."""
    teacher_engines: dict[str, str] = {}
    """Several such groups, each by the value of metadata.TEACHER_FIELD whose prompts it teaches, such as {math:
    math-teacher, code: code-teacher}; prompts with other values go to `teacher_engine`, and are refused without one."""
    teacher_field: str = "dataset"
    """Metadata by which `teacher_engines` chooses; dataset: the name of the prompt's source."""
    teacher_coef: Weight = 0.0
    """On-policy distillation: weight of log teacher - log engine in each token's advantage."""
    teacher_top_k: Annotated[int, Field(ge=0, le=1024)] = 0
    """Likeliest tokens whose log-probs a served teacher also gives at each trained position, 8 bytes for each in memory
    and checkpoints; 0: none. For `teacher_kl_coef`."""
    teacher_kl_coef: Weight = 0.0
    """Distillation over distributions: weight of the KL between teacher and policy over the teacher's `teacher_top_k`
    likeliest tokens and all others together as one more."""
    teacher_kl: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(policy || teacher), as the single tokens of `teacher_coef` estimate it; forward: KL(teacher ||
    policy)."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Log-probs that the ratio compares with: rollout: the engine's; recompute: the trainer's own, of the weights
    before the step (one more forward pass)."""
    correction: Correction = Correction()
    rejection: Rejection = Rejection()
    opsm_delta: Positive | None = None
    """Off-policy sequence masking: tokens with a negative advantage do not count where the mean of log engine - log
    policy over their sequence is above this (slime's default: 1e-4); null: all count."""
    mask_stale_tokens: bool = False
    """Train only the newest version's tokens of a trajectory that several weight versions sampled; the older ones are
    context."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = PRESETS.get(str(values.get("name")), {})
        merged = {**preset, **values}
        if isinstance(values.get("correction"), dict):
            merged["correction"] = {**dict(preset.get("correction", ())), **values["correction"]}
        return merged

    @field_validator("advantages", "loss", mode="before")
    @classmethod
    def _objective(cls, value: Any, info: ValidationInfo) -> Objective:
        preset = PRESETS.get(info.data.get("name"), {})
        return read_objective(info.field_name, value, preset.get(info.field_name, {}))

    def _faults(self) -> Faults:
        first: dict[str, tuple[str, str, str]] = {}  # of each key: a second one may ask for the opposite
        for code, key, sentence in self._conflicts():
            first.setdefault(key, (f"algorithm.{code}", f"algorithm.{key}", sentence))
        yield from first.values()
        yield from unknown_kind("credit", self.credit, CREDITS)

    def _conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Yields conflicts between keys, codes and keys without the section's name."""
        for key, (used, where) in NEEDS.items():
            if getattr(self, key) != self.default(key) and not used(self):
                yield (
                    "unused",
                    key,
                    f"algorithm.{key} {where}, and algorithm.name is {self.name} (loss {self.loss}, advantages "
                    f"{self.advantages}); leave it out",
                )
        estimator = self.advantages
        if isinstance(estimator, Grpo) and estimator.eps != Grpo(kind="grpo").eps and not estimator.normalize_std:
            yield (
                "unused",
                "advantages.eps",
                "algorithm.advantages.eps is added to a standard deviation by which nothing is divided here; leave it "
                "out",
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
                f"algorithm.loss={self.loss} looks at no advantages; set algorithm.name={self.loss}",
            )
        learns = estimator.kind != "none" or self.teacher_coef or self.teacher_kl_coef
        if _policy_gradient(self) and not learns:
            yield (
                "no_advantages",
                "advantages",
                "algorithm.advantages is none and algorithm.teacher_coef 0: every advantage would be 0; choose an "
                "estimator, or algorithm.name=distillation",
            )
        if self.teacher is not None and self.served_teachers:
            key = "teacher_engine" if self.teacher_engine is not None else "teacher_engines"
            yield (
                "two_teachers",
                key,
                f"algorithm.teacher and algorithm.{key} name a teacher each; remove one of them",
            )
        if self.teacher_coef and not self.taught:
            yield (
                "no_teacher",
                "teacher_coef",
                "algorithm.teacher_coef is positive but there is no teacher; set algorithm.teacher, "
                "algorithm.teacher_engine or algorithm.teacher_engines",
            )
        if self.teacher_kl_coef and not (self.teacher_top_k and self.served_teachers):
            missing = "teacher_top_k" if self.served_teachers else "teacher_engine"
            yield (
                "teacher_kl",
                missing,
                "algorithm.teacher_kl_coef is positive and compares with the likeliest tokens of a served teacher; set "
                f"algorithm.{missing} too",
            )
        for key in ("correction", "rejection"):
            if getattr(self, key).active and self.old_logprobs != "recompute":
                yield (
                    "old_logprobs",
                    key,
                    f"algorithm.{key} compares the trainer's old log-probs with the engine's, and "
                    "algorithm.old_logprobs is rollout: both would be the same; set algorithm.old_logprobs=recompute",
                )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_unbiased:
            yield (
                "kl_estimator",
                "kl_estimator",
                "algorithm.kl_estimator is k1: in a loss its gradient has mean 0 whatever the reference; use k2 or k3, "
                "or set algorithm.kl_unbiased=true",
            )

    def default(self, key: str) -> Any:
        """The value of `key` under this name where nothing is said."""
        return PRESETS[self.name].get(key, type(self).model_fields[key].default)

    @property
    def group_relative(self) -> bool:
        """True if an advantage is nothing but a comparison within a group."""
        compared = ("grpo", "rloo", "opo", "gpg", "reinforce_baseline", "gdpo", "gigpo")
        return self.advantages.kind in compared or self.advantages.demonstrated

    @property
    def compares(self) -> bool:
        """True if a group whose rollouts all earn the same gives no advantage: no teacher gives one either."""
        return self.group_relative and not (self.teacher_coef or self.teacher_kl_coef)

    @property
    def scores(self) -> bool:
        """True if what is trained is a reward model: a trunk with a score in the place of logits."""
        return self.loss.scores

    @property
    def taught(self) -> bool:
        """True if a teacher scores the rollouts, in the trainers or in an engine."""
        return self.teacher is not None or bool(self.served_teachers)

    @property
    def served_teachers(self) -> tuple[str, ...]:
        """Names of the frozen groups that teach, each once."""
        alone = () if self.teacher_engine is None else (self.teacher_engine,)
        return tuple(dict.fromkeys((*self.teacher_engines.values(), *alone)))

    @property
    def needs_whole_step(self) -> bool:
        """True if advantages, or the tokens that they are for, are known only from the whole step's rows."""
        return self.advantages.whole_step or self.loss.whole_step

    @property
    def hooks(self) -> list[str]:
        """Keys that name functions of the user's."""
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
        (_policy_gradient, "is a term of the policy-gradient losses"),
    ),
    **dict.fromkeys(
        ("reference", "teacher", "teacher_engine", "teacher_engines"),
        (_rolled_out, "is compared with a policy's rollouts"),
    ),
    "credit": (
        lambda a: _sampled(a) and a.advantages.kind not in ("gdpo", "none", "remax"),
        "shares out rewards of trajectories, and advantages come of something else, or are compared with a reward that "
        "has no credit",
    ),
    "aggregation": (lambda a: not a.scores, "weighs tokens, and a reward model has one score for each answer"),
    "kl_reward_coef": (
        lambda a: isinstance(a.advantages, TokenRewards),
        "is for advantages with a reward for every token: reinforce, reinforce_baseline and gae",
    ),
    "kl_reward_estimator": (lambda a: a.kl_reward_coef > 0, "needs a positive algorithm.kl_reward_coef"),
    "kl_estimator": (lambda a: a.kl_coef > 0, "needs a positive algorithm.kl_coef"),
    "kl_unbiased": (lambda a: a.kl_coef > 0, "needs a positive algorithm.kl_coef"),
    "reference_refresh": (lambda a: a.reference, "needs algorithm.reference=true"),
    "teacher_field": (lambda a: bool(a.teacher_engines), "chooses among algorithm.teacher_engines"),
    "teacher_kl": (lambda a: a.teacher_kl_coef > 0, "needs a positive algorithm.teacher_kl_coef"),
    "teacher_top_k": (lambda a: a.teacher_kl_coef > 0, "is for a positive algorithm.teacher_kl_coef"),
    "old_logprobs": (_sampled, "is what the ratio compares with, and there is none"),
    "mask_stale_tokens": (_sampled, "leaves tokens of a policy out"),
    "correction": (_policy_gradient, "weighs the policy-gradient losses"),
    "rejection": (_policy_gradient, "leaves tokens of a policy out"),
    "opsm_delta": (_policy_gradient, "leaves sequences of a policy out"),
}
"""Conditions under which each key has an effect, and their wording."""
