"""Megatron-LM's checkpoint directories: finds the checkpoint in a directory, and checks that it matches a model.

    latest_checkpointed_iteration.txt      "12", or "release" for weights without a training history
    iter_0000012/  or  release/            torch_dist: .metadata, metadata.json, common.pt, *.distcp

slimx writes the same layout (slimx/orchestration/state/saves.py). Source of the names:
megatron/training/checkpointing.py of Megatron-LM, core_r0.16.0. `load.py` loads the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError
from slimx.extras.megatron_files.bridge import TEXT
from slimx.layout.maps import Sections
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part
from slimx.layout.ranks import Sizes
from slimx.layout.table import Entry, Table
from slimx.models.files.index import read_object
from slimx.models.files.torch_dist import TRACKER, factor_key, iteration_name

_CONVOLUTION = re.compile(r"(?<=\.mixer\.)conv1d_")
"""Pattern of the names of a Mamba-2 layer's convolution parameters. Checkpoints name these parameters `conv1d.`, as in
the megatron-core releases in which the convolution was a module."""
RUN_STATE = "slimx"
"""Name of a slimx checkpoint's subdirectory for state that only slimx runs need."""
_ITERATION = re.compile(r"[0-9]{1,15}")
_LAYER = re.compile(
    r"^(?P<stack>(?:language_model\.|vision_model\.)?decoder\.(?:layers|deepstack_merger_list)\.)(?P<index>\d+)\."
)
_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)\d+$")
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Keys of the tensors whose rows Megatron-LM pads to a multiple of `make_vocab_size_divisible_by` times the
tensor-parallel size."""
_POWERS = tuple(2**exponent for exponent in range(13))
_PADDINGS = sorted({*_POWERS, *(192 * power for power in _POWERS[:6])})
"""Multiples to which a vocabulary may be padded: powers of two and three times powers of two, as products of a divisor
up to 128 and a tensor-parallel size up to 48."""
_NOT_WEIGHTS = re.compile(
    r"(chained_\d+\.)?optimizer\.|rng_state|random_state|rerun_state_machine_state|common_state|.*\._extra_state"
)
"""Regular expression that matches the keys of all checkpoint entries other than model weights."""
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.")
_PREDICTION_LAYER = re.compile(r"^((?:language_model\.)?mtp\.layers\.\d+\.)mtp_model_layer\.")
"""Pattern of the part of a parameter's name that checkpoints write as `transformer_layer`, as megatron-core up to 0.16
does."""
_PROJECTION_NORM = re.compile(r"(?<=self_attention\.[qk]_)layernorm(?=\.weight$)")
"""Pattern of the part of a key that names a norm over all heads. megatron-core has no such norm: slimx puts it in place
of the per-head norm, whereas slime (slime_plugins/models/minimax_m2.py) adds it next to the per-head norm as `q_norm`
and `k_norm`."""


def is_megatron(path: Path) -> bool:
    """Returns True if `path` is in Megatron-LM's format: a directory with a tracker file, or one of its checkpoints."""
    named = re.fullmatch(r"iter_\d{7,}|release", path.name) is not None
    return (path / TRACKER).is_file() or (path / "metadata.json").is_file() or (named and path.is_dir())


def find_checkpoint(path: Path) -> Path:
    """Returns the directory of the checkpoint that `path` is or contains. Raises SlimxError if slimx cannot read the
    checkpoint."""
    tracker = path / TRACKER
    checkpoint = path
    if tracker.is_file():
        latest = tracker.read_text(errors="replace").strip()
        if latest == "release":
            checkpoint = path / latest
        elif _ITERATION.fullmatch(latest):
            checkpoint = path / iteration_name(int(latest))
        else:
            raise _unfit(
                tracker, "tracker", f"contains {latest[:40]!r}, but must contain an iteration number or `release`"
            )
        if not checkpoint.is_dir():
            raise _unfit(
                tracker,
                "tracker",
                f"refers to {checkpoint.name}, which does not exist; write the number of an existing iteration",
            )
    format_file = checkpoint / "metadata.json"
    if not format_file.is_file():
        problem = "the directory is not a torch_dist checkpoint (no metadata.json); choose the directory of one"
        if any(checkpoint.glob("mp_rank_*")):
            problem = (
                "the directory contains Megatron-LM's old format (mp_rank_*); save the checkpoint again with "
                "Megatron-LM's option `--ckpt-format torch_dist`"
            )
        raise _unfit(checkpoint, "format", problem)
    backend = read_object(format_file).get("sharded_backend")
    if backend != "torch_dist":
        raise SlimxError(
            f"sharded_backend is {str(backend)[:40]} in {format_file}, but slimx reads only torch_dist; save the "
            "checkpoint again with Megatron-LM's option `--ckpt-format torch_dist`",
            code="megatron.format",
            about=str(format_file),
        )
    return checkpoint


