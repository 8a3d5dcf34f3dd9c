"""Direct transfers are refused where their library is missing."""

from __future__ import annotations

import importlib.util

import pytest

from slimx.config.rule import broken, rules_in
from slimx.config.sections.publish import Publish
from slimx.extras.direct import rules


def codes(transport: str) -> list[str]:
    facts = {"publish": Publish(transport=transport), "local_device": "cpu"}
    return [problem.code for problem in broken(rules_in(rules), facts)]


def test_direct_transfers_are_refused_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert codes("nixl") == ["publish.nixl_package"]
    assert codes("auto") == codes("disk") == []
