"""This rank's weights by name: loading from a Hugging Face directory, and copies that can be swapped in and out."""

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
"""Values of every parameter, and of the buffers that the weight table names, by local name."""


class Weights:
    """The local parameters of one rank, matched with the weight table."""

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
        """Takes `chunks`: this rank's modules, several only if pipeline stages are interleaved. `excluded`: names of
        parameters that no checkpoint has (a value head); they are left alone. `attached`: see `build_model`."""
        self.spec = spec
        self.derived: list[Callable[[], None]] = []
        """Functions that refresh values derived from the parameters."""
        self._current: HostCopy = {}
        self.parts: list[Part] = layout.parts_of(rank)
        names = {part.name for part in self.parts}
        # Several chunks form a list of modules, whose names begin with the chunk's index.
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
        """Parameters, and the buffers that the table names (an expert bias)."""
        if names != set(self.parameters):
            odd = sorted(names ^ set(self.parameters))
            place = "table" if odd[0] in names else "model"
            raise SlimxError(
                f"weight table of {spec.path}: {odd[0]} is only in the {place}; correct the family's weight_table",
                code="model.table_name",
                about=odd[0],
            )
        for part in self.parts:
            shape = tuple(self.parameters[part.name].shape)
            if shape != part.shape:
                raise SlimxError(
                    f"weight table of {spec.path}: {part.name} is {list(shape)} in the model, "
                    f"{list(part.shape)} in the table",
                    code="model.table_shape",
                    about=part.name,
                )

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Returns trainable parameters by their Hugging Face names (joined if several form one parameter), in the order
        of the forward pass."""
        trained = {}
        for part in self.parts:
            parameter = self.parameters[part.name]
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
                trained[" + ".join(part.sources)] = parameter
        return trained | self.attached.parameters()

    def matching(self, patterns: Sequence[str], key: str) -> list[torch.nn.Parameter]:
        """Returns parameters matching one of the globs `patterns` of configuration key `key`, see `select`."""
        names = names_of(select(self.spec.table, patterns, key), self.parts)
        matches = []
        for name in names:
            parameter = self.parameters[name]
            if isinstance(parameter, torch.nn.Parameter):
                matches.append(parameter)
        return matches

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Fills the parameters from the safetensors in `path`, reading only this rank's slices."""
        self._read(path, self.parameters)
        self.changed()

    def changed(self) -> None:
        """Refreshes values derived from the parameters. Call after writing parameters in place."""
        for refresh in self.derived:
            refresh()

    @torch.no_grad()
    def copy_of(self, path: str, into: HostCopy | None = None) -> HostCopy:
        """Returns the weights in `path` as a host copy (pinned on CUDA), in the memory of the earlier copy `into` if
        given; the current weights stay as they are."""
        out = self._host_copy() if into is None else into
        self._read(path, out)
        return out

    @torch.no_grad()
    def snapshot(self, into: HostCopy | None = None) -> HostCopy:
        """Copies the current weights to host memory (pinned on CUDA); `into`: an earlier copy whose memory is
        reused."""
        out = self._host_copy() if into is None else into
        for name, parameter in self.parameters.items():
            out[name].copy_(parameter)
        return out

    @contextmanager
    def switching(self) -> Iterator[Callable[[HostCopy], None]]:
        """Yields a function that writes a copy's values into the parameters; afterwards the current values are
        restored, bit for bit. The optimizer's fp32 weights are not touched.

        The current values wait in host memory that is allocated once and reused. They are copied there at the first
        switch only, so several copies in a row cost one transfer each and the current values two.
        """
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
        """Raises SlimxError, naming the tensor, for NaN and infinities that were loaded from `path`; padding is not
        checked."""
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
        """Yields this rank's parts of the checkpoint's tensors, with the tensor's name and the view into `tensors`."""
        for part in self.parts:
            local = tensors[part.name].detach().view(matrix(part.shape))
            for rect in part.rects:
                rows = local[rect.local_row : rect.local_row + rect.rows]
                yield rect, part.sources[rect.source], rows[:, rect.local_col : rect.local_col + rect.cols]


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors by name. On CUDA all copies run in one stream, the one of the kernels that read them."""
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)
