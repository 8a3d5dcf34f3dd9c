"""DeepEP's import, with packages that have the files of sgl-deep-ep 0.1.2.post1 and of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.adapters.megatron.imports import prepare_deep_ep
from slimx.trainer.process import prepare_process
from tests.needed import missing
from tests.refusals import refused

PACKAGE = Path(sys.prefix) / "deep-ep"
"""Where `make test-all` puts sgl-deep-ep, outside what an interpreter of the environment imports."""
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
    assert prepare_deep_ep(needed=True) == ["deep_ep_events"]
    from deep_ep.utils import EventHandle, EventOverlap  # megatron.core.transformer.moe.fused_a2a

    assert {EventHandle.__module__, EventOverlap.__module__} == {"deep_ep.utils.event"}


def test_a_build_that_has_both_is_left_alone(package: Path) -> None:
    (package / "utils" / "__init__.py").write_text("from .event import EventHandle, EventOverlap\n")
    assert prepare_deep_ep(needed=True) == []


@pytest.mark.parametrize("line", ["assert False, 'no CUDA home'\n", "raise ImportError('no driver')\n"])
def test_an_import_that_fails_ends_those_who_need_it_and_no_other(package: Path, line: str) -> None:
    (package / "__init__.py").write_text(line)
    with refused("trainer.deep_ep", about="trainer.moe.dispatcher"):
        prepare_deep_ep(needed=True)
    assert prepare_deep_ep(needed=False) == ["no_deep_ep"]
    with pytest.raises(ImportError):
        import deep_ep as _  # noqa: F401


def test_nvshmem_makes_no_nccl_communicators_with_a_flex_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_HOME", "PYTORCH_ALLOC_CONF"):  # set, too: given back after the test
        monkeypatch.setenv(name, "/named" if name == "CUDA_HOME" else "expandable_segments:True")
    monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", "0")
    prepare_process("cuda", shares_layers=False, local=False, deep_ep=True)
    assert os.environ["NVSHMEM_DISABLE_NCCL"] == "0", "a user's own stays"
    monkeypatch.delenv("NVSHMEM_DISABLE_NCCL")
    prepare_process("cuda", shares_layers=False, local=False)
    assert "NVSHMEM_DISABLE_NCCL" not in os.environ
    prepare_process("cuda", shares_layers=False, local=False, deep_ep=True)
    assert os.environ.pop("NVSHMEM_DISABLE_NCCL") == "1"


def test_without_the_package_nothing_is_done() -> None:
    assert prepare_deep_ep(needed=False) == []


@pytest.mark.slow("needs .venv/deep-ep, imports megatron-core")
def test_megatrons_calls_fit_the_pinned_package() -> None:
    """On sgl-deep-ep's own Python, with copies in the place of its kernels (deep_ep_calls.py)."""
    if not PACKAGE.is_dir():
        missing(f"needs {PACKAGE}: `make test-all` installs it")
    command = [sys.executable, "-m", "tests.unit.trainer.deep_ep_calls", str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["adapted"], said["kept"], said["sms"], said["hybrid"]) == (["deep_ep_events"], True, 24, False)
    assert said["came_through"] == [True] * 8
    assert said["called"] == ["__init__", "combine", "current_stream_wait", "dispatch", "get_dispatch_layout"]
