"""The operations of exact mode: their values and gradients against plain torch, and bits that a batch cannot change."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from collections.abc import Callable

import mpmath
import pytest
import torch
import torch.nn.functional as F

from slimx.extras.exact import operations as exact
from slimx.extras.exact.operations.contract import fingerprint
from slimx.extras.exact.operations.forward import elementary, reference
from slimx.extras.exact.ordered.reference import fma
from slimx.numerics.attention import packed_attention
from tests.extras.exact.batches import check_attention, check_rows
from tests.extras.exact.stand import DTYPES, assert_same_bits, values
from tests.refusals import refused

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ULP = 2.0**-24
"""Half the distance of fp32 numbers, relative: what one rounding changes at most."""


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.double() - expected) / expected.abs().clamp(min=1e-30)).abs().max())


# Elementary functions -------------------------------------------------------------------------------------------------


def test_multiply_add_rounds_once() -> None:
    """Compares with the C library; two roundings, to fp64 and then to fp32, get the last case wrong."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    dice = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-70, 70, (3, 4000), generator=dice).float())
    a, b, c = (torch.randn(3, 4000, generator=dice) * size).unbind()
    c = torch.where(torch.rand(4000, generator=dice) < 0.5, -(a * b) * (1 + 1e-7 * c / size[2]), c)
    hard = torch.tensor([[2.0**-12 * (1 + 2.0**-18)], [2.0**-12 * (1 - 2.0**-18)], [1 + 2.0**-23]])
    a, b, c = (torch.cat(pair) for pair in zip((a, b, c), hard, strict=True))
    expected = torch.tensor(
        [library.fmaf(*numbers) for numbers in zip(*map(torch.Tensor.tolist, (a, b, c)), strict=True)]
    )
    assert_same_bits(fma(a.double(), b.double(), c), expected)
    twice = (a.double() * b.double() + c.double()).float()
    assert twice[-1] != expected[-1]


