"""Plans the conversions. Errors in the input are found here, before anything is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from slimx.errors import SlimxError
from slimx.extras.convert.formats import int4, safetensors, torch_dist
from slimx.extras.convert.formats.fp8 import check_rule, is_quantized, quantized, quantized_matrices, with_quantization
from slimx.extras.convert.formats.safetensors import ToHuggingFace, Unit, copied, stacked
from slimx.extras.convert.formats.served import served_plain
from slimx.extras.convert.formats.torch_dist import ToMegatron
from slimx.extras.convert.formats.torch_dist_reader import TorchDistReader
from slimx.extras.convert.sources import TensorSource
from slimx.extras.convert.target import Target, parse_layout
from slimx.extras.low_precision import block_fp8
from slimx.extras.low_precision.int4 import rounds
from slimx.extras.megatron_files.bridge import bridge_table
from slimx.extras.megatron_files.directory import find_checkpoint, numbers_layers
from slimx.json_types import Json
from slimx.layout.maps import Rect
from slimx.layout.table import stored
from slimx.models.families import Family, ModelSpec, read_model
from slimx.models.fields import without_quantization
from slimx.models.files.reader import CheckpointReader
from slimx.models.files.safe_pickle import read_metadata

Layers = Literal["auto", "numbered", "stacked"]
_PREDICTION = "mtp.layers."


class Overlay:
    """Source that combines the tensors of `trained` with those that only `original` has. `aliases`: additional name of
    a tensor -> its name in `trained`."""

    def __init__(self, trained: TorchDistReader, original: TensorSource | None, aliases: Mapping[str, str]):
        self.trained = trained
        self.original = original
        self.aliases = dict(aliases)

    def dtype(self, name: str) -> torch.dtype:
        source, name = self._source(name)
        return source.dtype(name)

    def read(self, name: str, rect: Rect) -> torch.Tensor:
        source, name = self._source(name)
        return source.read(name, rect)

    def reopened(self) -> Overlay:
        return Overlay(self.trained.reopened(), self.original.reopened() if self.original else None, self.aliases)

    def _source(self, name: str) -> tuple[TensorSource, str]:
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
    """Plans the conversion of the Hugging Face directory `source` to a Megatron-LM release. Tensors that a trainer does
    not have are omitted.

    `dtype`: dtype of the converted weights; None: as stored, with fp8 converted to bf16. `layout`: parallel sizes of
    the job that will load the output, as a string (`target.parse_layout`). `layers`: keys of layers, numbered or
    stacked; "auto": numbered for models with experts. `file_bytes`: approximate size of a file. `family`: model family;
    None: the family of the source's architecture."""
    spec, reader = _open(source, family)
    spec = replace(spec, table=bridge_table(spec) or spec.table)
    target = Target(spec.table, parse_layout(layout))
    return ToMegatron(
        spec,
        reader,
        target,
        dtype=dtype,
        numbered=_numbered(spec, layers),
        file_bytes=file_bytes,
        origin=f"{_content(source)} {dtype}",
    )


