"""Loads a user's functions for advantages and loss, which the configuration names by dotted paths.

def advantages(groups: list[Group]) -> list[float | np.ndarray]     # one entry per trajectory, group after group
def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from slimx.algorithms.inputs import Loss, LossInputs
from slimx.data.records import Group
from slimx.dotted import load_function
from slimx.errors import SlimxError

Advantages = Callable[[Sequence[Group]], list[float | np.ndarray]]


def load_loss(path: str) -> Loss:
    """Returns the loss hook at the dotted `path`, wrapped in a check of each result. Raises SlimxError if the hook
    cannot be loaded; the wrapper raises SlimxError if a result is invalid."""
    hook = load_function("algorithm.loss", path, ("inputs",), is_async=False)

    def checked(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        result = hook(inputs)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise SlimxError(
                f"algorithm.loss: {path} returned {_kind(result)}; return a tuple of the loss and a dict of metrics",
                code="hook.loss_result",
                about=path,
            )
        loss, metrics = result
        if not isinstance(loss, torch.Tensor) or loss.shape or not loss.requires_grad:
            raise SlimxError(
                f"algorithm.loss: {path} returned {_kind(loss)} as the loss; return a scalar tensor with a gradient, "
                "such as `(inputs.weight * token_losses).sum()`",
                code="hook.loss_tensor",
                about=path,
            )
        for name, value in metrics.items():
            if not isinstance(value, torch.Tensor) or value.shape or value.requires_grad:
                raise SlimxError(
                    f"algorithm.loss: {path} returned {_kind(value)} as metric {name}; return a scalar tensor without "
                    "a gradient (call `.detach()`), because metrics are summed over micro-batches",
                    code="hook.loss_metric",
                    about=name,
                )
        return loss, metrics

    return checked


def load_advantages(path: str) -> Advantages:
    """Returns the advantages hook at the dotted `path`, wrapped in a check of each result. Raises SlimxError if the
    hook cannot be loaded; the wrapper raises SlimxError if a result is invalid."""
    hook = load_function("algorithm.advantages", path, ("groups",), is_async=False)

    def checked(groups: Sequence[Group]) -> list[float | np.ndarray]:
        result = hook(groups)
        trajectories = list(chain(*(group.trajectories for group in groups)))
        if not isinstance(result, Sequence) or len(result) != len(trajectories):
            raise SlimxError(
                f"algorithm.advantages: {path} returned {_kind(result)} for {len(trajectories)} trajectories; return "
                "a list with a number, or an array with one number per predicted token, for each trajectory",
                code="hook.advantages_result",
                about=path,
            )
        for trajectory, value in zip(trajectories, result, strict=True):
            array = np.asarray(value)
            count = trajectory.length - 1
            if array.dtype.kind not in "fiu" or array.shape not in ((), (count,)) or not np.isfinite(array).all():
                raise SlimxError(
                    f"algorithm.advantages: {path} returned {_kind(value)} for trajectory {trajectory.id}; return a "
                    f"finite number, or an array of {count} finite numbers (one per predicted token)",
                    code="hook.advantages_value",
                    about=str(trajectory.id),
                )
        return list(result)

    return checked


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        gradient = " with a gradient" if getattr(value, "requires_grad", False) else ""
        return f"a {type(value).__name__} of shape {list(shape)}{gradient}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"
