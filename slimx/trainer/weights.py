"""This rank's weights by name: loading from a Hugging Face directory, and copies that can be switched in and out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from slimx.errors import SlimxError
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part, matrix
from slimx.models.checkpoint_reader import CheckpointReader
from slimx.models.families import ModelSpec


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
    ):
        """`chunks`: this rank's modules, one unless pipeline stages are interleaved. `beside`: names of parameters that
        no checkpoint has (a value head); they are left alone."""
        self.spec = spec
        self.held: list[Part] = layout.held(rank)
        names = {held.name for held in self.held}
        # Several chunks form a list of modules, and their names begin with its index.
        module = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in names}
        parameters = {name: value for name, value in module.named_parameters() if name not in beside}
        self.parameters: dict[str, torch.Tensor] = {**parameters, **buffers}
        """Parameters, and the buffers that the table names (an expert bias)."""
        if names != set(self.parameters):
            odd = sorted(names ^ set(self.parameters))
            raise SlimxError(f"weight table of {spec.path}: {odd[0]} is in the table or in the model, but not in both")
        for held in self.held:
            shape = tuple(self.parameters[held.name].shape)
            if shape != held.shape:
                raise SlimxError(
                    f"weight table of {spec.path}: {held.name} is {list(shape)} in the model, "
                    f"{list(held.shape)} in the table"
                )

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Fill the parameters from the safetensors in `path`; only the slices that this rank holds are read."""
        reader = CheckpointReader(path)
        reader.check(self.spec.table)
        for held in self.held:
            local = self.parameters[held.name].view(matrix(held.shape))
            for rect in held.rects:
                target = local[rect.local_row : rect.local_row + rect.rows, rect.local_col : rect.local_col + rect.cols]
                target.copy_(reader.read(held.sources[rect.source], rect))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the present weights in host memory (pinned on CUDA)."""
        out = {}
        for name, parameter in self.parameters.items():
            host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
            out[name] = host.copy_(parameter.detach())
        return out

    @contextmanager
    @torch.no_grad()
    def switched(self, other: dict[str, torch.Tensor]) -> Iterator[None]:
        """Run the block with `other`'s values in the parameters' own memory, then put the present ones back."""
        present = self.snapshot()
        for name, parameter in self.parameters.items():
            parameter.copy_(other[name], non_blocking=True)
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.copy_(present[name], non_blocking=True)
