"""SGLang's server for a Qwen3-MoE imports on a GPU machine without sglang-kernel and flashinfer, and the stand-in's
operations round as the kernels do."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tools.steps import ROOT

STAND_INS = ROOT / "tools" / "gpu" / "stand_ins"
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    "sglang.srt.layers.sampler",
)
"""Modules that a server and its scheduler import on CUDA."""
IMPORTS = """
import importlib, importlib.util, sys
from slimx.extras.cpu.adapters.absent import install
from slimx.adapters.transformers import import_transformers

import_transformers()
inert = install()  # torchvision, where torch is a CPU build
assert "sgl_kernel" not in inert, inert
assert importlib.util.find_spec("flashinfer") is None, "flashinfer is installed: this shows nothing"
from tools.gpu.pretended import pretend_gpu

pretend_gpu()
for module in sys.argv[1:]:
    importlib.import_module(module)

from sglang.srt.layers import layernorm
from sglang.srt.utils import is_cuda
from tools.gpu.kernels import builders

assert is_cuda()
assert all(map(callable, builders(128, 4).values()))
print(layernorm.rmsnorm.__module__, sys.modules["sgl_kernel"].__file__)
"""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, imported for one test."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield importlib.import_module("sgl_kernel")
    for name in loaded():
        del sys.modules[name]


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two sets of rows and a weight in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((16, 64), (16, 64), (64,))
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def reference_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the norm of `values`, computed in float64 and rounded once."""
    return torch.nn.functional.rms_norm(values.double(), values.shape[-1:], weight.double(), 1e-6).bfloat16()


def test_the_norm_is_rounded_once(kernel: ModuleType, rows: tuple[torch.Tensor, ...]) -> None:
    values, out, weight = rows
    before = values.clone()
    assert torch.equal(kernel.rmsnorm(values, weight, 1e-6), reference_norm(values, weight))
    assert torch.equal(values, before)
    assert kernel.rmsnorm(values, weight, 1e-6, out=out) is out
    assert torch.equal(out, reference_norm(values, weight))


def test_the_norm_of_a_sum_is_of_the_sum_before_it_is_rounded(
    kernel: ModuleType, rows: tuple[torch.Tensor, ...]
) -> None:
    values, residual, weight = rows
    exact, rounded = values.double() + residual.double(), values + residual
    assert kernel.fused_add_rmsnorm(values, residual, weight, 1e-6) is None
    assert torch.equal(residual, rounded)
    assert torch.equal(values, reference_norm(exact, weight))
    assert not torch.equal(values, reference_norm(rounded, weight))


def test_experts_are_summed_in_float32(kernel: ModuleType) -> None:
    outputs = torch.randn((16, 4, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.empty((16, 64), dtype=torch.bfloat16)
    kernel.moe_sum_reduce(outputs, out, 2.5)
    assert torch.equal(out, (outputs.double().sum(1) * 2.5).bfloat16())
    assert not torch.equal(out, outputs[:, 0] * 2.5)


def test_other_operations_refuse_to_be_called_and_no_further_name_exists(kernel: ModuleType) -> None:
    for module, name in (("sgl_kernel", "silu_and_mul"), ("sgl_kernel.kvcacheio", "transfer_kv_direct")):
        with pytest.raises(NotImplementedError, match=rf"sgl_kernel\.{name} was called"):
            getattr(importlib.import_module(module), name)(torch.empty(1))
    assert not hasattr(kernel, "topk_softmax")
    with pytest.raises(ImportError):
        importlib.import_module("sgl_kernel.allreduce")


@pytest.mark.slow("imports all of SGLang in a process of its own")
def test_a_server_imports_without_sglang_kernel_and_flashinfer() -> None:
    paths = (ROOT, STAND_INS, *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": "ignore"}
    command = (sys.executable, "-c", IMPORTS, *MODULES)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["sgl_kernel", str(STAND_INS / "sgl_kernel" / "__init__.py")]
