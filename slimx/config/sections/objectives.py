"""Objectives of section algorithm: losses and estimators of advantages, each with its parameters, and the published
algorithms that combine them.

The fields of a loss, but for `kind`, are the keyword arguments of the function of that name in
`slimx.algorithms.losses.surrogates`. Where a preset's number comes from is in docs/algorithms.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from pydantic import Field

from slimx import entry_points
from slimx.config.rule import Refusal
from slimx.config.section import MOST, Faults, Objective, Positive, Real, Section, Share, Weight, refuse_faults


def _around_one(key: str, low: float, high: float) -> Faults:
    if low >= high or not low <= 1 <= high:
        yield (
            "correction.bounds",
            key,
            f"{key} keeps weights in [{low:g}, {high:g}], which does not hold 1, the weight of two sides that agree; "
            "set low <= 1 <= high",
        )


class Correction(Section):
    """Weights for the gap between trainer and engine, w = trainer / engine. They need `old_logprobs: recompute`, since
    otherwise the ratio in the loss already begins at the engine's log-probs."""

    kind: Literal["none", "truncate", "icepop"] = "none"
    """The objective of a token is multiplied by, truncate: w within [low, high]; icepop: w inside the bounds and 0
    outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """W of each token, of its whole sequence (the product), or the geometric mean of the sequence's."""
    low: Weight = 0.0
    """Lower bound of w; 0: none."""
    high: Positive = 2.0
    """Upper bound of w."""

    def _faults(self) -> Faults:
        if self.kind == "none" and (self.level, self.low, self.high) != ("token", 0.0, 2.0):
            yield (
                "correction.kind",
                "algorithm.correction.kind",
                "algorithm.correction has bounds or a level but its kind is none; set algorithm.correction.kind",
            )
        else:
            yield from _around_one("algorithm.correction", self.low, self.high)

    @property
    def active(self) -> bool:
        """True if weights other than 1 are possible."""
        return self.kind != "none"


class Rejection(Section):
    """Rejection of tokens whose w, the same as a correction's, lies outside bounds; it needs no correction beside it.

    A rejected token has no objective. The loss is still divided by all trained tokens."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """The w that must lie within [low, high]: each token's own, its whole sequence's (the product), or the geometric
    mean of the sequence's; none: no bounds."""
    low: Weight = 0.0
    """Lower bound of w; 0: none."""
    high: Positive = 2.0
    """Upper bound of w."""
    veto: float = Field(default=0.0, ge=0, lt=1)
    """A sequence in which any token's w is below this is left out whole; 0: none is."""

    def _faults(self) -> Faults:
        if self.level == "none" and (self.low, self.high) != (0.0, 2.0):
            yield (
                "rejection.level",
                "algorithm.rejection.level",
                "algorithm.rejection has bounds but its level is none; set algorithm.rejection.level to say whose w "
                "they are of",
            )
        else:
            yield from _around_one("algorithm.rejection", self.low, self.high)

    @property
    def active(self) -> bool:
        """True if tokens can be rejected."""
        return self.level != "none" or self.veto > 0


class Sft(Objective):
    demonstrated: ClassVar[bool] = True


class Clipped(Objective):
    low: Positive = 0.2
    """Ratio clipped below 1 - low."""
    high: Positive = 0.2
    """Ratio clipped above 1 + high."""


class Clip(Clipped):
    dual: float | None = Field(default=None, gt=1, le=MOST)
    """A ratio above this pushes a token with a negative advantage no further; null: no bound."""


class Sapo(Objective):
    tau_positive: Positive = 1.0
    """Temperature where the advantage is positive."""
    tau_negative: Positive = 1.05
    """Temperature where it is not."""


class ClipCov(Clipped):
    whole_step: ClassVar[bool] = True
    share: Share = 2e-4
    """Share of an update's trained tokens that is selected."""
    covariance_low: Real = 1.0
    """Selected tokens have a covariance above this."""
    covariance_high: Real = 5.0
    """Selected tokens have a covariance below this."""


class KlCov(Objective):
    whole_step: ClassVar[bool] = True
    share: Share = 2e-4
    """Share of an update's trained tokens that is selected."""
    coef: Positive = 1.0
    """Weight of |log ratio| at selected tokens."""


