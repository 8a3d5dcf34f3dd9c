"""A model that is nothing but its parameters, for tests of how they are matched with a weight table."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slimx.layout.parts import Part


def bare_module(parts: Iterable[Part]) -> torch.nn.Module:
    """Returns a tree of bare modules with these parameters; the router's bias is a buffer, as in megatron-core."""
    root = torch.nn.Module()
    for part in parts:
        *path, name = part.name.split(".")
        place = root
        for step in path:
            if step not in dict(place.named_children()):
                place.add_module(step, torch.nn.Module())
            place = place.get_submodule(step)
        if name == "expert_bias":
            place.register_buffer(name, torch.zeros(part.shape))
        else:
            place.register_parameter(name, torch.nn.Parameter(torch.zeros(part.shape)))
    return root
