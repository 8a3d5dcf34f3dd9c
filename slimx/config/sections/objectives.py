"""Objectives of section `algorithm`: losses and advantage estimators with their parameters, and the published
algorithms (presets) that combine them.

The fields of a loss, except `kind`, are the keyword arguments of the function of the same name in
`slimx.algorithms.losses.surrogates`. docs/algorithms.md gives the source of each preset's numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Union

from pydantic import Field

from slimx import entry_points
from slimx.config.rule import Refusal
from slimx.config.section import MOST, Faults, Objective, Positive, Real, Section, Share, Weight, refuse_faults


def _around_one(key: str, low: float, high: float) -> Faults:
    if low >= high or not low <= 1 <= high:
        yield (
            "correction.bounds",
            key,
            f"{key} has the bounds [{low:g}, {high:g}], which do not contain 1, the weight of a token on which "
            "trainer and engine agree; set low <= 1 <= high",
        )


class Correction(Section):
    """Importance weights w = trainer / engine, which correct for the difference between the probabilities of trainer
    and engine. They need `old_logprobs: recompute`, because otherwise the ratio in the loss is already relative to the
    engine's log-probs."""

    kind: Literal["none", "truncate", "icepop"] = "none"
    """Factor by which a token's objective is multiplied. truncate: the importance weight w clamped to [low, high];
    icepop: w if it is in [low, high], otherwise 0; none: 1."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Tokens over which the importance weight w is computed. token: each token alone; sequence: the product over the
    sequence; geometric: the geometric mean over the sequence."""
    low: Weight = 0.0
    """Lower bound on the importance weight w; 0: no lower bound."""
    high: Positive = 2.0
    """Upper bound on the importance weight w."""

    def _faults(self) -> Faults:
        if self.kind == "none" and (self.level, self.low, self.high) != ("token", 0.0, 2.0):
            yield (
                "correction.kind",
                "algorithm.correction.kind",
                "algorithm.correction sets low, high or level, but its kind is none; set algorithm.correction.kind",
            )
        else:
            yield from _around_one("algorithm.correction", self.low, self.high)

    @property
    def active(self) -> bool:
        """True if tokens can have importance weights other than 1."""
        return self.kind != "none"


class Rejection(Section):
    """Rejection of tokens whose importance weight w = trainer / engine is out of bounds, with or without `correction`.

    The objective of a rejected token is 0. The loss is still divided by the number of all trained tokens."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Tokens over which the importance weight w is computed; w must be in [low, high]. token: each token alone;
    sequence: the product over the sequence; geometric: the geometric mean over the sequence; none: no bounds are
    applied."""
    low: Weight = 0.0
    """Lower bound on the importance weight w; 0: no lower bound."""
    high: Positive = 2.0
    """Upper bound on the importance weight w."""
    veto: float = Field(default=0.0, ge=0, lt=1)
    """Threshold of the importance weight: a whole sequence is rejected if the weight of any of its tokens is below it;
    0: no sequence is rejected."""

    def _faults(self) -> Faults:
        if self.level == "none" and (self.low, self.high) != (0.0, 2.0):
            yield (
                "rejection.level",
                "algorithm.rejection.level",
                "algorithm.rejection sets low or high, but its level is none; set algorithm.rejection.level",
            )
        else:
            yield from _around_one("algorithm.rejection", self.low, self.high)

    @property
    def active(self) -> bool:
        """True if this section can reject tokens."""
        return self.level != "none" or self.veto > 0


class Sft(Objective):
    demonstrated: ClassVar[bool] = True


class Clipped(Objective):
    low: Positive = 0.2
    """Lower clip range: the ratio is clipped at 1 - low."""
    high: Positive = 0.2
    """Upper clip range: the ratio is clipped at 1 + high."""


class Clip(Clipped):
    dual: float | None = Field(default=None, gt=1, le=MOST)
    """Bound on the ratio in dual-clip PPO: tokens with a negative advantage have no gradient if their ratio is above
    it; null: no bound."""


class Sapo(Objective):
    tau_positive: Positive = 1.0
    """Temperature tau of the sigmoid (SAPO) for tokens with a positive advantage."""
    tau_negative: Positive = 1.05
    """Temperature tau of the sigmoid (SAPO) for tokens without a positive advantage."""


