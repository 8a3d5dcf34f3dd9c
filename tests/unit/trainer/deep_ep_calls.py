"""Runs megatron-core's dispatch and combine against the real Python of sgl-deep-ep, whose kernels are copies.

    python -m tests.unit.trainer.deep_ep_calls DIRECTORY

Every call is bound to the signature of the installed version, and what answers it has as many values as its annotation
says. Writes what was called, and whether tokens and gradients came through.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

CALLED: set[str] = set()


def stand_in(name: str, **values: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(values)


def install(directory: str) -> None:
    """Make the package in `directory` importable without a GPU: its compiled half and its look at the machine stand
    aside."""
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
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        CALLED.add(name)
        answer = compute(**given.arguments)
        assert not values or len(answer) == values, f"{name} gives {values} values"
        return answer

    return call


def main() -> None:
    install(sys.argv[1])
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

    def dispatch(self: Any, x: torch.Tensor, handle: Any, topk_idx: Any, topk_weights: Any, **given: Any) -> tuple:
        counts = given["num_tokens_per_expert"]
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
    group = types.SimpleNamespace(size=lambda: 2)
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
    said = {
        "adapted": adapted,
        "called": sorted(CALLED),
        "came_through": came,
        "kept": kept,
        "sms": buffer.num_sms,
        "hybrid": fused_a2a.HAVE_HYBRIDEP,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
