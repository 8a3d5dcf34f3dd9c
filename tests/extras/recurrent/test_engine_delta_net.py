"""Delta nets on SGLang's CPU path: requests read and leave their own slots of the pools, however their tokens come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slimx.extras.recurrent.adapters.sglang import delta_net

KEYS, VALUES, KEY, VALUE, WIDTH = 2, 4, 6, 5, 4
CHANNELS = 2 * KEYS * KEY + VALUES * VALUE
SLOTS = 7
LENGTHS = {2: 9, 5: 1, 3: 80}
"""Slot of each request -> its tokens."""


class Net:
    """A layer with its pools, and inputs of every request."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
        self.weight, self.decay, self.bias = draw(CHANNELS, WIDTH), draw(VALUES), draw(VALUES)
        self.x = {slot: draw(length, CHANNELS) for slot, length in LENGTHS.items()}
        self.a, self.b = ({slot: draw(length, VALUES) for slot, length in LENGTHS.items()} for _ in range(2))
        # What other requests left: nothing of it may be read, but zeros where a request begins.
        self.conv, self.states = draw(SLOTS, CHANNELS, WIDTH - 1), draw(SLOTS, VALUES, VALUE, KEY)
        self.conv[list(LENGTHS)] = 1e3
        self.states[list(LENGTHS)] = 0
        self.others = [slot for slot in range(SLOTS) if slot not in LENGTHS]

    def heads(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        parts = mixed.split([KEYS * KEY, KEYS * KEY, VALUES * VALUE], dim=-1)
        return [x.view(1, len(x), n, -1) for x, n in zip(parts, (KEYS, KEYS, VALUES), strict=True)]

    def extend(self, spans: dict[int, tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Computes tokens [start, stop) of each slot as parts of prompts: outputs [tokens, heads, dv]."""
        x, a, b = (
            torch.cat([of[slot][slice(*span)] for slot, span in spans.items()]) for of in (self.x, self.a, self.b)
        )
        lengths = [stop - start for start, stop in spans.values()]
        bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        slots = torch.tensor(list(spans), dtype=torch.int32)
        mixed = delta_net.causal_conv1d(
            x.T,
            self.weight,
            None,
            activation="silu",
            conv_states=self.conv,
            has_initial_state=torch.tensor([start > 0 for start, _ in spans.values()]),
            cache_indices=slots,
            query_start_loc=bounds,
            seq_lens_cpu=lengths,
        ).T
        g, beta = delta_net.fused_gdn_gating(self.decay, a, b, self.bias)
        out, *_ = delta_net.chunk_gated_delta_rule(
            *self.heads(mixed),
            g,
            beta,
            initial_state=self.states,
            initial_state_indices=slots,
            cu_seqlens=bounds,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        return dict(zip(spans, out[0].split(lengths), strict=True))

    def decode(self, places: dict[int, int]) -> dict[int, torch.Tensor]:
        """Computes one token of each slot."""
        x, a, b = (torch.stack([of[slot][at] for slot, at in places.items()]) for of in (self.x, self.a, self.b))
        slots = torch.tensor(list(places), dtype=torch.int32)
        mixed = delta_net.causal_conv1d_update(x, self.conv, self.weight, None, "silu", conv_state_indices=slots)
        bounds = torch.arange(len(places) + 1, dtype=torch.int32)
        how: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0}
        out = delta_net.fused_sigmoid_gating_delta_rule_update(
            self.decay, self.bias, *self.heads(mixed), a, b, self.states, slots, bounds, **how
        )
        return dict(zip(places, out[0].split(1), strict=True))


def by_definition(net: Net, slot: int) -> torch.Tensor:
    """Computes the outputs of a request, token by token in fp64."""
    x, weight = net.x[slot].double(), net.weight.double()
    behind = F.pad(x, (0, 0, WIDTH - 1, 0)).unfold(0, WIDTH, 1)
    q, k, v = (heads[0] for heads in net.heads(F.silu((behind * weight).sum(-1))))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(VALUES // KEYS, dim=1) for x in (q, k))
    state, out = torch.zeros(VALUES, KEY, VALUE, dtype=torch.float64), []
    forget = (-net.decay.double().exp() * F.softplus(net.a[slot].double() + net.bias.double())).exp()
    for t, rate in enumerate(net.b[slot].double().sigmoid()):
        state = state * forget[t][:, None, None]
        missing = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], rate[:, None] * missing)
        out.append(torch.einsum("hkv,hk->hv", state, q[t] * KEY**-0.5))
    return torch.stack(out)


@pytest.mark.parametrize("cut", [None, 1, 2, 70], ids=["whole", "after one", "after two", "after a chunk"])
def test_chunked_prompts_and_single_tokens_equal_the_definition(cut: int | None):
    net = Net()
    untouched = net.conv[net.others].clone(), net.states[net.others].clone()
    stops = {slot: length if cut is None else min(cut, length) for slot, length in LENGTHS.items()}
    found = {slot: [out] for slot, out in net.extend({slot: (0, stop) for slot, stop in stops.items()}).items()}
    if rest := {slot: (stop, LENGTHS[slot] - 1) for slot, stop in stops.items() if stop < LENGTHS[slot] - 1}:
        for slot, out in net.extend(rest).items():
            found[slot].append(out)
    if last := {slot: LENGTHS[slot] - 1 for slot in LENGTHS if stops[slot] < LENGTHS[slot]}:
        for slot, out in net.decode(last).items():
            found[slot].append(out)
    for slot, parts in found.items():
        assert (torch.cat(parts) - by_definition(net, slot)).abs().max() <= 1e-5
        last_inputs = F.pad(net.x[slot], (0, 0, WIDTH - 1, 0))[-(WIDTH - 1) :].T
        assert net.conv[slot].equal(last_inputs), "its own last inputs"
    assert net.conv[net.others].equal(untouched[0]) and net.states[net.others].equal(untouched[1])


def test_qwen3_5s_operators_split_and_normalize_projections():
    qkvz, ba, tokens, head = torch.randn(3, CHANNELS + VALUES * VALUE), torch.randn(3, 2 * VALUES), 3, 6
    qkv, z, b, a = delta_net.split_projections(qkvz, ba, KEYS, VALUES, KEY, VALUE)
    assert torch.cat([qkv, z.flatten(1)], dim=-1).equal(qkvz) and torch.cat([b, a], dim=-1).equal(ba)
    assert z.shape == (tokens, VALUES, VALUE) and qkv.shape == (tokens, CHANNELS)
    query, gate, key = torch.randn(tokens, 2, head), torch.randn(tokens, 2, head), torch.randn(tokens, head)
    weights = torch.randn(2, head)
    both = torch.cat([query, gate], dim=-1).flatten(1)
    found = delta_net.norm_gated_heads(both, key, *weights, 1e-6, head, 2)
    wide = zip((query, key), weights, strict=True)
    normed = [x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w) for x, w in wide]
    for one, other in zip(found, (*normed, gate), strict=True):
        assert (one - other.reshape(-1, head)).abs().max() <= 1e-5
    multiplied = query.flatten(1).clone()
    delta_net.multiply_by_sigmoid(multiplied, gate.reshape(-1, 2 * head))
    assert (multiplied - (query * gate.sigmoid()).flatten(1)).abs().max() <= 1e-6


def test_other_norms_under_the_name_of_the_gated_one_are_refused():
    x, weight = torch.randn(3, 8), torch.randn(8)
    how: dict[str, Any] = {"z": x, "eps": 1e-6, "group_size": None, "norm_before_gate": True, "is_rms_norm": True}
    found = delta_net.layer_norm_gated(x, weight, None, **how, activation="swish")
    assert found.equal(delta_net.rms_norm_gated(x, x, weight, None, "silu", eps=1e-6))
    for other in ({"activation": "sigmoid"}, {"norm_before_gate": False}, {"group_size": 4}, {"is_rms_norm": False}):
        with pytest.raises(NotImplementedError):
            delta_net.layer_norm_gated(x, weight, None, **{**how, "activation": "swish", **other})


def test_the_gated_norm_and_the_gated_expert_are_computed_in_fp32():
    x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * F.silu(gate.double())
    assert (delta_net.rms_norm_gated(x, gate, weight, None, "silu", eps=1e-6) - normed).abs().max() <= 1e-5
    assert delta_net.rms_norm_gated(x.bfloat16(), gate, weight, None, "silu").dtype is torch.bfloat16
    others = torch.randn(3, 8)
    expected = others + (x @ weight).sigmoid()[:, None] * gate
    delta_net.add_gated_expert(x, weight, gate, others)
    assert (others - expected).abs().max() <= 1e-6
