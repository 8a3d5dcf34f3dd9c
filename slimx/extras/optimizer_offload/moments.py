"""Adam with a fraction of its moments in host memory, which move to the device piece by piece.

    host, pinned   [m v][m v][m v][m v]          device   weights, gradients, the other moments
                     |                                       ^
                     +--> one piece --> Adam's own kernel ---+--> back to the host

megatron-core's HybridDeviceOptimizer steps on the CPU instead and has a different state: its checkpoints fit no other
run, and without CUDA it moves nothing. Here results are those of the wrapped optimizer, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from slimx.trainer.device.offload import MOMENTS
from slimx.trainer.step.optimizer import ExternalState

PIECE_BYTES = 512 * 2**20
"""Bytes of host moments on the device at once."""


class HostMoments(ExternalState):
    """Wrapper around `inner` that keeps moments on the host. `inner`: an Adam with state shaped like apex's FusedAdam
    (moments per parameter, a step per group); other attributes are those of `inner`."""

    def __init__(self, inner: torch.optim.Optimizer, fraction: float, piece_bytes: int = PIECE_BYTES):
        """Chooses the parameters. `fraction`: share of the moments' bytes to keep on the host, 0 to 1, rounded up to
        complete parameters."""
        self.inner = inner
        self.piece_bytes = piece_bytes
        self.moved = _first(inner.param_groups, fraction)
        """Parameters whose moments are on the host."""
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
    def state(self) -> defaultdict[torch.Tensor, Any]:
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.inner.state = state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads `state`; moments that belong on the host never move to the device.

        Transformer Engine's Adam copies loaded state to the device, and a second time into its own state."""
        hosted = {}
        for saved, group in zip(state["param_groups"], self.inner.param_groups, strict=True):
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                if parameter in self.moved:
                    hosted[index] = parameter
        values = state["state"]
        on_device = {index: value for index, value in values.items() if index not in hosted}
        self.inner.load_state_dict({**state, "state": on_device})
        for index, parameter in hosted.items():
            if index in values:
                loaded = dict(values[index])
                for key in loaded.keys() & set(MOMENTS):
                    loaded[key] = self._memory(parameter, key).copy_(loaded[key])
                self.inner.state[parameter] = loaded

    def make_state(self) -> None:
        """Gives parameters whose moments belong on the host, and that have none yet, zeros there."""
        for parameter in self.moved:
            state = self.inner.state[parameter]
            if not state:
                state |= {key: self._memory(parameter, key).zero_() for key in MOMENTS}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Runs one step of the inner optimizer for every parameter, in pieces; returns when the moments are back."""
        groups = self.inner.param_groups
        parameters = []
        before = []
        for group in groups:
            parameters.append(group["params"])
            before.append(group.get("step"))
        after = list(before)
        try:
            for piece in self._pieces(parameters):
                for group, members, count in zip(groups, piece, before, strict=True):
                    group["params"] = members
                    if count is not None:
                        group["step"] = count
                    else:
                        group.pop("step", None)
                with self._visiting(piece):
                    self.inner.step()
                # A group counts its step once, in however many pieces its parameters came.
                for index, members in enumerate(piece):
                    if members or not parameters[index]:
                        after[index] = groups[index].get("step")
        finally:
            for group, members, count in zip(groups, parameters, after, strict=True):
                group["params"] = members
                if count is not None:
                    group["step"] = count
            if any(parameter.is_cuda for parameter in self.moved):
                # A checkpoint may read the host copies from now on. Until then pieces follow one another on the stream,
                # where device memory of one is reused by the next.
                torch.cuda.current_stream().synchronize()

    def _pieces(self, groups: list[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
        """Yields parameters by group: first those whose moments stay on the device, then pieces of the others."""
        on_device: list[list[torch.Tensor]] = [[] for _ in groups]
        for index, parameters in enumerate(groups):
            on_device[index] += [parameter for parameter in parameters if parameter not in self.moved]
        yield on_device
        piece: list[list[torch.Tensor]] = [[] for _ in groups]
        room = self.piece_bytes
        for index, parameters in enumerate(groups):
            for parameter in parameters:
                if parameter not in self.moved:
                    continue
                if room < _bytes(parameter) and any(piece):
                    yield piece
                    piece = [[] for _ in groups]
                    room = self.piece_bytes
                piece[index].append(parameter)
                room -= _bytes(parameter)
        if any(piece):
            yield piece

    @contextmanager
    def _visiting(self, piece: list[list[torch.Tensor]]) -> Iterator[None]:
        """Moves the moments of a piece to the device inside the block, if they belong on the host."""
        parameters = [parameter for parameter in chain(*piece) if parameter in self.moved]
        for parameter in parameters:
            state = self.inner.state[parameter]
            for key in MOMENTS:
                if key in state:
                    state[key] = state[key].to(parameter.device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            self._rest(parameters)

    def _rest(self, parameters: Iterable[torch.Tensor]) -> None:
        """Queues the copies of moments to the host; moments that are there stay."""
        for parameter in parameters:
            state = self.inner.state[parameter]
            for key in MOMENTS:
                if key in state and state[key] is not self._memory(parameter, key):
                    state[key] = self._memory(parameter, key).copy_(state[key], non_blocking=True)

    def _memory(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Returns the host memory of a moment, fp32 like main weights."""
        moments = self._host.setdefault(parameter, {})
        if key not in moments:
            moments[key] = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
        return moments[key]


def _first(groups: list[dict[str, Any]], fraction: float) -> dict[torch.Tensor, None]:
    parameters = list(chain(*(group["params"] for group in groups)))
    room = fraction * sum(parameter.numel() for parameter in parameters)
    out: dict[torch.Tensor, None] = {}
    for parameter in parameters:
        if room <= 0:
            break
        out[parameter] = None
        room -= parameter.numel()
    return out


def _bytes(parameter: torch.Tensor) -> int:
    return len(MOMENTS) * 4 * parameter.numel()
