"""DeepEP's import, with packages that have the files of sgl-deep-ep 0.1.2.post1 and of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slimx.adapters.megatron import deep_ep
from tests.refusals import refused

EVENTS = "class EventHandle: pass\nclass EventOverlap: pass\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package deep_ep with events; modules of it are forgotten afterwards."""
    (tmp_path / "deep_ep" / "utils").mkdir(parents=True)
    (tmp_path / "deep_ep" / "utils" / "event.py").write_text(EVENTS)
    (tmp_path / "deep_ep" / "__init__.py").write_text("from .utils.event import EventHandle, EventOverlap\n")
    (tmp_path / "deep_ep" / "utils" / "__init__.py").write_text("from .event import EventHandle\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "deep_ep"
    for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
        del sys.modules[name]


def test_megatrons_import_finds_both_events(package: Path) -> None:
    assert deep_ep.install(needed=True) == ["deep_ep_events"]
    from deep_ep.utils import EventHandle, EventOverlap  # megatron.core.transformer.moe.fused_a2a

    assert {EventHandle.__module__, EventOverlap.__module__} == {"deep_ep.utils.event"}


def test_a_build_that_has_both_is_left_alone(package: Path) -> None:
    (package / "utils" / "__init__.py").write_text("from .event import EventHandle, EventOverlap\n")
    assert deep_ep.install(needed=True) == []


@pytest.mark.parametrize("line", ["assert False, 'no CUDA home'\n", "raise ImportError('no driver')\n"])
def test_an_import_that_fails_ends_those_who_need_it_and_no_other(package: Path, line: str) -> None:
    (package / "__init__.py").write_text(line)
    with refused("trainer.deep_ep", about="trainer.moe.dispatcher"):
        deep_ep.install(needed=True)
    assert deep_ep.install(needed=False) == ["no_deep_ep"]
    with pytest.raises(ImportError):
        import deep_ep as _  # noqa: F401


def test_without_the_package_nothing_is_done() -> None:
    assert deep_ep.install(needed=False) == []