def _numbered(spec: ModelSpec, layers: Layers) -> bool:
    """Returns True if each layer is to have separate keys, False if one key stacks the layers. Raises SlimxError if
    `layers` requires stacking but the model's layers differ.

    Scripts of slime and Miles pass --moe-layer-freq as a list for every model with experts, which makes megatron-core
    expect numbered layers. Megatron-LM also loads numbered layers, because of the metadata that is written with
    them."""
    differ = numbers_layers(spec.transformer)
    if layers == "stacked" and differ:
        raise SlimxError(
            f"--layers stacked requires layers of the same kind, but the layers of {spec.path} differ; set --layers "
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
    """Plans the conversion of the Megatron directory `source` to a Hugging Face directory. Config and tokenizer come
    from `original`; so do the tensors that a trainer does not have, if `original` has tensors.

    `dtype`: dtype of the converted weights; None: as saved. `file_bytes` and `family`: see `hf_to_megatron`."""
    path = find_checkpoint(source)
    spec = _with_prediction(original, _prediction_layers(path), family)
    table = spec.table
    trained = TorchDistReader(path, table, bridge=bridge_table(spec))
    originals = CheckpointReader(original) if any(original.glob("*.safetensors")) else None
    units = []
    dtypes = set()
    for name, (shape, declared) in _tensors(spec).items():
        tensor = stored(name)
        target = _target_dtype(trained, name, declared, dtype)
        if declared is None and name not in trained.centered:
            dtypes.add(target)
        if tensor.index is None:
            units.append(copied(name, shape, target))
        elif tensor.index == 0:
            experts = [name.replace("[0]", f"[{index}]") for index in range(table.experts)]
            units.append(stacked(tensor.name, experts, tensor.shape(shape, table.experts), target))
    if originals is not None:
        originals.check_copies(table)
        units += _others(spec, originals, dtype)
    return ToHuggingFace(
        units,
        Overlay(trained, originals, table.aliases),
        file_bytes=file_bytes,
        identity=f"megatron-to-hf {_content(path)} {_content(original)} {dtype}",
        template=original,
        config=_stored_as(without_quantization(spec.hf), dtypes),
    )


def hf_to_fp8(
    source: Path,
    *,
    rule: str = "ieee",
    dtype: torch.dtype | None = None,
    file_bytes: int = safetensors.FILE_BYTES,
    family: Family | None = None,
) -> ToHuggingFace:
    """Plans the quantization of the Hugging Face directory `source` to block fp8, for the tensors that are in fp8 in
    the family's published fp8 checkpoints. Experts that `source` stacks are stored separately.

    `rule`: rule by which scales are computed (docs/numerics.md). `dtype`: dtype of the other weights; None: as stored.
    `file_bytes` and `family`: see `hf_to_megatron`."""
    spec, reader = _open(source, family)
    quantization = block_fp8.quantization(rule)
    matrices = quantized_matrices(spec, quantization.block)
    if not matrices:
        raise SlimxError(
            f"{source}: slimx cannot quantize {spec.family.ARCHITECTURE} to FP8; use the unquantized checkpoint",
            code="convert.fp8",
            about=str(source),
        )
    units = []
    plain = []
    dtypes = set()
    for name, (shape, declared) in _tensors(spec).items():
        if name in matrices:
            check_rule(rule, reader.dtype(name), name)
            units += [quantized(matrix, quantization) for matrix in matrices[name]]
            continue
        target = _target_dtype(reader, name, declared, dtype)
        if declared is None:
            dtypes.add(target)
        units.append(copied(name, shape, target))
        if len(shape) > 1:
            plain.append(name)
    units += _others(spec, reader, dtype)
    plain += served_plain(spec, is_quantized)
    return ToHuggingFace(
        units,
        reader,
        file_bytes=file_bytes,
        identity=f"hf-to-fp8 {_content(source)} {rule} {dtype}",
        template=source,
        config=_stored_as(with_quantization(spec.hf, quantization, plain), dtypes),
    )


def hf_to_int4(
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = safetensors.FILE_BYTES,
    family: Family | None = None,
) -> ToHuggingFace:
    """Plans the quantization of the routed experts of the Hugging Face directory `source` to INT4, in
    compressed-tensors' format.

    `dtype`: dtype of the other weights; None: as stored. `file_bytes` and `family`: see `hf_to_megatron`."""
    spec, reader = _open(source, family)
    names = int4.experts_of(spec.table)
    if not names:
        raise SlimxError(
            f"{source}: only routed experts that are stored as separate matrices can be quantized to INT4, but "
            f"{spec.family.ARCHITECTURE} has no such experts; use `slimx convert hf-to-fp8`",
            code="convert.int4",
            about=str(source),
        )
    units = []
    plain = []
    dtypes = set()
    for name, (shape, declared) in _tensors(spec).items():
        if name in names:
            units.append(int4.quantized(name, shape))
            continue
        target = _target_dtype(reader, name, declared, dtype)
        if declared is None:
            dtypes.add(target)
        units.append(copied(name, shape, target))
        if len(shape) > 1:
            plain.append(name)
    units += _others(spec, reader, dtype)
    config = int4.with_quantization(without_quantization(spec.hf), [*plain, *served_plain(spec, rounds)])
    return ToHuggingFace(
        units,
        reader,
        file_bytes=file_bytes,
        identity=f"hf-to-int4 {_content(source)} {dtype}",
        template=source,
        config=_stored_as(config, dtypes),
    )


def _target_dtype(source: TensorSource, name: str, declared: str | None, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a converted tensor: the requested `dtype`, or that of `source` if none is requested or if
    the weight table declares a dtype for the tensor (`declared`)."""
    return dtype if dtype is not None and declared is None else source.dtype(name)


def _open(source: Path, family: Family | None) -> tuple[ModelSpec, CheckpointReader]:
    """Opens a Hugging Face directory. Returns its model and a reader of its tensors, after checking that they match."""
    reader = CheckpointReader(source)
    spec = read_model(source, family=family)
    complete = _with_prediction(source, spec.family.mtp_layers(spec.hf), family)
    # Published checkpoints may lack multi-token prediction layers that their config declares.
    if reader.names & (complete.table.checkpoint_shapes().keys() - spec.table.checkpoint_shapes().keys()):
        spec = complete
    reader.check(spec.table, quantized=True)
    reader.check_copies(spec.table)
    return spec, reader


def _with_prediction(path: Path, layers: int, family: Family | None) -> ModelSpec:
    """Reads the model description with `layers` multi-token prediction layers, or with as many as the config declares
    if those are fewer."""
    spec = read_model(path, family=family)
    return read_model(path, mtp_layers=min(layers, spec.family.mtp_layers(spec.hf)), family=family)


def _prediction_layers(path: Path) -> int:
    """Returns the number of multi-token prediction layers in a torch_dist checkpoint."""
    keys = read_metadata(path / ".metadata").state_dict_metadata
    layers = set()
    for key in keys:
        if key.startswith(_PREDICTION):
            layers.add(key.removeprefix(_PREDICTION).split(".")[0])
    return len(layers)


def _tensors(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """Returns, for every checkpoint tensor that a trainer has, its shape and the dtype that the weight table declares
    for it (None if the table declares none)."""
    out: dict[str, tuple[tuple[int, ...], str | None]] = {}
    for entry in spec.table.entries():
        for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
            out[name] = (shape, entry.row.dtype)
    return out


def _others(spec: ModelSpec, original: CheckpointReader, dtype: torch.dtype | None) -> list[Unit]:
    """Returns units for the tensors of `original` that trainers do not have: aliases (further names of other tensors),
    which are converted to `dtype`, and frozen tensors and buffers, which are copied as stored."""
    units = []
    for name in spec.table.aliases:
        if name in original.names:
            units.append(copied(name, original.shape(name), dtype or original.dtype(name)))
    for name in (*spec.table.frozen, *original.buffers):
        if name in original.names:
            units.append(copied(name, original.shape(name), original.dtype(name)))
    return units


def _stored_as(config: Json, dtypes: Collection[torch.dtype]) -> Json:
    """Returns `config` with the dtype of the converted weights, under both names that transformers has used for it.
    Returns it unchanged if there are several dtypes."""
    if len(dtypes) != 1:
        return config
        return config
    (dtype,) = dtypes
    name = str(dtype).removeprefix("torch.")
    out = {**config}
    if "dtype" in config:
        out["dtype"] = name
    if "torch_dtype" in config or "dtype" not in config:
        out["torch_dtype"] = name
    return out


def _content(directory: Path) -> str:
    """Returns a digest of the path of `directory` and of its files' names, sizes and modification times."""
    stats = []
    for file in sorted(directory.iterdir()):
        if file.is_file():
            status = file.stat()
            stats.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps([str(directory.resolve()), stats]).encode()).hexdigest()
