"""The chunked gated delta rule is the recurrence that defines it, sequence by sequence, in its values and gradients."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.recurrent.numerics.delta_rule import causal_convolution, gated_delta_rule

LENGTHS = [1, 70, 64, 3, 130, 7]
HEADS, KEY, VALUE = 3, 5, 4


def inputs(tokens: int) -> list[torch.Tensor]:
    """Returns query, key (normed as models do), value, decay (logarithm) and rate, fp32."""
    make = torch.Generator().manual_seed(tokens)
    query, key = (torch.randn(tokens, HEADS, KEY, generator=make) for _ in range(2))
    value = torch.randn(tokens, HEADS, VALUE, generator=make)
    decay = -torch.rand(tokens, HEADS, generator=make) / 2
    rate = torch.rand(tokens, HEADS, generator=make)
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    return [query, key, value, decay, rate]


def recurrence(query, key, value, decay, rate, initial=None):
    """Computes one sequence token by token, in the inputs' dtype: outputs and the last state."""
    state = query.new_zeros(HEADS, KEY, VALUE) if initial is None else initial
    out = []
    for q, k, v, g, beta in zip(query, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - known))
        out.append(torch.einsum("hkv,hk->hv", state, q * KEY**-0.5))
    return torch.stack(out), state


def of_sequences(tensors, lengths, initial=None):
    parts = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    results = [recurrence(*part, None if initial is None else initial[k]) for k, part in enumerate(parts)]
    return torch.cat([out for out, _ in results]), torch.stack([state for _, state in results])


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1], [200], [5, 5, 5]], ids=str)
@pytest.mark.parametrize("begun", [False, True])
def test_packed_sequences_are_computed_as_each_of_them_alone(lengths: list[int], begun: bool):
    tensors = inputs(sum(lengths))
    initial = torch.randn(len(lengths), HEADS, KEY, VALUE) if begun else None
    out, states = gated_delta_rule(*tensors, lengths, initial)
    exact = [tensor.double() for tensor in tensors]
    expected, expected_states = of_sequences(exact, lengths, None if initial is None else initial.double())
    assert (out - expected).abs().max() <= 1e-5
    assert (states - expected_states).abs().max() <= 1e-5


def test_gradients_are_those_of_the_recurrence():
    tensors = [tensor.requires_grad_() for tensor in inputs(sum(LENGTHS))]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weight = torch.randn(sum(LENGTHS), HEADS, VALUE)
    (gated_delta_rule(*tensors, LENGTHS)[0] * weight).sum().backward()
    (of_sequences(exact, LENGTHS)[0] * weight).sum().backward()
    for tensor, expected in zip(tensors, exact, strict=True):
        assert (tensor.grad - expected.grad).abs().max() <= 3e-5 * expected.grad.abs().max()


def test_a_cut_sequence_goes_on_from_its_state():
    tensors = inputs(150)
    whole, last = gated_delta_rule(*tensors, [150])
    first, state = gated_delta_rule(*(tensor[:90] for tensor in tensors), [90])
    second, end = gated_delta_rule(*(tensor[90:] for tensor in tensors), [60], state)
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-5)
    assert torch.allclose(end, last, atol=1e-5)


def test_the_convolution_is_torchs_of_each_sequence_alone():
    lengths, channels, width = [1, 5, 2, 9], 6, 4
    x, weight = torch.randn(sum(lengths), channels), torch.randn(channels, width)
    before = torch.randn(len(lengths), channels, width - 1)
    for initial in (None, before):
        found = causal_convolution(x, weight, lengths, initial).split(lengths)
        for number, part in enumerate(x.split(lengths)):
            before = torch.zeros(channels, width - 1) if initial is None else initial[number]
            padded = torch.cat([before, part.T], dim=1)
            expected = torch.nn.functional.conv1d(padded[None], weight[:, None], groups=channels)[0].T
            assert torch.allclose(found[number], expected, atol=1e-6)
