"""This rank's weights by name: loading from a Hugging Face directory, and copies that can be switched in and out."""

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
        beside: Collection[str] = (),
        attached: AttachedForm | None = None,
    ):
        """`chunks`: this rank's modules, one unless pipeline stages are interleaved. `beside`: names of parameters that
        no checkpoint has (a value head); they are left alone. `attached`: see `build_model`."""
        self.spec = spec
        self.derived: list[Callable[[], None]] = []
        """Functions that refresh what is made of the parameters."""
        self._present: HostCopy | None = None
        self.held: list[Part] = layout.held(rank)
        names = {held.name for held in self.held}
        # Several chunks form a list of modules, and their names begin with its index.
        module = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in names}
        self.attached = AttachedForm() if attached is None else attached
        others = {id(parameter) for parameter in self.attached.parameters().values()}
        parameters = {
            name: value for name, value in module.named_parameters() if name not in beside and id(value) not in others
        }
        self.parameters: dict[str, torch.Tensor] = {**parameters, **buffers}
        """Parameters, and the buffers that the table names (an expert bias)."""
        if names != set(self.parameters):
            odd = sorted(names ^ set(self.parameters))
            raise SlimxError(
                f"weight table of {spec.path}: {odd[0]} is in the table or in the model, but not in both",
                code="model.table_name",
                about=odd[0],
            )
        for held in self.held:
            shape = tuple(self.parameters[held.name].shape)
            if shape != held.shape:
                raise SlimxError(
                    f"weight table of {spec.path}: {held.name} is {list(shape)} in the model, "
                    f"{list(held.shape)} in the table",
                    code="model.table_shape",
                    about=held.name,
                )

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that are trained, by their Hugging Face names (joined where several are one parameter), in the
        order of the forward pass."""
        named = {" + ".join(held.sources): self.parameters[held.name] for held in self.held}
        trained = {
            name: parameter
            for name, parameter in named.items()
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
        }
        return trained | self.attached.parameters()

    def matching(self, patterns: Sequence[str], key: str) -> list[torch.Tensor]:
        """Parameters that one of the globs `patterns` of configuration key `key` matches, see `select`."""
        names = names_of(select(self.spec.table, patterns, key), self.held)
        return [self.parameters[name] for name in names]

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Fill the parameters from the safetensors in `path`; only the slices that this rank holds are read."""
        self._read(path, self.parameters)
        self.changed()

    def changed(self) -> None:
        """Refresh what is derived from the parameters. Call after writing parameters in place."""
        for refresh in self.derived:
            refresh()

    @torch.no_grad()
    def copy_of(self, path: str, into: HostCopy | None = None) -> HostCopy:
        """The weights in `path` in host memory (pinned on CUDA), or in that of the earlier copy `into`; the present
        ones stay as they are."""
        out = self._host_copy() if into is None else into
        self._read(path, out)
        return out

    @torch.no_grad()
    def snapshot(self, into: HostCopy | None = None) -> HostCopy:
        """A copy of the present weights in host memory (pinned on CUDA); `into`: an earlier one, whose memory it
        takes."""
        out = self._host_copy() if into is None else into
        for name, parameter in self.parameters.items():
            out[name].copy_(parameter)
        return out

    @contextmanager
    def switching(self) -> Iterator[Callable[[HostCopy], None]]:
        """Gives a function that puts a copy's values in the parameters' own memory; afterwards the present values are
        back, bit for bit. The optimizer's fp32 weights are not touched.

        The present values wait in host memory that is allocated once and kept for the next time. They go there at the
        first switch only, so that several copies in a row cost one journey each and the present values two.
        """
        away = False

        def switch(copy: HostCopy) -> None:
            nonlocal away
            if not away:
                if self._present is None:
                    self._present = self._host_copy()
                _copy(self.parameters, self._present)
                away = True
            _copy(copy, self.parameters)
            self.changed()

        try:
            yield switch
        finally:
            if away:
                _copy(self._present, self.parameters)
                self.changed()

    def check_finite(self, path: Path) -> None:
        """Raises SlimxError, naming the tensor, for NaN and infinities that were loaded from `path`; padding is not
        looked at."""
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

    def _windows(self, of: Mapping[str, torch.Tensor]) -> Iterator[tuple[Rect, str, torch.Tensor]]:
        """Yields each part of the checkpoint's tensors that this rank has, its tensor's name, and its place in `of`."""
        for held in self.held:
            local = of[held.name].detach().view(matrix(held.shape))
            for rect in held.rects:
                rows = local[rect.local_row : rect.local_row + rect.rows]
                yield rect, held.sources[rect.source], rows[:, rect.local_col : rect.local_col + rect.cols]


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """By name. On CUDA all copies are in the order of one stream, in which the kernels that read them are too."""
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)