class ClipCov(Clipped):
    whole_step: ClassVar[bool] = True
    share: Share = 2e-4
    """Fraction of an update's trained tokens to select (Clip-Cov); the objective of a selected token is 0."""
    covariance_low: Real = 1.0
    """Exclusive lower bound on the covariance of log-prob and advantage at tokens that may be selected (Clip-Cov)."""
    covariance_high: Real = 5.0
    """Exclusive upper bound on the covariance of log-prob and advantage at tokens that may be selected (Clip-Cov)."""


class KlCov(Objective):
    whole_step: ClassVar[bool] = True
    share: Share = 2e-4
    """Fraction of an update's trained tokens to select (KL-Cov); selected tokens get the KL penalty."""
    coef: Positive = 1.0
    """Weight of the KL penalty |log ratio| at selected tokens."""


class Grpo(Objective):
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    eps: Positive = 1e-6
    """Number added to the standard deviation by which advantages are divided, to keep the quotient finite."""


class Gigpo(Grpo):
    gamma: Share = 1.0
    """Discount factor per turn, applied to the rewards of later turns; 1: no discount."""
    step_coef: Weight = 1.0
    """Weight of the step-level advantage, which compares turns that start in the same state."""


class Gdpo(Objective):
    weights: dict[str, Real] = {}
    """Weight of each reward part's normalized advantage, by the part's name; parts that are not listed have weight
    1."""
    eps: Positive = 1e-6
    """Number added to the standard deviation by which advantages are divided, to keep the quotient finite."""
    whiten: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the rollouts of a step."""


class TokenRewards(Objective):
    """Parameters of advantage estimators that use a reward for every token."""

    whole_step: ClassVar[bool] = True
    gamma: Share = 1.0
    """Discount factor per trained token, applied to the rewards of later tokens; 1: no discount."""
    whiten: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the trained tokens of a step."""


class Gae(TokenRewards):
    lam: Share = 1.0
    """Lambda of generalized advantage estimation (GAE). 1: full returns; 0: one-step returns with the critic's
    value."""


ADVANTAGES: dict[str, type[Objective]] = {
    "grpo": Grpo,
    "rloo": Objective,
    "opo": Objective,
    "gpg": Grpo,
    "reinforce": TokenRewards,
    "reinforce_baseline": TokenRewards,
    "remax": Objective,
    "gdpo": Gdpo,
    "gigpo": Gigpo,
    "gae": Gae,
    "none": Objective,
}
LOSSES: dict[str, type[Objective]] = {
    "clip": Clip,
    "gspo": Clipped,
    "cispo": Clipped,
    "topr": Objective,
    "sapo": Sapo,
    "clip_cov": ClipCov,
    "kl_cov": KlCov,
    "plain": Objective,
    "sft": Sft,
}
OBJECTIVES = {"advantages": ADVANTAGES, "loss": LOSSES}
"""Parameter classes by key of section `algorithm` and by kind; the first kind of each key is the default."""


