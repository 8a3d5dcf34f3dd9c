"""Exact mode on a GPU: results of a row do not depend on its batch, packings agree, and bits are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.exact.operations.contract import fingerprint
from slimx.extras.exact.operations.forward import kernel_cuda, reference
from slimx.extras.exact.operations.forward.reference import Gathered
from slimx.extras.exact.ordered.reference import product
from tests.extras.exact.batches import check_attention, check_rows
from tests.extras.exact.decoder import Decoder, packed, sequences
from tests.extras.exact.stand import DTYPES, assert_same_bits, values

pytestmark = pytest.mark.skipif(kernel_cuda.missing() is not None, reason=str(kernel_cuda.missing()))
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@both_dtypes
@pytest.mark.parametrize(("columns", "width", "leaves"), [(5, 7, 1), (40, 64, 2), (130, 520, 4)])
def test_linear_has_the_bits_of_the_cpu(
    device: torch.device, dtype: torch.dtype, columns: int, width: int, leaves: int
) -> None:
    counts = [3, 0, 70]
    for size in (1.0, 1e-19):  # 1e-19: products about the least normal number, where denormals count as zeros
        x = values(73, width, dtype=dtype, seed=1, size=size)
        weights = [values(columns, width, dtype=dtype, seed=seed, size=size) for seed in (2, 3, 4)]
        found = kernel_cuda.linear(x.to(device), [w.to(device) for w in weights], counts, leaves, dtype)
        assert_same_bits(found.cpu(), reference.linear(x, weights, counts, leaves, dtype), size)


def test_the_product_of_adapters_has_the_bits_of_the_cpu(device: torch.device) -> None:
    x, weight = (values(*shape, dtype=torch.float32, seed=9) for shape in ((73, 40), (33, 40)))
    found = kernel_cuda.ordered.product(x.to(device), weight.to(device))
    assert_same_bits(found.cpu(), product(x, weight))


@both_dtypes
@pytest.mark.parametrize("width", [2, 30, 1500, 40000])
def test_row_operations_have_the_bits_of_the_cpu(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, weight = values(3, width, dtype=dtype, seed=1, size=8.0), values(width, dtype=dtype, seed=2)
    on, temperature = x.to(device), torch.tensor([1.0, 0.7, 0.3])
    assert_same_bits(kernel_cuda.rms_norm(on, weight.to(device), 1e-6).cpu(), reference.rms_norm(x, weight, 1e-6))
    assert_same_bits(kernel_cuda.silu_and_mul(on).cpu(), reference.silu_and_mul(x))
    found = kernel_cuda.log_normalizer(on, temperature.to(device))
    for value, expected in zip(found, reference.log_normalizer(x, temperature), strict=True):
        assert_same_bits(value.cpu(), expected)


@both_dtypes
def test_attention_has_the_bits_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(3)
    query, key = values(6, 8, 40, dtype=dtype, seed=4), values(300, 2, 40, dtype=dtype, seed=5)
    value, index = values(300, 2, 70, dtype=dtype, seed=6), torch.randperm(300, generator=dice).int()
    length = torch.randint(1, 301, (6,), generator=dice)
    begin = (torch.rand(6, generator=dice) * (301 - length)).long()
    for sinks in (None, values(8, dtype=torch.float32, seed=7)):
        read = Gathered(key, value, index, begin, length)
        expected = reference.attend(query, read, 0.3, sinks)
        there = Gathered(*(t.to(device) for t in read))
        found = kernel_cuda.attend(query.to(device), there, 0.3, None if sinks is None else sinks.to(device))
        assert_same_bits(found.cpu(), expected, sinks is None)


@both_dtypes
def test_every_operation_has_the_bits_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """Also those that are made of torch's own elementwise operations: the digest that both sides of a run attest."""
    assert fingerprint(dtype, str(device)) == fingerprint(dtype)


@both_dtypes
@pytest.mark.parametrize("count", [70, 700])
def test_a_row_alone_has_the_bits_that_it_has_in_any_batch(
    device: torch.device, dtype: torch.dtype, count: int
) -> None:
    check_rows(dtype, device, count)


@both_dtypes
def test_attention_has_the_same_bits_in_packs_chunks_and_caches(device: torch.device, dtype: torch.dtype) -> None:
    check_attention(dtype, device)


@both_dtypes
def test_a_decoder_has_the_same_bits_in_every_packing_and_on_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    model, inputs = Decoder(dtype, device), sequences([40, 1, 130, 17])
    together, bounds = packed(inputs)
    whole = model.logprobs(together.to(device), bounds)
    for first, last, tokens in zip(bounds, bounds[1:], inputs, strict=False):
        assert_same_bits(model.logprobs(tokens.to(device), [0, len(tokens)]), whole[first:last], len(tokens))
    back, _ = packed(inputs[::-1])
    turned = model.logprobs(back.to(device), [0, 17, 147, 148, 188])
    assert_same_bits(turned[-40:], whole[:40], "the first sequence behind the others")
    assert_same_bits(whole.cpu(), Decoder(dtype).logprobs(together, bounds), "the CPU's")
