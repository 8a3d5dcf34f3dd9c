"""megatron-core's calls of apex's fused_weight_gradient_mlp_cuda, held against what its C++ (6424da3) takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

FUNCTIONS = {"wgrad_gemm_accum_fp32": (torch.float32,), "wgrad_gemm_accum_fp16": (torch.float16, torch.bfloat16)}
"""The extension's functions, and the dtypes of the gradients that each adds to."""


def extension(called: list[str]) -> SimpleNamespace:
    """Returns the functions of the extension: three tensors by place, which `fused_weight_gradient_dense.cpp` does not
    name, read as rows one after the other, whatever their strides say."""

    def function(name: str, dtypes: tuple[torch.dtype, ...]):
        def add(inputs: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor, /) -> None:
            assert inputs.dtype == outputs.dtype
            assert gradient.dtype in dtypes and (gradient.dtype == torch.float32 or gradient.dtype == inputs.dtype)
            assert all(tensor.is_contiguous() for tensor in (inputs, outputs, gradient))
            assert gradient.shape == (outputs.shape[-1], inputs.shape[-1])
            called.append(name)
            gradient += (outputs.flatten(0, -2).T.float() @ inputs.flatten(0, -2).float()).to(gradient.dtype)

        return add

    return SimpleNamespace(**{name: function(name, dtypes) for name, dtypes in FUNCTIONS.items()})


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16])  # trainer.grad_reduce_in_fp32
@pytest.mark.parametrize("shape", [(6, 1, 8), (6, 8)])
def test_a_layers_gradient_is_added_where_it_is_summed(reduced, shape, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    called: list[str] = []
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", extension(called), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16))
    weight.main_grad = torch.ones(4, 8, dtype=reduced)
    weight.grad_added_to_main_grad = False
    inputs, output_gradient = (
        torch.randn(shape, dtype=torch.bfloat16),
        torch.randn(*shape[:-1], 4, dtype=torch.bfloat16),
    )
    inputs.requires_grad_()
    out = layers.linear_with_grad_accumulation_and_async_allreduce(
        inputs, weight, None, True, False, False, tp_group=SimpleNamespace(size=lambda: 1)
    )
    # The gradient of an output is often an expanded or a transposed tensor.
    (out.transpose(0, -1).contiguous() * output_gradient.transpose(0, -1)).sum().backward()
    expected = output_gradient.flatten(0, -2).T.float() @ inputs.detach().flatten(0, -2).float()
    assert called == ["wgrad_gemm_accum_fp32" if reduced == torch.float32 else "wgrad_gemm_accum_fp16"]
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.main_grad, torch.ones(4, 8, dtype=reduced) + expected.to(reduced))
