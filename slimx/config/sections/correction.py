"""Sections algorithm.correction and algorithm.rejection: weights and rejection by trainer over engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slimx.config.rule import Refusal
from slimx.config.section import Positive, Section, Weight


def _hold_one(key: str, low: float, high: float) -> None:
    if low >= high or not low <= 1 <= high:
        raise Refusal(
            f"{key} keeps weights in [{low:g}, {high:g}], which does not hold 1, the weight of two sides that agree; "
            "set low <= 1 <= high",
            code="correction.bounds",
            about=key,
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

    @model_validator(mode="after")
    def _bounds(self) -> Correction:
        if self.kind == "none" and (self.level, self.low, self.high) != ("token", 0.0, 2.0):
            raise Refusal(
                "algorithm.correction has bounds or a level but its kind is none; set algorithm.correction.kind",
                code="correction.kind",
                about="algorithm.correction.kind",
            )
        _hold_one("algorithm.correction", self.low, self.high)
        return self

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

    @model_validator(mode="after")
    def _bounds(self) -> Rejection:
        if self.level == "none" and (self.low, self.high) != (0.0, 2.0):
            raise Refusal(
                "algorithm.rejection has bounds but its level is none; set algorithm.rejection.level to say whose w "
                "they are of",
                code="rejection.level",
                about="algorithm.rejection.level",
            )
        _hold_one("algorithm.rejection", self.low, self.high)
        return self

    @property
    def active(self) -> bool:
        """True if tokens can be rejected."""
        return self.level != "none" or self.veto > 0
