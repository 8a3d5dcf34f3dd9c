"""Adam with a fraction of its moments in host memory, from which they are moved to the device in pieces during each
step.

    host, pinned   [m v][m v][m v][m v]          device   weights, gradients, the other moments
                     |                                       ^
                     +--> one piece --> Adam's own kernel ---+--> back to the host

megatron-core's HybridDeviceOptimizer computes steps on the CPU instead and has a different state, so that other runs
cannot load its checkpoints; without CUDA it moves nothing. With `HostMoments` results are those of the wrapped
optimizer, bit for bit."""

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
"""Maximum size in bytes of the offloaded moments that are on the device at the same time during a step."""


class HostMoments(ExternalState):
    """Wrapper around an Adam optimizer that keeps a fraction of its moments on the host.

    `inner` must have a state like that of apex's FusedAdam: moments per parameter, and one step count per group. All
    other attributes of the wrapper are those of `inner`."""

    def __init__(self, inner: torch.optim.Optimizer, fraction: float, piece_bytes: int = PIECE_BYTES):
        """Selects the parameters whose moments are kept on the host.

        `fraction`: fraction of the moments' bytes, from 0 to 1, rounded up to complete parameters. `piece_bytes`:
        maximum size in bytes of the moments on the device at the same time; a single parameter may exceed it."""
        self.inner = inner
        self.piece_bytes = piece_bytes
        self.moved = _first(inner.param_groups, fraction)
        """Parameters whose moments are on the host, as the keys of a dict, in the order of the groups."""
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
        """Loads an optimizer state without moving moments that belong on the host to the device.

        Transformer Engine's Adam would copy all loaded state to the device, and a second time into its own state."""
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
        """Creates moments filled with zeros in host memory for parameters whose moments belong there but do not exist
        yet."""
        for parameter in self.moved:
            state = self.inner.state[parameter]
            if not state:
                state |= {key: self._memory(parameter, key).zero_() for key in MOMENTS}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Runs one step of the inner optimizer for all parameters, in pieces; on return all copies to the host are
        complete."""
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
                # A group's step is counted once, even if its parameters are in several pieces.
                for index, members in enumerate(piece):
                    if members or not parameters[index]:
                        after[index] = groups[index].get("step")
        finally:
            for group, members, count in zip(groups, parameters, after, strict=True):
                group["params"] = members
                if count is not None:
                    group["step"] = count
            if any(parameter.is_cuda for parameter in self.moved):
                # A checkpoint may read the host copies from now on. Before, one stream kept the order of the pieces,
                # which use the same device memory one after the other.
                torch.cuda.current_stream().synchronize()

    def _pieces(self, groups: list[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
        """Yields the sets of parameters that the inner optimizer updates in one call, each as one list per parameter
        group: first all parameters whose moments stay on the device, then the remaining ones piece by piece."""
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
        """Keeps, within the block, those moments of a piece on the device that belong on the host."""
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
        """Queues copies of the parameters' moments to the host; does nothing for moments that are there already."""
        for parameter in parameters:
            state = self.inner.state[parameter]
            for key in MOMENTS:
                if key in state and state[key] is not self._memory(parameter, key):
                    state[key] = self._memory(parameter, key).copy_(state[key], non_blocking=True)

    def _memory(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Returns the host tensor that stores the moment `key` of a parameter. It has the parameter's dtype: fp32,
        because the optimizer's parameters are fp32 master weights."""
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
