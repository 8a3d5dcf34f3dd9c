"""Layouts of the tests that compare trainers of several ranks with one rank and with transformers."""

from __future__ import annotations

import pytest

from slimx.config.sections.trainer import Trainer
from slimx.layout.ranks import sizes_of

LAYOUTS = {
    "single": {"world_size": 1},
    "DP2": {"world_size": 2},
    "EP2": {"world_size": 2, "expert": 2},
    "TP2": {"world_size": 2, "tensor": 2},
    "PP2": {"world_size": 2, "pipeline": 2},
    "EP2xTP2": {"world_size": 4, "tensor": 2, "expert": 2},
}
SIZES = {name: sizes_of(Trainer(**layout)) for name, layout in LAYOUTS.items()}
SLOW = ("DP2", "TP2", "PP2", "EP2xTP2")
"""EP2 has two data-parallel ranks. In `make test` test_invariance has gradients in every kind of split, and
test_checkpoints a checkpoint of DP2 in TP2, pipeline stages, context parallel and, refused, expert parallel ranks."""
ALL = [pytest.param(name, marks=[pytest.mark.slow("full grid of layouts")] if name in SLOW else []) for name in LAYOUTS]
SEVERAL = ALL[1:]
