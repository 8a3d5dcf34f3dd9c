"""Dtypes in which weights travel: the trainer's, the engine's, and codes with scales in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimx.layout.number_formats import Quantisation

ModelDtype = Literal["float32", "bfloat16"]

ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtype of the trainer's weights, dtype of the engine's, and how those that the family quantises are quantised."""

    trainer: ModelDtype
    engine: ModelDtype
    quantisation: Quantisation | None = None
