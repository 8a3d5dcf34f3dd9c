"""Objectives of preference learning, with their settings in section algorithm, and the presets that `algorithm.name`
selects."""

from __future__ import annotations

from typing import ClassVar

from slimx.config.section import Objective, Positive
from slimx.json_types import Json


class Dpo(Objective):
    demonstrated: ClassVar[bool] = True
    whole_step: ClassVar[bool] = True
    beta: Positive = 0.1
    """Inverse temperature: factor that scales a difference of log-ratios to a pair's margin. Larger values keep the
    policy closer to the reference."""


class BradleyTerry(Objective):
    demonstrated: ClassVar[bool] = True
    scores: ClassVar[bool] = True


ADVANTAGES: dict[str, type[Objective]] = {"dpo": Dpo}
LOSSES: dict[str, type[Objective]] = {"bradley_terry": BradleyTerry}
PRESETS: dict[str, Json] = {
    "dpo": {"advantages": "dpo", "loss": "plain", "aggregation": "sum", "reference": True},
    "bradley_terry": {"advantages": "none", "loss": "bradley_terry"},
}