def _unfit(path: Path, code: str, problem: str) -> SlimxError:
    return SlimxError(f"{path}: {problem}", code=f"megatron.{code}", about=str(path))


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of matching a checkpoint with a model: the names of the model's tensors in the checkpoint."""

    path: Path
    per_layer: bool
    """True if keys are numbered by layer, as in `decoder.layers.3.x`; False if one key `decoder.layers.x` has a layer
    axis."""
    keys: Mapping[str, str]
    """Checkpoint keys by the key in slimx's model, for the tensors whose keys differ."""
    centered: frozenset[str]
    """Checkpoint keys of the norm weights that are stored with 1 subtracted."""
    table: Table
    """Weight table of the checkpoint's tensors."""


def check_fit(path: Path, table: Table, *, bridge: Table | None = None, prediction: int = 0) -> Fit:
    """Compares the names and shapes of the checkpoint's tensors with a model's weight table, and returns the names to
    read. Raises SlimxError naming the first tensor that differs, is missing, or is not in the table and would be lost
    silently.

    `bridge`: weight table of Megatron-Bridge's checkpoints of the model (`bridge_table`), if it differs from `table`.
    `prediction`: number of multi-token prediction layers that the checkpoint may have even if the table has fewer."""
    from slimx.models.files.safe_pickle import read_metadata  # slow import that most callers do not need

    path = find_checkpoint(path)
    entries = read_metadata(path / ".metadata").state_dict_metadata
    shapes = {}
    for name, value in entries.items():
        if hasattr(value, "size"):
            shapes[name] = tuple(value.size)
    if any(".experts.experts.0." in key for key in shapes):
        raise SlimxError(
            f"{path}: every expert is a separate tensor (singleton_local_shards), which slimx cannot read; save the "
            "checkpoint again with Megatron-LM's default, which stacks experts",
        )
    if bridge is not None and any(key.startswith(TEXT) for key in shapes):
        table = bridge
    per_layer = any(_LAYER.match(key) for key in shapes)
    known: set[str] = set()
    keys: dict[str, str] = {}
    centered: set[str] = set()
    for location in locations(table, per_layer=per_layer):
        if location.key in known:
            continue
        known |= {location.key, *location.also}
        key = _present((*location.also, location.key), shapes)
        if key is None:
            raise _wrong(path, location.key, "missing", "is missing; set trainer.load to a checkpoint of this model")
        if key != location.key:
            keys[location.key] = key
        elif (
            location.centered and not (path / RUN_STATE).is_dir()
        ):  # a run's checkpoint without these keys was written before they existed
            centered.add(key)
        if shapes[key] != location.shape and not _padded(path, key, shapes[key], location.shape):
            shape = f"has shape {list(shapes[key])}, but the model requires {list(location.shape)}"
            raise _wrong(path, key, "shape", f"{shape}; use a checkpoint of this model")
    unknown = sorted(key for key in shapes.keys() - known if not _ignored(key, table.mtp_layers, prediction))
    if unknown:
        lost = f"is not part of the model and would be lost ({len(unknown)} such tensors)"
        raise _wrong(path, unknown[0], "unknown", f"{lost}; use the config.json of the model that was saved")
    return Fit(path, per_layer, keys, frozenset(centered), table)