class Grpo(Objective):
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    eps: Positive = 1e-6
    """Added to the standard deviation."""


class Gigpo(Grpo):
    gamma: Share = 1.0
    """Discount per turn."""
    step_coef: Weight = 1.0
    """Weight of the advantage among equal states."""


class Gdpo(Objective):
    weights: dict[str, Real] = {}
    """Weight of each reward part's normalised advantage; parts not named have 1."""
    eps: Positive = 1e-6
    """Added to the standard deviation."""
    whiten: bool = False
    """Advantages of a step get mean 0 and standard deviation 1 over its rollouts."""


class TokenRewards(Objective):
    """Estimators with a reward for every token."""

    whole_step: ClassVar[bool] = True
    gamma: Share = 1.0
    """Discount per trained token."""
    whiten: bool = False
    """Advantages of a step get mean 0 and standard deviation 1 over its trained tokens."""


class Gae(TokenRewards):
    lam: Share = 1.0
    """Decay of generalised advantage estimation; 1: whole returns, 0: one step and the critic."""


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
"""Classes by key of section algorithm and by kind, first the default kind."""


def unknown_kind(key: str, kind: str, known: Collection[str]) -> Faults:
    """The fault of `kind`, the value of algorithm.KEY, if it is neither known nor a dotted path."""
    if kind not in known and "." not in kind:
        near = difflib.get_close_matches(kind.lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield (
            "algorithm.unknown",
            f"algorithm.{key}",
            f"algorithm.{key} is {kind}, which is none of {', '.join(known)}, and no dotted path of a hook{hint}",
        )


def merged_objective(base: Any, change: Any) -> Any:
    """`base` with `change`, values of a key of `OBJECTIVES` as people write them: parameters are added to those of the
    same kind, and another kind replaces all of them."""
    base, change = ({"kind": value} if isinstance(value, str) else value for value in (base, change))
    if not isinstance(base, Mapping) or not isinstance(change, Mapping):
        return change
    kind = base.get("kind")
    return dict(change) if kind is not None and change.get("kind", kind) != kind else {**base, **change}


def read_objective(key: str, value: Any, preset: str | Mapping[str, Any] = {}) -> Objective:
    """Return the record for `value` of algorithm.KEY: a kind, a hook's dotted path, or a mapping of parameters that may
    have a kind. Defaults come from `preset`, of the same form, for the parameters that this kind has.

    Raises Refusal naming an unknown kind, or a parameter that it does not have."""
    if isinstance(value, Objective):
        return value
    records, where = OBJECTIVES[key], f"algorithm.{key}"
    values, defaults = (part if isinstance(part, Mapping) else {"kind": part} for part in (value, preset))
    kind = {"kind": next(iter(records)), **defaults, **values}["kind"]
    if not isinstance(kind, str):
        raise Refusal(f"{where} needs the name of a kind: {', '.join(records)}", code="algorithm.unknown", about=where)
    refuse_faults(unknown_kind(key, kind, records))
    record = records.get(kind, Objective)
    for name in sorted(map(str, values.keys() - record.model_fields.keys())):
        near = difflib.get_close_matches(name.lower(), record.model_fields, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"leave it out, or set {where}.kind"
        raise Refusal(
            f"{where}.{name} is no parameter of {kind}, which has {', '.join(record.model_fields)}; {remedy}",
            code="algorithm.unused",
            about=f"{where}.{name}",
        )
    shared = {name: default for name, default in defaults.items() if name in record.model_fields}
    return record.model_validate({**shared, **values, "kind": kind})


PRESETS: dict[str, dict[str, Any]] = {
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
"""Values of `algorithm` keys by name; what is not here keeps the section's default."""

for found in entry_points.load_all("slimx.objectives").values():
    ADVANTAGES |= found.ADVANTAGES
    LOSSES |= found.LOSSES
    PRESETS |= found.PRESETS
if TYPE_CHECKING:  # kinds are known only at runtime; code that reads parameters calls `Objective.narrow`
    Advantages = Objective
    Loss = Objective
    Name = str
else:
    Advantages = Union[*ADVANTAGES.values()]
    Loss = Union[*LOSSES.values()]
    Name = Literal[*PRESETS]
