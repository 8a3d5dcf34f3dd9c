"""Shared by the tests of the loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slimx.orchestration import publications
from slimx.orchestration.publications import WeightSource
from tests.unit.orchestration.run_stand import Parts


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Parts of the trained policy; its publisher is themselves."""
    parts = Parts()

    def publisher(source: WeightSource, *_: Any, vacate: Callable[[], Awaitable[None]] | None, **__: Any) -> Parts:
        source.trainers.vacate = vacate
        return source.trainers

    monkeypatch.setattr(publications, "Publisher", publisher)
    return parts
