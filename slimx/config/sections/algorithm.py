"""Section algorithm: what advantages and loss are made of."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slimx.config.rule import Refusal
from slimx.config.section import MOST, Count, PathText, Positive, Real, Section, Share, Weight
from slimx.config.sections.correction import Correction, Rejection
from slimx.config.sections.presets import PRESETS, Name

ADVANTAGES = (
    "grpo",
    "rloo",
    "opo",
    "gpg",
    "reinforce",
    "reinforce_baseline",
    "remax",
    "gdpo",
    "gigpo",
    "gae",
    "dpo",
    "none",
)
LOSSES = ("clip", "gspo", "cispo", "topr", "sapo", "clip_cov", "kl_cov", "plain", "bradley_terry", "sft")
WHITENED = ("reinforce", "reinforce_baseline", "gdpo", "gae")
TOKEN_REWARDS = ("reinforce", "reinforce_baseline", "gae")
"""Estimators with a reward for every token."""

CREDITS = ("own", "shared")
"""Ways to share out the rewards of a rollout, first the default."""


class Algorithm(Section):
    name: Name = "grpo"
    """A published algorithm: default values of the other keys (docs/algorithms.md has the table)."""
    advantages: str = Field(
        default="grpo",
        description=f"Estimator: {', '.join(ADVANTAGES)}; or the dotted path of a hook: advantages(groups) -> "
        "one number or array [L-1] per trajectory.",
    )
    loss: str = Field(
        default="clip",
        description=f"Objective of a token: {', '.join(LOSSES)}; or the dotted path of a hook: loss(inputs) -> "
        "(loss, metrics), which is then the whole loss.",
    )
    clip_low: Positive = 0.2
    """Ratio clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """Ratio clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, le=MOST)
    """Loss clip: a ratio above this pushes a token with a negative advantage no further; null: no bound."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    advantage_eps: Positive = 1e-6
    """Added to the standard deviation."""
    reward_weights: dict[str, Real] = {}
    """gdpo: weight of each reward part's normalised advantage; parts not named have 1."""
    credit: str = "own"
    """Division of a rollout's rewards among its trajectories, before advantages. own: each keeps its own; shared:
    all have the mean of the rollout's; a dotted path: credit(group) -> a reward for each trajectory of the group
    (docs/policies.md)."""
    step_coef: Weight = 1.0
    """gigpo: weight of the advantage among equal states."""
    gamma: Share = 1.0
    """Discount: per trained token (gae, reinforce), or per turn (gigpo)."""
    gae_lambda: Share = 1.0
    """gae: decay of generalised advantage estimation; 1: whole returns, 0: one step and the critic."""
    whiten: bool = False
    """Advantages of a step get mean 0 and standard deviation 1 over its trained tokens (gdpo: over its rollouts)."""
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
    sapo_tau_positive: Positive = 1.0
    """sapo: temperature where the advantage is positive."""
    sapo_tau_negative: Positive = 1.05
    """sapo: temperature where it is not."""
    cov_share: Share = 2e-4
    """clip_cov, kl_cov: share of an update's trained tokens that is selected."""
    cov_low: Real = 1.0
    """clip_cov: selected tokens have a covariance above this."""
    cov_high: Real = 5.0
    """clip_cov: and below this."""
    cov_kl_coef: Positive = 1.0
    """kl_cov: weight of |log ratio| at selected tokens."""
    dpo_beta: Positive = 0.1
    """dpo: inverse temperature of the preference."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("name", "grpo")
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        merged = {**preset, **values}
        for key, default in preset.items():
            if isinstance(default, dict) and isinstance(values.get(key), dict):  # single keys of a subsection
                merged[key] = {**default, **values[key]}
        return merged

    @model_validator(mode="after")
    def _known(self) -> Algorithm:
        for key, known in (("advantages", ADVANTAGES), ("loss", LOSSES), ("credit", CREDITS)):
            value = getattr(self, key)
            if value not in known and "." not in value:
                near = difflib.get_close_matches(value.lower(), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise Refusal(
                    f"algorithm.{key} is {value}, which is none of {', '.join(known)}, and no dotted path of a "
                    f"hook{hint}",
                    code="algorithm.unknown",
                    about=f"algorithm.{key}",
                )
        return self

    @model_validator(mode="after")
    def _used(self) -> Algorithm:
        for key, (used, where) in NEEDS.items():
            if getattr(self, key) != self.default(key) and not used(self):
                raise Refusal(
                    f"algorithm.{key} {where}, and {self.says()}; leave it out",
                    code="algorithm.unused",
                    about=f"algorithm.{key}",
                )
        return self

    @model_validator(mode="after")
    def _together(self) -> Algorithm:
        for key in ("kl_coef", "kl_reward_coef"):
            if getattr(self, key) > 0 and not self.reference:
                raise Refusal(
                    f"algorithm.{key} is positive but algorithm.reference is false; set algorithm.reference=true",
                    code="algorithm.reference",
                    about=f"algorithm.{key}",
                )
        if self.advantages == "dpo" and not self.reference:
            raise Refusal(
                "algorithm.advantages is dpo, which compares with a reference; set reference=true",
                code="algorithm.dpo_reference",
                about="algorithm.reference",
            )
        if self.advantages == "dpo" and (self.loss, self.aggregation) != ("plain", "sum"):
            raise Refusal(
                "dpo needs algorithm.advantages=dpo, loss=plain and aggregation=sum together, since its gradient is "
                "that sum; set algorithm.name=dpo and leave these three out",
                code="algorithm.dpo_loss",
                about="algorithm.loss",
            )
        if self.loss in ("sft", "bradley_terry") and self.advantages != "none":
            raise Refusal(
                f"algorithm.loss={self.loss} looks at no advantages; set algorithm.name={self.loss}",
                code="algorithm.sft_advantages",
                about="algorithm.advantages",
            )
        if self.advantages == "none" and _policy_gradient(self) and not (self.teacher_coef or self.teacher_kl_coef):
            raise Refusal(
                "algorithm.advantages is none and algorithm.teacher_coef 0: every advantage would be 0; choose an "
                "estimator, or algorithm.name=distillation",
                code="algorithm.no_advantages",
                about="algorithm.advantages",
            )
        if self.teacher is not None and self.served_teachers:
            key = "algorithm.teacher_engine" if self.teacher_engine is not None else "algorithm.teacher_engines"
            raise Refusal(
                f"algorithm.teacher and {key} name a teacher each; remove one of them",
                code="algorithm.two_teachers",
                about=key,
            )
        if self.teacher_coef and not self.taught:
            raise Refusal(
                "algorithm.teacher_coef is positive but there is no teacher; set algorithm.teacher, "
                "algorithm.teacher_engine or algorithm.teacher_engines",
                code="algorithm.no_teacher",
                about="algorithm.teacher_coef",
            )
        if self.teacher_kl_coef and not (self.teacher_top_k and self.served_teachers):
            missing = "teacher_top_k" if self.served_teachers else "teacher_engine"
            raise Refusal(
                "algorithm.teacher_kl_coef is positive and compares with the likeliest tokens of a served teacher; set "
                f"algorithm.{missing} too",
                code="algorithm.teacher_kl",
                about=f"algorithm.{missing}",
            )
        for key in ("correction", "rejection"):
            if getattr(self, key).active and self.old_logprobs != "recompute":
                raise Refusal(
                    f"algorithm.{key} compares the trainer's old log-probs with the engine's, and "
                    "algorithm.old_logprobs is rollout: both would be the same; set algorithm.old_logprobs=recompute",
                    code="algorithm.old_logprobs",
                    about=f"algorithm.{key}",
                )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_unbiased:
            raise Refusal(
                "algorithm.kl_estimator is k1: in a loss its gradient has mean 0 whatever the reference; use k2 or k3, "
                "or set algorithm.kl_unbiased=true",
                code="algorithm.kl_estimator",
                about="algorithm.kl_estimator",
            )
        return self

    def default(self, key: str) -> Any:
        """The value of `key` under this name where nothing is said."""
        value = PRESETS[self.name].get(key, type(self).model_fields[key].default)
        return Correction(**value) if key == "correction" and isinstance(value, dict) else value

    def says(self) -> str:
        """The algorithm's name, loss and advantages, for a refusal."""
        return f"algorithm.name is {self.name} (loss {self.loss}, advantages {self.advantages})"

    @property
    def group_relative(self) -> bool:
        """True if an advantage is nothing but a comparison within a group."""
        return self.advantages in ("grpo", "rloo", "opo", "gpg", "reinforce_baseline", "gdpo", "gigpo", "dpo")

    @property
    def compares(self) -> bool:
        """True if a group whose rollouts all earn the same gives no advantage: no teacher gives one either."""
        return self.group_relative and not (self.teacher_coef or self.teacher_kl_coef)

    @property
    def scores(self) -> bool:
        """True if what is trained is a reward model: a trunk with a score in the place of logits."""
        return self.loss == "bradley_terry"

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
        return self.advantages in (*TOKEN_REWARDS, "dpo") or self.loss in ("clip_cov", "kl_cov")

    @property
    def hooks(self) -> list[str]:
        """Keys that name functions of the user's."""
        known = {"advantages": ADVANTAGES, "loss": LOSSES}
        return [key for key, names in known.items() if getattr(self, key) not in names]

    @property
    def own_loss(self) -> bool:
        """True if the loss is the user's."""
        return self.loss not in LOSSES