def unknown_kind(key: str, kind: str, known: Collection[str]) -> Faults:
    """Yields a fault if `kind`, the value of algorithm.KEY, is neither one of the `known` kinds nor a dotted path."""
    if kind not in known and "." not in kind:
        near = difflib.get_close_matches(kind.lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield (
            "algorithm.unknown",
            f"algorithm.{key}",
            f"algorithm.{key} is {kind}, which is neither one of {', '.join(known)} nor the dotted path of a "
            f"hook{hint}",
        )


def merged_objective(base: object, change: object) -> object:
    """Merges two values of a loss or advantages key, each a kind or a mapping of parameters. If both have the same
    kind, the parameters of `change` override those of `base`; if `change` has another kind, it replaces `base`."""
    if isinstance(base, str):
        base = {"kind": base}
    if isinstance(change, str):
        change = {"kind": change}
    if not isinstance(base, Mapping) or not isinstance(change, Mapping):
        return change
    kind = base.get("kind")
    if kind is not None and change.get("kind", kind) != kind:
        return dict(change)
    return {**base, **change}


def read_objective(key: str, value: object, preset: object = {}) -> Objective:
    """Returns the objective that `value` of algorithm.KEY describes.

    `value`: a kind, a hook's dotted path, or a mapping of parameters with or without a kind. `preset`: a value in the
    same format; parameters that `value` omits are taken from it if the kind has them. Raises Refusal for an unknown
    kind, and for a parameter that the kind does not have."""
    if isinstance(value, Objective):
        return value
    records = OBJECTIVES[key]
    where = f"algorithm.{key}"
    values = _parameters(value)
    defaults = _parameters(preset)
    kind = {"kind": next(iter(records)), **defaults, **values}["kind"]
    if not isinstance(kind, str):
        raise Refusal(
            f"{where}.kind must be a name, not {kind!r}; set one of {', '.join(records)}",
            code="algorithm.unknown",
            about=where,
        )
    refuse_faults(unknown_kind(key, kind, records))
    record = records.get(kind, Objective)
    for name in sorted(map(str, values.keys() - record.model_fields.keys())):
        near = difflib.get_close_matches(name.lower(), record.model_fields, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"remove the parameter, or set another {where}.kind"
        raise Refusal(
            f"{where}.{name} is not a parameter of {kind}, whose parameters are {', '.join(record.model_fields)}; "
            f"{remedy}",
            code="algorithm.unused",
            about=f"{where}.{name}",
        )
    shared = {}
    for name, default in defaults.items():
        if name in record.model_fields:
            shared[name] = default
    return record.model_validate({**shared, **values, "kind": kind})


def _parameters(value: object) -> Mapping[str, object]:
    """Returns `value` if it is a mapping of parameters; for a bare kind, the mapping {"kind": value}."""
    if isinstance(value, Mapping):
        return value
    return {"kind": value}


PRESETS: dict[str, dict[str, object]] = {
    "grpo": {},
    "dr_grpo": {"advantages": {"normalize_std": False}, "aggregation": "constant"},
    "dapo": {"loss": {"high": 0.28}},
    "gspo": {"loss": {"kind": "gspo", "low": 3e-4, "high": 4e-4}, "aggregation": "sample"},
    "cispo": {"loss": {"kind": "cispo", "low": 1.0, "high": 4.0}},
    "topr": {"loss": "topr", "advantages": {"normalize_std": False}},
    "sapo": {"loss": "sapo", "aggregation": "sample"},
    "clip_cov": {"loss": "clip_cov"},
    "kl_cov": {"loss": {"kind": "kl_cov", "share": 2e-3}},
    "rloo": {"advantages": "rloo"},
    "opo": {"advantages": "opo"},
    "gpg": {"advantages": {"kind": "gpg", "normalize_std": False}, "loss": "plain"},
    "reinforce_pp": {"advantages": {"kind": "reinforce", "whiten": True}},
    "reinforce_pp_baseline": {"advantages": {"kind": "reinforce_baseline", "whiten": True}},
    "remax": {"advantages": "remax"},
    "gdpo": {"advantages": {"kind": "gdpo", "whiten": True}},
    "gigpo": {"advantages": {"kind": "gigpo", "gamma": 0.95}},
    "decoupled_ppo": {"old_logprobs": "recompute", "correction": Correction(kind="icepop", high=5.0)},
    "ppo": {"advantages": {"kind": "gae", "whiten": True}},
    "distillation": {"advantages": "none", "teacher_coef": 1.0},
    "sft": {"advantages": "none", "loss": "sft"},
}
"""Settings of section `algorithm` that reproduce published algorithms, by algorithm name. Keys that are not listed keep
the section's defaults."""

for module in entry_points.load_all("slimx.objectives").values():
    ADVANTAGES |= module.ADVANTAGES
    LOSSES |= module.LOSSES
    PRESETS |= module.PRESETS
if TYPE_CHECKING:  # packages add kinds at runtime; code that reads parameters calls `Objective.narrow`
    Advantages = Objective
    Loss = Objective
    Name = str
else:
    Advantages = Union[*ADVANTAGES.values()]
    Loss = Union[*LOSSES.values()]
    Name = Literal[*PRESETS]