def test_functions_are_within_their_bounds() -> None:
    x = torch.linspace(-87.3, 88.7, 100001)
    assert relative(elementary.exp(x), x.double().exp()) < 2 * ULP
    for x in (torch.linspace(1, 2, 10001)[1:], torch.exp(torch.linspace(1, 80, 10001))):
        assert relative(elementary.log(x), x.double().log()) < 2 * ULP
    angle = torch.rand(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2**20
    for found, expected in zip(elementary.sine_and_cosine(angle), (angle.sin(), angle.cos()), strict=True):
        assert (found - expected).abs().max() < 1e-15


# Values and gradients -------------------------------------------------------------------------------------------------


def assert_gradients(
    ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> None:
    """Compares the gradients of a randomly weighted sum with autograd through plain torch in fp64."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    wide = [t.double().requires_grad_() for t in inputs]
    out, expected = ours(*leaves), plain(*wide)
    pull = values(*out.shape, dtype=torch.float32, seed=99)
    for found, true in zip(
        torch.autograd.grad(out, leaves, pull.to(out.dtype)),
        torch.autograd.grad(expected, wide, pull.double()),
        strict=True,
    ):
        assert (found.double() - true).norm() <= 2e-6 * true.norm(), (found.double() - true).norm() / true.norm()


@both_dtypes
def test_linear_is_within_its_bound(dtype: torch.dtype) -> None:
    x, weight = values(40, 300, dtype=dtype, seed=1), values(50, 300, dtype=dtype, seed=2)
    bias = values(50, dtype=dtype, seed=3)
    true, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    for leaves in (1, 4):
        error = (exact.linear(x, weight, leaves, dtype=torch.float32).double() - true).abs()
        assert (error <= (16 + 1 + 300 / 32 + 2) * ULP * size).all()  # a chain, its sum, the blocks, the tree
    assert torch.equal(
        exact.linear(x, weight, bias=bias), (exact.linear(x, weight, dtype=torch.float32) + bias).to(dtype)
    )


def test_gradients_of_linears() -> None:
    x, weight, bias = (values(*n, dtype=torch.float32, seed=k) for k, n in enumerate([(6, 5, 40), (12, 40), (12,)]))
    assert_gradients(lambda x, w, b: exact.linear(x, w, bias=b), F.linear, x, weight, bias)
    assert_gradients(lambda x, w: exact.linear_partial(x, w, 2), F.linear, x, weight)
    experts, counts = values(3, 12, 40, dtype=torch.float32, seed=4), [4, 0, 2]
    assert_gradients(
        lambda x, w: exact.grouped_linear(x, w, counts),
        lambda x, w: torch.cat([F.linear(part, matrix) for part, matrix in zip(x.split(counts), w, strict=True)]),
        x[:, 0],
        experts,
    )


@both_dtypes
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = (values(*n, dtype=dtype, seed=k) for k, n in enumerate([(9, 100), (9, 100), (100,)]))
    found = exact.rms_norm(x.float(), weight.float(), 1e-6)
    true = F.rms_norm(x.double(), (100,), weight.double(), 1e-6)
    assert relative(found, true) < 12 * ULP
    assert torch.equal(exact.rms_norm(x, weight, 1e-6), found.to(dtype))
    normed, total = exact.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and torch.equal(normed, exact.rms_norm(total, weight, 1e-6))
    plain = lambda x, w: F.rms_norm(x, (100,), w, 1e-6)  # noqa: E731
    assert_gradients(lambda x, w: exact.rms_norm(x, w, 1e-6), plain, x.float(), weight.float())


def test_gated_activation() -> None:
    x = values(9, 60, dtype=torch.float32, seed=1, size=4.0)

    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    assert relative(exact.silu_and_mul(x), plain(x.double())) < 8 * ULP
    assert_gradients(exact.silu_and_mul, plain, x)


@pytest.mark.parametrize("dimensions", [24, 64, 128])
def test_rotary_frequencies_are_the_nearest_fp32_to_transformers_formula(dimensions: int) -> None:
    for base in (10000.0, 150000.0, 1e6, 1e7):
        x = torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions
        with mpmath.workprec(300):
            powers = torch.tensor([float(mpmath.mpf(base) ** mpmath.mpf(e)) for e in x.tolist()], dtype=torch.float64)
        found = exact.rope_frequencies(dimensions, base)
        assert_same_bits(found, 1.0 / powers.float(), base)
        assert (found - 1.0 / base**x).abs().max() <= 2 * ULP  # torch's power is a little off


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved: bool) -> None:
    query, key = values(7, 4, 24, dtype=torch.float32, seed=1), values(7, 2, 24, dtype=torch.float32, seed=2)
    frequencies, positions = exact.rope_frequencies(16, 10000.0), torch.tensor([0, 1, 5, 99, 7, 30, 2])
    table = exact.rope_table(frequencies, 100)
    angle = positions.double()[:, None] * frequencies.double()

    def plain(x: torch.Tensor) -> torch.Tensor:
        """Computes with pairs as complex numbers, of the first 16 dimensions of 24."""
        turned, rest = x[..., :16], x[..., 16:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        z = torch.complex(a, b) * turn
        parts = (z.real, z.imag)
        joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
        return torch.cat((joined, rest), dim=-1)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return exact.rope(x, x, table, positions, interleaved=interleaved)[0]

    assert (ours(query).double() - plain(query.double())).abs().max() < 8 * ULP * query.abs().max()
    assert_gradients(ours, plain, query)
    together = exact.rope(query, key, table, positions, interleaved=interleaved)
    assert_same_bits(together[0], ours(query))
    assert_same_bits(together[1], ours(key))


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (6, True)])
def test_attention_of_a_pack(window: int | None, sinks: bool) -> None:
    query, key = values(30, 4, 24, dtype=torch.float32, seed=1), values(30, 2, 24, dtype=torch.float32, seed=2)
    value, sink = values(30, 2, 40, dtype=torch.float32, seed=3), values(4, dtype=torch.float32, seed=4)
    bounds = torch.tensor([0, 9, 10, 30])

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        return (
            exact.attention(query, key, value, bounds, 0.2, window=window, sinks=sink if sinks else None)
            + 0 * sink.sum()
        )

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        out = packed_attention(query, key, value, [9, 1, 20], 0.2, window=window, sinks=sink if sinks else None)
        return out.view(30, 4, 40) + 0 * sink.sum()

    inputs = query, key, value, sink
    assert (ours(*inputs).double() - plain(*(t.double() for t in inputs))).abs().max() < 64 * ULP * value.abs().max()
    assert_gradients(ours, plain, *inputs)


def test_log_probabilities() -> None:
    logits, tokens = values(6, 3000, dtype=torch.float32, seed=1, size=5.0), torch.arange(6) * 400
    true = torch.log_softmax(logits.double(), dim=-1)
    found = exact.log_softmax(logits)
    assert (found.double() - true).abs().max() < 4 * ULP * true.abs().max()
    assert_same_bits(exact.token_logprobs(logits, tokens), found.gather(1, tokens[:, None])[:, 0])
    plain = lambda x: torch.log_softmax(x, dim=-1)  # noqa: E731
    assert_gradients(exact.log_softmax, plain, logits)
    computed = lambda x: exact.token_logprobs(x, tokens)  # noqa: E731
    assert_gradients(computed, lambda x: plain(x).gather(1, tokens[:, None])[:, 0], logits)


def test_combination_of_experts() -> None:
    outputs, weights = values(7, 3, 20, dtype=torch.float32, seed=1), values(7, 3, dtype=torch.float32, seed=2)
    shared = values(7, 20, dtype=torch.float32, seed=3)
    plain = lambda y, w, s: (y * w[..., None]).sum(1) + s  # noqa: E731
    assert (exact.moe_combine(outputs, weights, shared) - plain(outputs, weights, shared)).abs().max() < 1e-5
    assert_gradients(exact.moe_combine, plain, outputs, weights, shared)


# Routing --------------------------------------------------------------------------------------------------------------


def test_softmax_router_chooses_and_weighs_as_transformers_does() -> None:
    hidden, weight = values(50, 64, dtype=torch.float32, seed=1), values(16, 64, dtype=torch.float32, seed=2)
    for renormalize in (True, False):
        weights, ids = exact.route(exact.linear(hidden, weight), 4, renormalize=renormalize)
        scores = torch.softmax(hidden.double() @ weight.double().t(), dim=-1)
        best, module_for = scores.topk(4)
        best = best / best.sum(1, keepdim=True) if renormalize else best
        order = module_for.argsort(1)
        assert torch.equal(ids, module_for.gather(1, order))
        assert relative(weights, best.gather(1, order)) < 1e-5


def test_sigmoid_router_with_bias_and_groups() -> None:
    logits, bias = values(50, 16, dtype=torch.float32, seed=1), values(16, dtype=torch.float32, seed=2)
    weights, ids = exact.route(logits, 4, score="sigmoid", bias=bias, groups=4, top_groups=2, factor=2.5)
    for row in range(50):
        score = torch.sigmoid(logits[row].double())
        choice = (score + bias).view(4, 4)
        groups = choice.topk(2).values.sum(1).topk(2).indices
        allowed = torch.full((4, 4), -torch.inf, dtype=torch.float64)
        allowed[groups] = choice[groups]
        module_for = allowed.flatten().topk(4).indices.sort().values
        assert torch.equal(ids[row], module_for)
        assert relative(weights[row], score[module_for] / score[module_for].sum() * 2.5) < 1e-5


def test_equal_scores_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, 3.0], [2.0] * 6])
    assert exact.route(logits, 3)[1].tolist() == [[1, 2, 3], [0, 1, 2]]
    assert exact.route(logits, 2, score="sigmoid", groups=3, top_groups=1)[1].tolist() == [[2, 3], [0, 1]]


def test_gradients_of_routing() -> None:
    logits = values(20, 8, dtype=torch.float32, seed=1)
    for score, renormalize in itertools.product(("softmax", "sigmoid"), (True, False)):
        ids = exact.route(logits, 3, score=score)[1]

        def plain(x: torch.Tensor, score=score, renormalize=renormalize, ids=ids) -> torch.Tensor:
            scores = (torch.softmax(x, -1) if score == "softmax" else torch.sigmoid(x)).gather(1, ids)
            return 1.5 * (scores / scores.sum(1, keepdim=True) if renormalize else scores)

        ours = lambda x: exact.route(x, 3, score=score, renormalize=renormalize, factor=1.5)[0]  # noqa: B023, E731
        assert_gradients(ours, plain, logits)


# Bits -----------------------------------------------------------------------------------------------------------------


@both_dtypes
def test_a_row_alone_has_the_bits_that_it_has_in_any_batch(dtype: torch.dtype) -> None:
    check_rows(dtype, "cpu", 70)


@both_dtypes
def test_attention_has_the_same_bits_in_packs_chunks_and_caches(dtype: torch.dtype) -> None:
    check_attention(dtype, "cpu")


@both_dtypes
def test_sharded_leaves_sum_to_the_bits_of_one_rank(dtype: torch.dtype) -> None:
    x, weight = values(20, 256, dtype=dtype, seed=1), values(24, 256, dtype=dtype, seed=2)
    whole = exact.linear(x, weight, 8)
    for ranks in (2, 4, 8):
        shares = [t.chunk(ranks, dim=1) for t in (x, weight)]
        parts = [exact.linear_partial(*share, 8 // ranks) for share in zip(*shares, strict=True)]
        assert_same_bits(exact.combine_leaves(parts, dtype), whole, ranks)
    if dtype == torch.float32:  # else the rounding hides it
        assert not torch.equal(exact.linear(x, weight, 2), whole)


def test_the_contract_tells_dtypes_and_leaves_apart_and_holds_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    attested = exact.contract(leaves=4, dtype="bfloat16")
    assert attested == exact.contract(leaves=4, dtype="bfloat16")
    assert attested["leaves"] != exact.contract(leaves=2)["leaves"]
    assert attested["bits"] != exact.contract(leaves=4, dtype="float32")["bits"]
    fingerprint.cache_clear()
    monkeypatch.setattr("slimx.extras.exact.operations.forward.kernel", reference)
    monkeypatch.setattr("slimx.extras.exact.ordered._has_kernels", lambda: True)
    assert exact.contract(leaves=4, dtype="bfloat16") == attested  # torch has the kernels' bits
    fingerprint.cache_clear()
    monkeypatch.setattr(reference, "rms_norm", lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps + 0.001))
    assert exact.contract(leaves=4, dtype="bfloat16")["bits"] != attested["bits"]
    fingerprint.cache_clear()


def test_operations_outside_the_contract_are_refused() -> None:
    x = torch.ones(2, 24)
    for code, about, call in (
        ("exact.leaves", "3", lambda: exact.linear(x, x, 3)),
        ("exact.leaves", "16", lambda: exact.linear(x, x, 16)),
        ("exact.dtype", "torch.bfloat16", lambda: exact.combine_leaves([x.bfloat16(), x.bfloat16()])),
        ("exact.counts", "counts", lambda: exact.grouped_linear(x, [x], [3])),
        ("exact.router_score", "tanh", lambda: exact.route(x, 2, score="tanh")),
    ):
        with refused(code, about=about):
            call()
