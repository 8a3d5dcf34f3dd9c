"""Moments that visit the device in pieces: the same numbers, whatever the pieces."""

from __future__ import annotations

import pytest
import torch

from slimx.adapters.megatron.layers import Adam
from slimx.extras.optimizer_offload.moments import HostMoments


def parameters() -> list[list[torch.Tensor]]:
    """Returns two groups; the second has a parameter that never gets a gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [[torch.randn(size, requires_grad=True) for size in sizes] for sizes in ((7, 300, 5), (40, 2, 9))]


def run(share: float | None, piece_bytes: int = 1, steps: int = 4) -> tuple[list[torch.Tensor], HostMoments | Adam]:
    groups = parameters()
    adam = Adam([{"params": group, "weight_decay": 0.1 * k, "lr": 0.01} for k, group in enumerate(groups)])
    optimizer = adam if share is None else HostMoments(adam, share, piece_bytes)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in [*groups[0], *groups[1][:2]]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return [p for group in groups for p in group], optimizer


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
@pytest.mark.parametrize("piece_bytes", [1, 500, 2**20])
def test_the_steps_are_those_of_the_optimizer_inside_bit_for_bit(share, piece_bytes):
    expected, plain = run(None)
    found, moved = run(share, piece_bytes)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [group["step"] for group in moved.param_groups] == [group["step"] for group in plain.param_groups] == [4, 4]
    for a, b in zip(expected, found, strict=True):
        for key in plain.state[a]:
            assert torch.equal(plain.state[a][key], moved.state[b][key])


def test_the_share_counts_elements_of_whole_parameters():
    _, moved = run(0.5)
    assert [parameter.numel() for parameter in moved.moved] == [7, 300]


def test_between_steps_moments_lie_in_the_same_host_memory():
    _, moved = run(1.0)
    (first, *_) = moved.moved
    before = moved.state[first]["exp_avg"].data_ptr()
    moved.step()
    assert moved.state[first]["exp_avg"].data_ptr() == before


def test_loaded_moments_are_brought_to_the_host():
    _, source = run(1.0)
    found, target = run(1.0, steps=1)
    target.load_state_dict(source.state_dict())
    for parameter in target.moved:
        if parameter.grad is not None:
            assert target.state[parameter]["exp_avg"] is target._host[parameter]["exp_avg"]
    assert [group["step"] for group in target.param_groups] == [4, 4]
