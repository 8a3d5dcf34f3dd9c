"""The chunked state-space rule is the recurrence that defines it, sequence by sequence, in its values and gradients."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.recurrent.numerics.state_space import state_space_rule

LENGTHS = [1, 70, 64, 3, 130, 7]
HEADS, GROUPS, HEAD, STATE = 6, 2, 5, 4


def inputs(tokens: int) -> list[torch.Tensor]:
    """Returns x, step, decay, key (B), query (C) and skip (D), fp32."""
    make = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HEADS, HEAD, generator=make)
    key, query = (torch.randn(tokens, GROUPS, STATE, generator=make) for _ in range(2))
    step, decay = torch.rand(tokens, HEADS, generator=make) / 2, -torch.rand(HEADS, generator=make)
    return [x, step, decay, key, query, torch.randn(HEADS, generator=make)]


def recurrence(x, step, decay, key, query, skip):
    """Computes one sequence token by token, in the inputs' dtype."""
    state, out = x.new_zeros(HEADS, HEAD, STATE), []
    for one, dt, b, c in zip(x, step, key, query, strict=True):
        b, c = (tensor.repeat_interleave(HEADS // GROUPS, 0) for tensor in (b, c))
        state = state * (dt * decay).exp()[:, None, None] + (dt[:, None] * one)[:, :, None] * b[:, None]
        out.append(torch.einsum("hpn,hn->hp", state, c) + skip[:, None] * one)
    return torch.stack(out)


def of_sequences(tensors, lengths):
    x, step, decay, key, query, skip = tensors
    packed = zip(*(tensor.split(lengths) for tensor in (x, step, key, query)), strict=True)
    return torch.cat([recurrence(x, dt, decay, b, c, skip) for x, dt, b, c in packed])


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1], [200], [5, 5, 5]], ids=str)
def test_packed_sequences_are_computed_as_each_of_them_alone(lengths: list[int]):
    tensors = inputs(sum(lengths))
    expected = of_sequences([tensor.double() for tensor in tensors], lengths)
    torch.testing.assert_close(state_space_rule(*tensors, lengths).double(), expected, rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_recurrence():
    lengths = [1, 70, 3]
    ours, exact = (
        [tensor.to(dtype).requires_grad_() for tensor in inputs(74)] for dtype in (torch.float, torch.double)
    )
    weight = torch.randn(74, HEADS, HEAD, generator=torch.Generator().manual_seed(0))
    (state_space_rule(*ours, lengths) * weight).sum().backward()
    (of_sequences(exact, lengths) * weight.double()).sum().backward()
    for mine, other in zip(ours, exact, strict=True):
        assert (mine.grad - other.grad).abs().max() <= 1e-5 * other.grad.abs().max()


def test_bfloat16_inputs_are_computed_in_fp32():
    x, step, decay, key, query, skip = inputs(70)
    half = [tensor.bfloat16() for tensor in (x, key, query)]
    out = state_space_rule(half[0], step, decay, half[1], half[2], skip, [70])
    wide = state_space_rule(half[0].float(), step, decay, half[1].float(), half[2].float(), skip, [70])
    assert torch.equal(out, wide.bfloat16())
