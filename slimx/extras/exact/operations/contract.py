"""Attests the arithmetic of a process by a digest of its results. The attestations of the trainer and of all engines in
a run must be equal."""

import functools
import hashlib

import torch

from slimx.extras.exact.operations.activation import silu_and_mul
from slimx.extras.exact.operations.attention import attention
from slimx.extras.exact.operations.linear import linear
from slimx.extras.exact.operations.logprobs import log_softmax
from slimx.extras.exact.operations.moe import moe_combine, route
from slimx.extras.exact.operations.norm import rms_norm
from slimx.extras.exact.operations.rope import (
    Llama3,
    Rotary,
    Yarn,
    rope,
    rope_frequencies,
    rope_table,
    yarn_lengthening,
)
from slimx.extras.exact.operations.sizes import CONTRACT_VERSION, check_leaves


def contract(*, leaves: int = 1, dtype: str = "bfloat16", device: str = "cpu") -> dict[str, int | str]:
    """Returns the attestation of this process: contract version, leaves, dtype, and a digest of results. `leaves`:
    number of equal parts (leaves) into which each row-parallel sum is cut; `dtype`: dtype of weights and activations.

    The entry `bits` is a digest of the operations' results for fixed inputs on `device`. It differs between machines or
    builds that compute differently, and is the same for a CPU and a GPU that both follow the contract.
    """
    check_leaves(leaves)
    bits = fingerprint(getattr(torch, dtype), device)
    return {"version": CONTRACT_VERSION, "leaves": leaves, "dtype": dtype, "bits": bits}


@functools.cache
def fingerprint(dtype: torch.dtype, device: str = "cpu") -> str:
    """Returns a hexadecimal digest of the bits of all operations' results for fixed inputs of `dtype` on `device`."""
    digest = hashlib.blake2b(digest_size=8)
    with torch.no_grad():
        for result in _results(dtype, torch.device(device)):
            digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _results(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    def values(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
        """Returns pseudorandom values in [-size, size) that are the same on every machine: consecutive integers, hashed
        by Knuth's multiplicative hash and scaled."""
        count = torch.arange(seed, seed + torch.Size(shape).numel(), dtype=torch.int64) * 2654435761 % 2**32
        return ((count - 2**31).double() / 2**31 * size).view(shape).to(device, dtype)

    x = values(9, 72, seed=1)
    weight = values(40, 72, seed=2)
    query = values(5, 4, 24, seed=3, size=3.0)
    key = values(5, 2, 24, seed=4)
    value = values(5, 2, 8, seed=5)
    table = rope_table(rope_frequencies(24, 10000.0), 64).to(device)
    logits = linear(x.float(), weight.float())
    weights, ids = route(logits, 4)
    by_bias, ids_by_bias = route(logits, 4, score="sigmoid", bias=logits[0], groups=4, top_groups=2, factor=2.5)
    scalings: tuple[Llama3 | Yarn, ...] = (Llama3(8.0, 1.0, 4.0, 8192), Yarn(40.0, 4096, 32.0, 1.0, 1.25))
    # Only these values depend on the C library, from which SGLang takes their logarithm, too.
    lengthening = torch.tensor([yarn_lengthening(factor, 1.0) for factor in range(2, 66)], dtype=torch.float64)
    return [
        lengthening,
        *(Rotary(24, 10000.0, scaling).table(64) for scaling in scalings),
        *(
            linear(x, weight),
            linear(x[:3], weight, 4),
            rms_norm(x, weight[0], 1e-6),
            silu_and_mul(values(3, 70, seed=6)),
        ),
        *rope(query, key, table, torch.arange(59, 64, device=device)),
        attention(query, key, value, torch.tensor([0, 2, 5]), 0.3),
        *(weights, ids, by_bias, ids_by_bias, moe_combine(x.view(9, 4, 18), weights)),
        log_softmax(values(2, 1500, seed=7, size=13.0)),
    ]
