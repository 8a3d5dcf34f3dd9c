"""The cases of the chosen tests, so that a fixture that computes all of them at once leaves out the others."""

from __future__ import annotations

from typing import Any

import pytest


def chosen_cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the parameters of each chosen test of the file that requests the fixture."""
    return [
        item.callspec.params
        for item in request.session.items
        if request.fixturename in item.fixturenames and hasattr(item, "callspec") and item.path == request.path
    ]
