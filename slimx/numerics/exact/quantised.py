"""Weights that engine and trainer both hold as block-fp8 codes."""

import torch


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """codes [N, K] float8_e4m3fn and scales [N / block[0], K / block[1]] fp32, both rounded up -> [N, K] of `dtype`.

    The rule of a publication's DEQUANTISE_FP8: code times scale in fp32, rounded once, then rounded to `dtype`. Linears
    then compute with the result.
    """
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: codes.shape[0], : codes.shape[1]]
    return (codes.float() * spread).to(dtype)
