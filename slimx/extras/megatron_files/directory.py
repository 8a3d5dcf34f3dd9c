"""Megatron-LM's checkpoint directories: finding the checkpoint in one, and whether a model fits it.

    latest_checkpointed_iteration.txt      "12", or "release" for weights without a history
    iter_0000012/  or  release/            torch_dist: .metadata, metadata.json, common.pt, *.distcp

slimx writes the same (slimx/orchestration/state/saves.py). Source of the names: megatron/training/checkpointing.py of
Megatron-LM, core_r0.16.0. Nothing is loaded here; `load.py` does that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part
from slimx.layout.ranks import Sizes
from slimx.layout.table import Entry, Table
from slimx.models.files.index import read_object
from slimx.models.files.torch_dist import TRACKER, factor_key, iteration_name

_CONVOLUTION = re.compile(r"(?<=\.mixer\.)conv1d_")
"""A Mamba-2 layer's convolution, which checkpoints have called a module since it was one."""
RUN_STATE = "slimx"
"""Directory, in a checkpoint that slimx wrote, of what its runs alone need."""
_ITERATION = re.compile(r"[0-9]{1,15}")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)\d+$")
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron-LM pads their rows to a multiple of `make_vocab_size_divisible_by` x TP."""
_PADDINGS = sorted({*(2**k for k in range(13)), *(192 * 2**k for k in range(6))})
"""Multiples that the vocabulary is padded to: divisors up to 128 times tensor-parallel sizes up to 48, in powers of two
and three times them."""
_BESIDE = re.compile(
    r"(chained_\d+\.)?optimizer\.|rng_state|random_state|rerun_state_machine_state|common_state|.*\._extra_state"
)
"""Keys of a checkpoint's entries that are no weights of the model."""
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.")
_PREDICTION_LAYER = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.")
"""Part of a name that checkpoints still keep as `transformer_layer`, megatron-core's name for it up to 0.16."""
_PROJECTION_NORM = re.compile(r"(?<=self_attention\.[qk]_)layernorm(?=\.weight$)")
"""Part of a key that names a norm over all heads. megatron-core has none: slimx puts its own where the norm per head
would be, slime (slime_plugins/models/minimax_m2.py) beside it as `q_norm` and `k_norm`."""


