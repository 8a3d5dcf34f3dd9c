"""DeepEP's import, with packages that have the files of sgl-deep-ep 0.1.2.post1 and of others."""

from __future__ import annotations

import inspect
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slimx.adapters.megatron.imports import prepare_deep_ep
from slimx.trainer.process import prepare_process
from tests.function_call import call_in_process
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


CALLED: set[str] = set()


def stand_in(name: str, **values: Any) -> None:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(values)


def install(directory: str) -> None:
    """Makes the package in `directory` importable without a GPU: stand-ins take the place of its compiled half and its
    search of the machine."""
    sys.path.append(directory)
    os.environ |= {"EP_SUPPRESS_NCCL_CHECK": "1", "CUDA_HOME": directory}
    handle = type("EventHandle", (), {"current_stream_wait": lambda self: None})
    hints = {f"get_{kind}_buffer_size_hint": lambda self, *sizes: 1 for kind in ("nvl", "rdma")}
    config = type("Config", (), {"__init__": lambda self, *sizes: None, **hints})
    stand_in("deep_ep._C", EventHandle=handle, Config=config, init_jit=MagicMock(), topk_idx_t=None)
    stand_in("deep_ep.prerequisites", check_prerequisites=lambda **_: None)
    stand_in("deep_ep.utils.find_pkgs", find_nccl_root=lambda: directory)


def bound(name: str, original: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    values = len(typing.get_args(signature.return_annotation))

    def call(*args: Any, **kwargs: Any) -> Any:
        binding = signature.bind(*args, **kwargs)
        binding.apply_defaults()
        CALLED.add(name)
        answer = compute(**binding.arguments)
        assert not values or len(answer) == values, f"{name} gives {values} values"
        return answer

    return call


def deep_ep_calls(directory: str) -> dict[str, Any]:
    """Runs megatron-core's dispatch and combine against the Python of sgl-deep-ep, whose kernels are copies.

    Every call is bound to the signature of the installed version, and what answers it has as many values as its
    annotation says. Returns what was called, and whether tokens and gradients came through.
    """
    install(directory)
    from slimx.adapters.megatron.imports import prepare_deep_ep

    adapted = prepare_deep_ep(needed=True)
    import deep_ep
    import torch
    from megatron.core.transformer.moe import fused_a2a

    event = deep_ep.EventOverlap()

    def begin(self: Any, group: Any, num_nvl_bytes: int, num_rdma_bytes: int, **_: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    def layout(self: Any, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple:
        counts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        everywhere = torch.ones(len(topk_idx), 1, dtype=torch.bool)
        return torch.tensor([len(topk_idx)]), None, counts, everywhere, event

    def dispatch(self: Any, x: torch.Tensor, handle: Any, topk_idx: Any, topk_weights: Any, **arguments: Any) -> tuple:
        counts = arguments["num_tokens_per_expert"]
        assert (handle is None) == (topk_idx is not None)
        return x.clone(), topk_idx, topk_weights, [] if counts is None else counts.tolist(), ("handle",), event

    def combine(self: Any, x: torch.Tensor, handle: Any, topk_weights: Any, **_: Any) -> tuple:
        assert handle == ("handle",)
        return x.clone(), topk_weights, event

    source, buffer = inspect.getsource(deep_ep.Buffer), deep_ep.Buffer
    kept = all(f"self.{name} = {name}" in source for name in ("group", "num_nvl_bytes", "num_rdma_bytes"))
    for name, compute in (
        ("__init__", begin),
        ("get_dispatch_layout", layout),
        ("dispatch", dispatch),
        ("combine", combine),
    ):
        setattr(buffer, name, bound(name, getattr(buffer, name), compute))
    wait = deep_ep.EventOverlap.current_stream_wait
    deep_ep.EventOverlap.current_stream_wait = bound("current_stream_wait", wait, lambda self, **_: ())
    fused_a2a.set_deepep_num_sms(24)
    group = SimpleNamespace(size=lambda: 2)
    came = []
    for asynchronous in (False, True):
        x = torch.randn(5, 8, requires_grad=True)
        weights = torch.rand(5, 2, requires_grad=True)
        choice = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]])
        how = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        rows, _, probs, counts, handle = fused_a2a.fused_dispatch(x, choice, weights, 4, group, **how)
        out, _ = fused_a2a.fused_combine(rows * 2, group, handle, **how)
        (out.sum() + (probs * 3).sum()).backward()
        came += [torch.equal(out, x * 2), counts.tolist() == [3, 2, 2, 3]]
        came += [torch.equal(x.grad, torch.full_like(x, 2)), torch.equal(weights.grad, torch.full_like(weights, 3))]
    return {
        "adapted": adapted,
        "called": sorted(CALLED),
        "came_through": came,
        "kept": kept,
        "sms": buffer.num_sms,
        "hybrid": fused_a2a.HAVE_HYBRIDEP,
    }


@pytest.mark.slow("needs .venv/deep-ep, imports megatron-core")
def test_megatrons_calls_fit_the_pinned_package() -> None:
    """On sgl-deep-ep's own Python, with copies in the place of its kernels."""
    if not PACKAGE.is_dir():
        missing(f"needs {PACKAGE}: `make test-all` installs it")
    found = call_in_process(deep_ep_calls, str(PACKAGE))
    assert (found["adapted"], found["kept"], found["sms"], found["hybrid"]) == (["deep_ep_events"], True, 24, False)
    assert found["came_through"] == [True] * 8
    assert found["called"] == ["__init__", "combine", "current_stream_wait", "dispatch", "get_dispatch_layout"]
