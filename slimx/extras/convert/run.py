"""The conversions: everything that can be wrong with their input is found here, before anything is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from slimx.errors import SlimxError
from slimx.extras.convert.formats import int4, safetensors, torch_dist
from slimx.extras.convert.formats.fp8 import check_rule, quantised, quantised_names, with_quantisation
from slimx.extras.convert.formats.safetensors import ToHuggingFace, Unit, copied, stacked
from slimx.extras.convert.formats.torch_dist import ToMegatron
from slimx.extras.convert.formats.torch_dist_reader import TorchDistReader
from slimx.extras.convert.sources import TensorSource
from slimx.extras.convert.target import Target, parse_layout
from slimx.extras.low_precision import block_fp8
from slimx.extras.megatron_files.directory import find_checkpoint, numbers_layers
from slimx.layout.maps import Rect
from slimx.layout.table import stored
from slimx.models.families import Family, ModelSpec, read_model
from slimx.models.fields import without_quantisation
from slimx.models.files.reader import CheckpointReader
from slimx.models.files.safe_pickle import read_metadata

Layers = Literal["auto", "numbered", "stacked"]
_PREDICTION = "mtp.layers."


class Overlay:
    """Tensors of `trained`; those that only `original` has, from there; `aliases` are other names of `trained`'s."""

    def __init__(self, trained: TorchDistReader, original: TensorSource | None, aliases: Mapping[str, str]):
        self.trained, self.original, self.aliases = trained, original, dict(aliases)

    def dtype(self, name: str) -> torch.dtype:
        source, name = self._of(name)
        return source.dtype(name)

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        source, name = self._of(name)
        return source.read(name, rect)

    def reopened(self) -> Overlay:
        return Overlay(self.trained.reopened(), self.original.reopened() if self.original else None, self.aliases)

    def _of(self, name: str) -> tuple[TensorSource, str]:
        name = self.aliases.get(name, name)
        if name in self.trained.names or self.original is None:
            return self.trained, name
        return self.original, name


def hf_to_megatron(
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    layout: str = "",
    layers: Layers = "auto",
    file_bytes: int = torch_dist.FILE_BYTES,
    family: Family | None = None,
) -> ToMegatron:
    """The tensors of the Hugging Face directory `source` as a release of Megatron-LM, less those that a trainer does
    not hold.

    `dtype`: of the model; None: as stored, fp8 as bf16. `layout`: see `target.parse_layout`. `layers`: whether each
    layer has keys of its own or one key stacks them; "auto": numbered where a model has experts. `file_bytes`: about
    the size of a file. `family`: None for the one of the source's architecture."""
    spec, reader = _open(source, family)
    target, origin = Target(spec.table, parse_layout(layout)), f"{_content(source)} {dtype}"
    numbered = _numbered(spec, layers)
    return ToMegatron(spec, reader, target, dtype=dtype, numbered=numbered, file_bytes=file_bytes, origin=origin)


def _numbered(spec: ModelSpec, layers: Layers) -> bool:
    """Returns True if each layer gets keys of its own. Raises SlimxError where `layers` asks to stack layers that
    differ.

    Scripts of slime and Miles give --moe-layer-freq as a list for every model with experts, and megatron-core then
    looks for numbered layers; Megatron-LM finds them too, by the metadata that is written with them."""
    differ = numbers_layers(spec.transformer)
    if layers == "stacked" and differ:
        raise SlimxError(
            f"--layers stacked: the layers of {spec.path} differ, and megatron-core numbers such layers; choose "
            "numbered",
            code="convert.layers",
            about="--layers",
        )
    return layers == "numbered" or (layers == "auto" and (differ or spec.experts > 0))


def megatron_to_hf(
    source: Path,
    original: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = safetensors.FILE_BYTES,
    family: Family | None = None,
) -> ToHuggingFace:
    """The weights of the Megatron directory `source` as a Hugging Face one. Config and tokenizer are those of
    `original`, and so are the tensors, if it has any, that a trainer does not hold.

    `dtype`: of the model; None: as saved. `family`: as of `hf_to_megatron`."""
    path = find_checkpoint(source)
    spec = _with_prediction(original, _prediction_layers(path), family)
    trained, table = TorchDistReader(path, spec.table), spec.table
    theirs = CheckpointReader(original) if any(original.glob("*.safetensors")) else None
    units, dtypes = [], set()
    for name, (shape, own) in _tensors(spec).items():
        place, kept = stored(name), dtype if dtype is not None and own is None else trained.dtype(name)
        if own is None and name not in trained.centred:
            dtypes.add(kept)
        if place.index is None:
            units.append(copied(name, shape, kept))
        elif place.index == 0:
            experts = [name.replace("[0]", f"[{k}]") for k in range(table.experts)]
            units.append(stacked(place.name, experts, place.shape(shape, table.experts), kept))
    source_of = Overlay(trained, theirs, table.aliases)
    if theirs is not None:
        theirs.check_copies(table)
        units += _others(spec, theirs, dtype)
    return ToHuggingFace(
        units,
        source_of,
        file_bytes=file_bytes,
        what=f"megatron-to-hf {_content(path)} {_content(original)} {dtype}",
        template=original,
        config=_stored_as(without_quantisation(spec.hf), dtypes),
    )


