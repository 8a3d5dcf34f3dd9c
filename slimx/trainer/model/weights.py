"""This rank's weights by name: loading from a Hugging Face directory, and copies on the host that can temporarily
replace the weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from slimx.errors import SlimxError
from slimx.layout.form import AttachedForm
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part, matrix
from slimx.layout.patterns import names_of, select
from slimx.models.families import ModelSpec
from slimx.models.files.reader import CheckpointReader, check_finite

HostCopy = dict[str, torch.Tensor]
"""Host copies of a rank's parameters and of its buffers in the weight table, keyed by their local names in the rank's
modules."""


class Weights:
    """Local parameters of one rank, matched with the weight table, which maps parameters to tensors of a Hugging Face
    directory."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        spec: ModelSpec,
        layout: MegatronLayout,
        rank: int,
        *,
        excluded: Collection[str] = (),
        attached: AttachedForm | None = None,
    ):
        """Matches the parameters of `chunks`, this rank's modules (several only with virtual pipeline stages), with the
        weight table of `spec`. `excluded`: names of parameters that no checkpoint contains, such as a value head; they
        are ignored. `attached`: attached parameters, as returned by `build_model`. Raises SlimxError if table and model
        differ."""
        self.spec = spec
        self.derived: list[Callable[[], None]] = []
        """Functions that recompute values derived from the parameters; `changed` calls them after the parameters were
        changed."""
        self._current: HostCopy = {}
        self.parts: list[Part] = layout.parts_of(rank)
        names = {part.name for part in self.parts}
        # With several chunks, names start with the index of the chunk.
        module = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
        self.attached = AttachedForm() if attached is None else attached
        others = {id(parameter) for parameter in self.attached.parameters().values()}
        parameters: dict[str, torch.Tensor] = {}
        for name, value in module.named_parameters():
            if name not in excluded and id(value) not in others:
                parameters[name] = value
        for name, buffer in module.named_buffers():
            if name in names:
                parameters[name] = buffer
        self.parameters = parameters
        """Parameters and those buffers that the table contains (routers' selection biases), by local name."""
        if names != set(self.parameters):
            odd = sorted(names ^ set(self.parameters))
            place = "table" if odd[0] in names else "model"
            raise SlimxError(
                f"the weight table of {spec.path} does not match the model, because parameter {odd[0]} is only in the "
                f"{place}; correct the function weight_table of the model's family",
                code="model.table_name",
                about=odd[0],
            )
        for part in self.parts:
            shape = tuple(self.parameters[part.name].shape)
            if shape != part.shape:
                raise SlimxError(
                    f"the weight table of {spec.path} does not match the model, because parameter {part.name} has "
                    f"shape {list(shape)} in the model, but {list(part.shape)} in the table; correct the function "
                    "weight_table of the model's family",
                    code="model.table_shape",
                    about=part.name,
                )

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Returns the trainable parameters in the order of the forward pass, keyed by the names of their tensors in a
        Hugging Face directory. The names of several tensors that form one parameter are joined by " + "."""
        trained = {}
        for part in self.parts:
            parameter = self.parameters[part.name]
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
                trained[" + ".join(part.sources)] = parameter
        return trained | self.attached.parameters()

    def matching(self, patterns: Sequence[str], key: str) -> list[torch.nn.Parameter]:
        """Returns the parameters whose Hugging Face names match a glob in `patterns`, the value of configuration key
        `key`. Raises SlimxError if a pattern matches nothing, or only a part of a fused parameter."""
        names = names_of(select(self.spec.table, patterns, key), self.parts)
        matches = []
        for name in names:
            parameter = self.parameters[name]
            if isinstance(parameter, torch.nn.Parameter):
                matches.append(parameter)
        return matches

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Loads the parameters from the safetensors files in `path`, reading only this rank's slices."""
        self._read(path, self.parameters)
        self.changed()

    def changed(self) -> None:
        """Recomputes values derived from the parameters (`derived`). Must be called after parameters have been changed
        in place."""
        for refresh in self.derived:
            refresh()

    @torch.no_grad()
    def copy_of(self, path: str, into: HostCopy | None = None) -> HostCopy:
        """Loads the weights in `path` into a copy on the host (pinned on CUDA), without changing the parameters.
        `into`: an earlier copy whose memory is reused."""
        out = self._host_copy() if into is None else into
        self._read(path, out)
        return out

    @torch.no_grad()
    def snapshot(self, into: HostCopy | None = None) -> HostCopy:
        """Copies the current weights to the host (pinned on CUDA). `into`: an earlier copy whose memory is reused."""
        out = self._host_copy() if into is None else into
        for name, parameter in self.parameters.items():
            out[name].copy_(parameter)
        return out

    @contextmanager
    def switching(self) -> Iterator[Callable[[HostCopy], None]]:
        """Yields a function that replaces the parameters' values with the values of a copy (`copy_of`, `snapshot`).
        After the block, the previous values are restored, bit for bit. The optimizer's fp32 main weights are not
        changed.

        The first replacement copies the current values to host memory, which is allocated once and reused. Several
        copies used in one block therefore cost one transfer to the device each, and two transfers for the current
        values."""
        away = False

        def switch(copy: HostCopy) -> None:
            nonlocal away
            if not away:
                if not self._current:
                    self._current = self._host_copy()
                _copy(self.parameters, self._current)
                away = True
            _copy(copy, self.parameters)
            self.changed()

        try:
            yield switch
        finally:
            if away:
                _copy(self._current, self.parameters)
                self.changed()

    def check_finite(self, path: Path) -> None:
        """Raises SlimxError naming the tensor if a parameter contains NaN or infinity; padding is not checked. `path`:
        directory from which the parameters were loaded, for the message."""
        for _, name, values in self._windows(self.parameters):
            check_finite(values, name, path)

    def _host_copy(self) -> HostCopy:
        return {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
            for name, parameter in self.parameters.items()
        }

    def _read(self, path: str, into: Mapping[str, torch.Tensor]) -> None:
        reader = CheckpointReader(path)
        reader.check(self.spec.table)
        for rect, name, values in self._windows(into):
            values.copy_(reader.read(name, rect))

    def _windows(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[Rect, str, torch.Tensor]]:
        """Yields, for each part of a checkpoint tensor that this rank stores, the part's rectangle, the tensor's name,
        and the corresponding view into `tensors`, a mapping of local tensors by name."""
        for part in self.parts:
            local = tensors[part.name].detach().view(matrix(part.shape))
            for rect in part.rects:
                rows = local[rect.local_row : rect.local_row + rect.rows]
                yield rect, part.sources[rect.source], rows[:, rect.local_col : rect.local_col + rect.cols]


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors by name. On CUDA, the copies run in the current stream, so kernels that read the copied tensors
    need no synchronization."""
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)
