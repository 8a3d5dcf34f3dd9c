"""Reads slices of tensors out of a Hugging Face directory of safetensors files, without loading whole files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.table import Table


class CheckpointReader:
    """Slices of named tensors; files are opened once, memory-mapped, and only what is asked for is read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if index.is_file():
            self._where: dict[str, str] = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in self._where.values() if not (self.path / f).is_file()})
            if missing:
                raise SlimxError(f"{self.path}: shard {missing[0]} named in {index.name} is missing; download it again")
        elif single.is_file():
            self._where = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise SlimxError(
                f"{self.path}: no model.safetensors and no {index.name}; give a Hugging Face model directory"
            )

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.path / name, framework="pt")
            except SafetensorError as error:
                raise SlimxError(
                    f"{self.path / name}: truncated or not a safetensors file ({error}); download it again"
                ) from error
        return self._files[name]

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        return frozenset(self._where)

    def nbytes(self, name: str) -> int:
        """Size of a tensor, estimated at 4 bytes per element."""
        return 4 * math.prod(self._open(self._where[name]).get_slice(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._open(self._where[name]).get_tensor(name)

    def check(self, table: Table) -> None:
        """Compare names and shapes with a weight table; raises SlimxError naming the first tensor that does not fit."""
        expected = table.checkpoint()
        optional = {name: expected[original] for name, original in table.aliases.items()} | dict(table.frozen)
        for name, shape in {**expected, **optional}.items():
            if name not in self._where:
                if name in optional:
                    continue
                raise SlimxError(f"{self.path}: tensor {name} is missing; the checkpoint does not fit its config.json")
            found = tuple(self._open(self._where[name]).get_slice(name).get_shape())
            if found != tuple(shape):
                raise SlimxError(
                    f"{self.path}: tensor {name} has shape {list(found)}, its config.json wants {list(shape)}"
                )
        if scales := [name for name in self._where if name.endswith("_scale_inv") and name not in optional]:
            raise SlimxError(
                f"{self.path}: {scales[0]} holds scales of fp8 blocks ({len(scales)} such tensors); slimx trains from "
                "bf16 and fp32 checkpoints: convert it first"
            )
        unknown = sorted(set(self._where) - set(expected) - set(optional))
        if unknown:
            raise SlimxError(
                f"{self.path}: tensor {unknown[0]} has no place in the model ({len(unknown)} such tensors)"
            )

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        """The elements of tensor `name` that `rect` takes, [rect.rows, rect.cols] as the local tensor holds them."""
        view = self._open(self._where[name]).get_slice(name)
        shape = view.get_shape()
        rows, cols = rect.extent
        if len(shape) == 1:
            return view[rect.row : rect.row + rows][:: rect.step].unsqueeze(1)
        if len(shape) == 3:
            # A stack of matrices, read as one matrix; no rectangle reaches over the edge of one.
            index, row = divmod(rect.row, shape[1])
            part = view[index : index + 1, row : row + rows, rect.col : rect.col + cols][0]
        else:
            part = view[rect.row : rect.row + rows, rect.col : rect.col + cols]
        return part.T if rect.transposed else part[:: rect.step]