def _loss(*names: str) -> tuple[Callable[[Algorithm], bool], str]:
    return lambda a: a.loss in names, f"belongs to algorithm.loss={' or '.join(names)}"


def _advantages(*names: str) -> tuple[Callable[[Algorithm], bool], str]:
    return lambda a: a.advantages in names, f"belongs to algorithm.advantages={' or '.join(names)}"


def _rolled_out(a: Algorithm) -> bool:
    return a.loss not in ("sft", "bradley_terry")


def _policy_gradient(a: Algorithm) -> bool:
    return _rolled_out(a) and a.advantages != "dpo" and not a.own_loss


NEEDS: dict[str, tuple[Callable[[Algorithm], bool], str]] = {
    "clip_low": _loss("clip", "gspo", "cispo", "clip_cov"),
    "clip_high": _loss("clip", "gspo", "cispo", "clip_cov"),
    "dual_clip": _loss("clip"),
    "sapo_tau_positive": _loss("sapo"),
    "sapo_tau_negative": _loss("sapo"),
    "cov_share": _loss("clip_cov", "kl_cov"),
    "cov_low": _loss("clip_cov"),
    "cov_high": _loss("clip_cov"),
    "cov_kl_coef": _loss("kl_cov"),
    "normalize_std": _advantages("grpo", "gpg", "gigpo"),
    "advantage_eps": (
        lambda a: a.advantages == "gdpo" or (a.advantages in ("grpo", "gpg", "gigpo") and a.normalize_std),
        "is added to a standard deviation by which nothing is divided here",
    ),
    "reward_weights": _advantages("gdpo"),
    "credit": (
        lambda a: _rolled_out(a) and a.advantages not in ("gdpo", "dpo", "none", "remax"),
        "shares out rewards of trajectories, and advantages come of something else, or are compared with a reward that "
        "has no credit",
    ),
    "step_coef": _advantages("gigpo"),
    "gamma": _advantages("gae", "reinforce", "reinforce_baseline", "gigpo"),
    "gae_lambda": _advantages("gae"),
    "whiten": _advantages(*WHITENED),
    "dpo_beta": _advantages("dpo"),
    "aggregation": (lambda a: not a.scores, "weighs tokens, and a reward model has one score for each answer"),
    "kl_reward_coef": _advantages(*TOKEN_REWARDS),
    "kl_reward_estimator": (lambda a: a.kl_reward_coef > 0, "needs a positive algorithm.kl_reward_coef"),
    "kl_coef": (_policy_gradient, "is a term of the policy-gradient losses"),
    "kl_estimator": (lambda a: a.kl_coef > 0, "needs a positive algorithm.kl_coef"),
    "kl_unbiased": (lambda a: a.kl_coef > 0, "needs a positive algorithm.kl_coef"),
    "entropy_coef": (_policy_gradient, "is a term of the policy-gradient losses"),
    "reference": (_rolled_out, "is compared with a policy's rollouts"),
    "reference_refresh": (lambda a: a.reference, "needs algorithm.reference=true"),
    "teacher": (_rolled_out, "is compared with a policy's rollouts"),
    "teacher_engine": (_rolled_out, "is compared with a policy's rollouts"),
    "teacher_engines": (_rolled_out, "is compared with a policy's rollouts"),
    "teacher_field": (lambda a: bool(a.teacher_engines), "chooses among algorithm.teacher_engines"),
    "teacher_coef": (_policy_gradient, "is a term of the policy-gradient losses"),
    "teacher_kl_coef": (_policy_gradient, "is a term of the policy-gradient losses"),
    "teacher_kl": (lambda a: a.teacher_kl_coef > 0, "needs a positive algorithm.teacher_kl_coef"),
    "teacher_top_k": (lambda a: a.teacher_kl_coef > 0, "is for a positive algorithm.teacher_kl_coef"),
    "old_logprobs": (
        lambda a: _rolled_out(a) and a.advantages != "dpo",
        "is what the ratio compares with, and there is none",
    ),
    "mask_stale_tokens": (lambda a: _rolled_out(a) and a.advantages != "dpo", "leaves tokens of a policy out"),
    "correction": (_policy_gradient, "weighs the policy-gradient losses"),
    "rejection": (_policy_gradient, "leaves tokens of a policy out"),
    "opsm_delta": (_policy_gradient, "leaves sequences of a policy out"),
}
"""Conditions under which each key has an effect, and their wording."""
