"""Adam whose moments (a share of them) lie in host memory and visit the device piece by piece.

    host, pinned   [m v][m v][m v][m v]          device   weights, gradients, the other moments
                     |                                       ^
                     +--> one piece --> Adam's own kernel ---+--> back to the host

megatron-core's HybridDeviceOptimizer steps on the CPU instead and keeps another state: its checkpoints fit no other
run, and without CUDA it moves nothing. Here the numbers are those of the optimizer inside, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slimx.trainer.device.offload import MOMENTS
from slimx.trainer.step.optimizer import ExternalState

PIECE_BYTES = 512 * 2**20
"""Moments on the device at once."""


class HostMoments(ExternalState):
    """Takes the place of `inner`, an Adam whose state has the shape of apex's FusedAdam (moments per parameter, a step
    per group); all else is answered by `inner`."""

    def __init__(self, inner: torch.optim.Optimizer, share: float, piece_bytes: int = PIECE_BYTES):
        """`share`: of the moments' bytes, 0 to 1; whole parameters, until it is reached."""
        self.inner, self.piece_bytes = inner, piece_bytes
        self.moved = _first(inner.param_groups, share)
        """Parameters whose moments lie on the host."""
        self._host: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state`; what belongs on the host never visits the device.

        Transformer Engine's Adam copies what it loads to the device, and a second time into its own state."""
        numbers = (number for group in state["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.inner.param_groups for parameter in group["params"])
        hosted = {number: p for number, p in zip(numbers, parameters, strict=True) if p in self.moved}
        values = state["state"]
        stays = {number: value for number, value in values.items() if number not in hosted}
        self.inner.load_state_dict({**state, "state": stays})
        for number, parameter in hosted.items():
            if number in values:
                own = self.inner.state[parameter] = dict(values[number])
                for key in own.keys() & set(MOMENTS):
                    own[key] = self._memory(parameter, key).copy_(own[key])

    def make_state(self) -> None:
        """Give parameters whose moments belong on the host, and that have none yet, zeros there."""
        for parameter in self.moved:
            state = self.inner.state[parameter]
            if not state:
                state |= {key: self._memory(parameter, key).zero_() for key in MOMENTS}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of the inner optimizer for every parameter, in pieces; returns when the moments are back."""
        groups = self.inner.param_groups
        whole = [group["params"] for group in groups]
        before = [group.get("step") for group in groups]
        after = list(before)
        try:
            for piece in self._pieces(whole):
                for group, parameters, count in zip(groups, piece, before, strict=True):
                    group["params"] = parameters
                    if count is not None:
                        group["step"] = count
                    else:
                        group.pop("step", None)
                with self._visiting([p for parameters in piece for p in parameters if p in self.moved]):
                    self.inner.step()
                # A group counts its step once, whichever pieces its parameters came in.
                after = [
                    group.get("step") if parameters or not all_ else count
                    for group, parameters, all_, count in zip(groups, piece, whole, after, strict=True)
                ]
        finally:
            for group, parameters, count in zip(groups, whole, after, strict=True):
                group["params"] = parameters
                if count is not None:
                    group["step"] = count
            if any(parameter.is_cuda for parameter in self.moved):
                # A checkpoint may read the host's copies from here on. Until then pieces follow one another on the
                # stream, in whose order the device's memory of one becomes that of the next.
                torch.cuda.current_stream().synchronize()

    def _pieces(self, whole: list[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
        """Parameters by group: first those whose moments stay on the device, then pieces of the others."""
        yield [[p for p in parameters if p not in self.moved] for parameters in whole]
        piece: list[list[torch.Tensor]] = [[] for _ in whole]
        room = self.piece_bytes
        for number, parameters in enumerate(whole):
            for parameter in parameters:
                if parameter not in self.moved:
                    continue
                if room < _bytes(parameter) and any(piece):
                    yield piece
                    piece, room = [[] for _ in whole], self.piece_bytes
                piece[number].append(parameter)
                room -= _bytes(parameter)
        if any(piece):
            yield piece

    @contextmanager
    def _visiting(self, parameters: list[torch.Tensor]) -> Iterator[None]:
        for parameter in parameters:
            state = self.inner.state[parameter]
            for key in MOMENTS:
                if key in state:
                    state[key] = state[key].to(parameter.device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            self._rest(parameters)

    def _rest(self, parameters: Any) -> None:
        """Queue the way of moments to the host; those that lie there stay."""
        for parameter in parameters:
            state = self.inner.state[parameter]
            for key in MOMENTS:
                if key in state and state[key] is not self._memory(parameter, key):
                    state[key] = self._memory(parameter, key).copy_(state[key], non_blocking=True)

    def _memory(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """The host memory of a moment, fp32 as main weights are."""
        kept = self._host.setdefault(parameter, {})
        if key not in kept:
            kept[key] = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
        return kept[key]


def _first(groups: list[dict[str, Any]], share: float) -> dict[torch.Tensor, None]:
    parameters = [parameter for group in groups for parameter in group["params"]]
    room = share * sum(parameter.numel() for parameter in parameters)
    out: dict[torch.Tensor, None] = {}
    for parameter in parameters:
        if room <= 0:
            break
        out[parameter] = None
        room -= parameter.numel()
    return out


def _bytes(parameter: torch.Tensor) -> int:
    return len(MOMENTS) * 4 * parameter.numel()