def is_megatron(path: Path) -> bool:
    """Returns True if `path` is Megatron-LM's: a directory with a tracker file, or one of its checkpoints."""
    named = re.fullmatch(r"iter_\d{7,}|release", path.name) is not None
    return (path / TRACKER).is_file() or (path / "metadata.json").is_file() or (named and path.is_dir())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` holds or is. Raises SlimxError if there is none that slimx reads."""
    tracker, found = path / TRACKER, path
    if tracker.is_file():
        said = tracker.read_text(errors="replace").strip()
        if said != "release" and _ITERATION.fullmatch(said) is None:
            raise _unfit(tracker, "tracker", f"says {said[:40]!r}, neither an iteration nor release; write one into it")
        found = path / ("release" if said == "release" else iteration_name(int(said)))
        if not found.is_dir():
            raise _unfit(tracker, "tracker", f"names {found.name}, which is not there; write an iteration that is")
    described = found / "metadata.json"
    if not described.is_file():
        old = any(found.glob("mp_rank_*"))
        problem = "Megatron-LM's old format (mp_rank_*)" if old else "no torch_dist checkpoint (no metadata.json)"
        raise _unfit(found, "format", f"{problem}; save it again with --ckpt-format torch_dist")
    if (backend := read_object(described).get("sharded_backend")) != "torch_dist":
        raise SlimxError(
            f"{found}: its format is {str(backend)[:40]}; save it again with --ckpt-format torch_dist",
            code="megatron.format",
            about=str(described),
        )
    return found


def _unfit(path: Path, code: str, what: str) -> SlimxError:
    return SlimxError(f"{path}: {what}", code=f"megatron.{code}", about=str(path))


@dataclass(frozen=True, slots=True)
class Fit:
    """Names of the tensors in a checkpoint that fits a model."""

    path: Path
    per_layer: bool
    """`decoder.layers.3.x` for each layer; else one `decoder.layers.x` with a layer axis."""
    keys: Mapping[str, str]
    """Key that a model of slimx has -> the one in the checkpoint, where they differ."""
    centred: frozenset[str] = frozenset()
    """Keys in the checkpoint that hold a norm's factors less 1."""


def check_fit(path: Path, table: Table, *, prediction: int = 0) -> Fit:
    """Compare names and shapes with a family's weight table. Raises SlimxError naming the first tensor that differs,
    that is missing, or that the table does not know: what it does not know would be lost without a word.

    `prediction`: layers of multi-token prediction that the checkpoint may hold, though the table has fewer."""
    from slimx.models.files.safe_pickle import read_metadata  # here: most ask for names alone, and this takes seconds

    path = find_checkpoint(path)
    described = read_metadata(path / ".metadata").state_dict_metadata
    shapes = {key: tuple(value.size) for key, value in described.items() if hasattr(value, "size")}
    if any(".experts.experts.0." in key for key in shapes):
        raise SlimxError(
            f"{path}: every expert is a tensor of its own (singleton_local_shards); save it again with Megatron-LM's "
            "default, which stacks them",
        )
    per_layer = any(_LAYER.match(key) for key in shapes)
    known, keys, centred = set(), {}, set()
    for place in places(table, per_layer=per_layer):
        if place.key in known:
            continue
        known |= {place.key, *place.also}
        found = next((key for key in (*place.also, place.key) if key in shapes), None)
        if found is None:
            raise _wrong(path, place.key, "missing", "is missing; the checkpoint is not of this model")
        if found != place.key:
            keys[place.key] = found
        elif place.centred and not (path / RUN_STATE).is_dir():  # a run's own without them are of before these keys
            centred.add(found)
        if shapes[found] != place.shape and not _padded(path, found, shapes[found], place.shape):
            shape = f"has shape {list(shapes[found])}, the model wants {list(place.shape)}"
            raise _wrong(path, found, "shape", shape)
    unknown = sorted(key for key in shapes.keys() - known if not _beside(key, table.mtp_layers, prediction))
    if unknown:
        lost = f"has no place in the model ({len(unknown)} such tensors), and would be lost"
        raise _wrong(path, unknown[0], "unknown", f"{lost}; give the config.json of the model that was saved")
    return Fit(path, per_layer, keys, frozenset(centred))


def _wrong(path: Path, key: str, code: str, what: str) -> SlimxError:
    return SlimxError(f"{path}: tensor {key} {what}", code=f"megatron.{code}", about=key)


def _beside(key: str, first: int, stop: int) -> bool:
    """Returns True if `key` is no tensor of a model with `first` layers of multi-token prediction: it is no weight, or
    lies in one of the layers from `first` to before `stop`."""
    layer = _PREDICTION.match(key)
    return _BESIDE.match(key) is not None or (layer is not None and first <= int(layer[1]) < stop)


def _padded(path: Path, key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Returns True if rows beyond the vocabulary are Megatron-LM's padding. The checkpoint's arguments may say how many
    tokens there are; else padding is what a usual multiple gives."""
    if key not in _PADDED or found[1:] != wanted[1:] or found[0] < wanted[0]:
        return False
    from slimx.extras.megatron_files.common import saved_vocabulary  # here: it imports torch

    vocabulary = saved_vocabulary(path)
    if vocabulary is not None:
        return vocabulary == wanted[0]
    return any(-(-wanted[0] // multiple) * multiple == found[0] for multiple in _PADDINGS)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of one tensor of the model in a checkpoint: a matrix or vector of the tensor with key `key`."""

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor with this key."""
    index: tuple[int, ...]
    """Index of the matrix in it: layer where layers are stacked, then expert."""
    part: Part
    """The same tensor as one rank would hold it, and the Hugging Face tensors that fill it."""
    entry: Entry
    also: tuple[str, ...] = ()
    """Other keys for the same tensor."""
    centred: bool = False
    """True if `key` holds a norm's factors less 1, in fp32 where slimx writes it, and `also` the factors."""
    first: int = 0
    """Row of the entry's tensor that this one begins at: checkpoints keep the sections of a tensor apart."""


def places(table: Table, *, per_layer: bool) -> Iterator[TensorPlace]:
    """Every tensor of the model in the order of the Hugging Face checkpoint, keyed and stacked as Megatron-LM does."""
    for entry, part in zip(table.entries(), MegatronLayout(table, Sizes()).parts(), strict=True):
        name, index, axes = _PREDICTION_LAYER.sub(r"\1transformer_layer.", part.name), (), ()
        if not per_layer and entry.row.stage == "layer":
            name, index, axes = _LAYER.sub("decoder.layers.", name), (entry.layer,), (table.layers,)
        name = _CONVOLUTION.sub("conv1d.", name)
        if _EXPERT.search(name):
            name = _EXPERT.sub(r".experts.experts.\1.\2", name)
            index, axes = (*index, entry.expert), (*axes, table.experts)
        also = (_PROJECTION_NORM.sub("norm", name),) if entry.row.axis == 0 and _PROJECTION_NORM.search(name) else ()
        factor = factor_key(name)
        also = also if factor is None else (factor,)
        for ending, first, section in _sections(entry, part):
            shape, centred = (*axes, *section.shape), factor is not None
            yield TensorPlace(name + ending, shape, index, section, entry, also, centred, first)


def _sections(entry: Entry, part: Part) -> Iterator[tuple[str, int, Part]]:
    """The tensors that a checkpoint keeps `part` in: ending of the key, first row, and the rows as a tensor."""
    if not entry.row.sections:
        yield "", 0, part
        return
    first = 0
    for ending, rows in zip(entry.row.sections, entry.row.map.rows, strict=True):
        inside = [rect for rect in part.rects if first <= rect.local_row < first + rows]
        rects = tuple(rect._replace(local_row=rect.local_row - first) for rect in inside)
        yield f".{ending}", first, part._replace(shape=(rows, *part.shape[1:]), rects=rects)
        first += rows


def numbers_layers(transformer: Mapping[str, Any]) -> bool:
    """Returns True if megatron-core gives every layer keys of its own, as it does where layers differ
    (`TransformerBlock.sharded_state_dict`, 0.19.2). `transformer`: fields of its TransformerConfig."""
    return any(
        isinstance(frequency, list) or frequency > 1
        for frequency in (transformer.get(key) or 1 for key in ("moe_layer_freq", "linear_attention_freq"))
    ) or bool(transformer.get("is_hybrid_model"))