def hf_to_fp8(
    source: Path,
    *,
    rule: str = "ieee",
    dtype: torch.dtype | None = None,
    file_bytes: int = safetensors.FILE_BYTES,
    family: Family | None = None,
) -> ToHuggingFace:
    """The Hugging Face directory `source` with those tensors in block fp8 that its family's fp8 checkpoints have so.

    `rule`: how scales are chosen (docs/numerics.md). `dtype`: of the other tensors; None: as stored.
    `family`: as of `hf_to_megatron`."""
    spec, reader = _open(source, family)
    quantisation = block_fp8.quantisation(rule)
    names = quantised_names(spec.table, quantisation.block)
    if not names:
        raise SlimxError(
            f"{source}: {spec.family.ARCHITECTURE} has no fp8 form; no tensor of it is quantised",
            code="convert.fp8",
            about=str(source),
        )
    units, plain, dtypes = [], [], set()
    for name, (shape, own) in _tensors(spec).items():
        if name in names:
            check_rule(rule, reader.dtype(name), name)
            units.append(quantised(name, shape, quantisation))
            continue
        kept = dtype if dtype is not None and own is None else reader.dtype(name)
        if own is None:
            dtypes.add(kept)
        units.append(copied(name, shape, kept))
        if len(shape) > 1:
            plain.append(name)
    units += _others(spec, reader, dtype)
    return ToHuggingFace(
        units,
        reader,
        file_bytes=file_bytes,
        what=f"hf-to-fp8 {_content(source)} {rule} {dtype}",
        template=source,
        config=_stored_as(with_quantisation(spec.hf, quantisation, plain), dtypes),
    )


def hf_to_int4(
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = safetensors.FILE_BYTES,
    family: Family | None = None,
) -> ToHuggingFace:
    """The Hugging Face directory `source` with its routed experts in INT4, the format of compressed-tensors.

    `dtype`: of the other tensors; None: as stored. `family`: as of `hf_to_megatron`."""
    spec, reader = _open(source, family)
    names = int4.experts_of(spec.table)
    if not names:
        raise SlimxError(
            f"{source}: {spec.family.ARCHITECTURE} has no routed experts whose matrices are stored one by one, and "
            "nothing else becomes INT4",
            code="convert.int4",
            about=str(source),
        )
    units, plain, dtypes = [], [], set()
    for name, (shape, own) in _tensors(spec).items():
        if name in names:
            units.append(int4.quantised(name, shape))
            continue
        kept = dtype if dtype is not None and own is None else reader.dtype(name)
        if own is None:
            dtypes.add(kept)
        units.append(copied(name, shape, kept))
        if len(shape) > 1:
            plain.append(name)
    units += _others(spec, reader, dtype)
    return ToHuggingFace(
        units,
        reader,
        file_bytes=file_bytes,
        what=f"hf-to-int4 {_content(source)} {dtype}",
        template=source,
        config=_stored_as(
            int4.with_quantisation(without_quantisation(spec.hf), [*plain, *int4.served_plain(spec)]), dtypes
        ),
    )


def _open(source: Path, family: Family | None) -> tuple[ModelSpec, CheckpointReader]:
    """Model and tensors of a Hugging Face directory, compared with each other."""
    reader = CheckpointReader(source)
    least = read_model(source, family=family)
    most = _with_prediction(source, least.family.mtp_layers(least.hf), family)
    # Published checkpoints leave out layers of multi-token prediction that their config declares.
    spec = (
        most
        if reader.names & (most.table.checkpoint_shapes().keys() - least.table.checkpoint_shapes().keys())
        else least
    )
    reader.check(spec.table, quantised=True)
    reader.check_copies(spec.table)
    return spec, reader


def _with_prediction(path: Path, layers: int, family: Family | None) -> ModelSpec:
    """The model with up to `layers` layers of multi-token prediction."""
    spec = read_model(path, family=family)
    return read_model(path, mtp_layers=min(layers, spec.family.mtp_layers(spec.hf)), family=family)


def _prediction_layers(path: Path) -> int:
    """Count the layers of multi-token prediction in a torch_dist checkpoint."""
    keys = read_metadata(path / ".metadata").state_dict_metadata
    return len({key.removeprefix(_PREDICTION).split(".")[0] for key in keys if key.startswith(_PREDICTION)})


def _tensors(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """Shape and own dtype, if it has one, of every checkpoint tensor that a trainer holds."""
    return {
        name: (shape, entry.row.dtype)
        for entry in spec.table.entries()
        for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True)
    }


def _others(spec: ModelSpec, original: CheckpointReader, dtype: torch.dtype | None) -> list[Unit]:
    """Tensors of `original` that no trainer has: repeated ones, and frozen ones and buffers as they are stored."""
    names = [name for name in [*spec.table.aliases, *spec.table.frozen] if name in original.names] + original.buffers
    return [
        copied(
            name,
            original.shape(name),
            dtype if dtype is not None and name in spec.table.aliases else original.dtype(name),
        )
        for name in names
    ]


def _stored_as(config: dict[str, Any], dtypes: Collection[torch.dtype]) -> dict[str, Any]:
    """`config` with the dtype of the tensors that have none of their own, under both names that transformers has had
    for it; as it was where they are of several."""
    if len(dtypes) != 1:
        return config
    (dtype,) = dtypes
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}


def _content(directory: Path) -> str:
    """Identifies the files of `directory` by name, size and time of change."""
    found = []
    for file in sorted(directory.iterdir()):
        if file.is_file():
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps([str(directory.resolve()), found]).encode()).hexdigest()