def _present(keys: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Returns the first of `keys` that is in `shapes`; None if there is none."""
    for key in keys:
        if key in shapes:
            return key
    return None


def _wrong(path: Path, key: str, code: str, problem: str) -> SlimxError:
    return SlimxError(f"{path}: tensor {key} {problem}", code=f"megatron.{code}", about=key)


def _ignored(key: str, first: int, stop: int) -> bool:
    """Returns True if `key` may be ignored: it is not a weight, or belongs to a multi-token prediction layer with an
    index from `first` up to but not including `stop`, which the model does not have."""
    layer = _PREDICTION.match(key.removeprefix(TEXT))
    return _NOT_WEIGHTS.match(key) is not None or (layer is not None and first <= int(layer[1]) < stop)


def _padded(path: Path, key: str, saved: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Returns True if the tensor `key` has more rows than the vocabulary because Megatron-LM padded it. This is
    determined from the vocabulary size in the checkpoint's arguments or, if they lack it, from the usual multiples.
    `saved` and `expected`: shapes in the checkpoint and in the model."""
    if key.removeprefix(TEXT) not in _PADDED or saved[1:] != expected[1:] or saved[0] < expected[0]:
        return False
    from slimx.extras.megatron_files.common import saved_vocabulary  # imports torch

    vocabulary = saved_vocabulary(path)
    if vocabulary is not None:
        return vocabulary == expected[0]
    return any(-(-expected[0] // multiple) * multiple == saved[0] for multiple in _PADDINGS)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of one tensor of the model in a checkpoint: a matrix or vector in the tensor with key `key`."""

    key: str
    shape: tuple[int, ...]
    """Shape of the complete tensor with this key."""
    index: tuple[int, ...]
    """Index of the matrix within the complete tensor: the layer, if layers are stacked, followed by the expert, if
    experts are stacked."""
    part: Part
    """The matrix or vector as a single rank would store it, and the Hugging Face tensors that provide its values."""
    entry: Entry
    also: tuple[str, ...] = ()
    """Other keys under which the same tensor may be stored."""
    centered: bool = False
    """True if `key` stores a norm's weights minus 1 (in fp32 if slimx wrote it), and the keys in `also` store the
    weights themselves."""
    first: int = 0
    """First row, in the tensor of `entry`, of the section at this location. Checkpoints store the sections of a tensor
    (ranges of its rows) separately."""


def locations(table: Table, *, per_layer: bool) -> Iterator[TensorLocation]:
    """Yields the locations of all tensors of the model, in the order of the Hugging Face checkpoint, with Megatron-LM's
    keys and stacking. `per_layer`: True if keys are numbered by layer."""
    parts = list(MegatronLayout(table, Sizes()).parts())
    depths = _depths(part.name for part in parts)
    for entry, part in zip(table.entries(), parts, strict=True):
        name = _PREDICTION_LAYER.sub(r"\1transformer_layer.", part.name)
        index: tuple[int, ...] = ()
        axes: tuple[int, ...] = ()
        layer = _LAYER.match(name)
        if layer is not None and not per_layer:
            name = layer["stack"] + name[layer.end() :]
            index = (int(layer["index"]),)
            axes = (depths[layer["stack"]],)
        name = _CONVOLUTION.sub("conv1d.", name)
        if _EXPERT.search(name):
            name = _EXPERT.sub(r".experts.experts.\1.\2", name)
            index = (*index, entry.expert)
            axes = (*axes, table.experts)
        factor = factor_key(name)
        also: tuple[str, ...] = ()
        if factor is not None:
            also = (factor,)
        elif entry.row.axis == 0 and _PROJECTION_NORM.search(name):
            also = (_PROJECTION_NORM.sub("norm", name),)
        for ending, first, section in _sections(entry, part):
            shape = (*axes, *section.shape)
            yield TensorLocation(name + ending, shape, index, section, entry, also, factor is not None, first)


def _depths(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of layers in each stack of layers to which `names` belong, by the stack's prefix."""
    depths: dict[str, int] = {}
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None:
            depths[layer["stack"]] = max(depths.get(layer["stack"], 0), int(layer["index"]) + 1)
    return depths


def _sections(entry: Entry, part: Part) -> Iterator[tuple[str, int, Part]]:
    """Yields the sections in which a checkpoint stores the tensor `part`: for each its key suffix, its first row, and
    its rows as a tensor. A tensor without sections is yielded as a whole."""
    if not entry.row.sections:
        yield "", 0, part
        return
    assert isinstance(entry.row.map, Sections)
    first = 0
    for ending, rows in zip(entry.row.sections, entry.row.map.rows, strict=True):
        rects = []
        for rect in part.rects:
            if first <= rect.local_row < first + rows:
                rects.append(rect._replace(local_row=rect.local_row - first))
        yield f".{ending}", first, part._replace(shape=(rows, *part.shape[1:]), rects=tuple(rects))
        first += rows


def numbers_layers(transformer: Mapping[str, Any]) -> bool:
    """Returns True if megatron-core numbers the layers in its checkpoint keys instead of stacking them, as it does for
    a model whose layers differ (`TransformerBlock.sharded_state_dict`, 0.19.2). `transformer`: fields of the model's
    TransformerConfig."""
    for key in ("moe_layer_freq", "linear_attention_freq"):
        frequency = transformer.get(key) or 1
        if isinstance(frequency, list) or frequency > 1:
            return True
    return bool(transformer.get("is_hybrid_model"))
