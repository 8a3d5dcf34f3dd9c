"""Reads adapters in PEFT's format (adapter_config.json and adapter_model.safetensors), and checks that they fit the
model.

PEFT adapts modules of transformers. In slimx several of these share one weight and one matrix A: queries, keys and
values, whose rows of B are separate, and likewise the gate and up projections of a dense layer. If the modules have
different matrices A, these are stacked and B is block-diagonal: n modules of rank r become one adapter of rank n r,
with n times their alpha. The experts of a layer are two stacked parameters in transformers 5 (`gate_up_proj` [E, 2 I,
h], `down_proj` [E, h, I]), also if the checkpoint stores them separately or transposed. PEFT wraps the adapter of one
parameter around that of the other in this order (`target_parameters`; peft 0.21.2, tuners/lora/layer.py, ParamWrapper),
with A as [E r, in] and B as [out, r E]. In transformers 4 the projections of an expert are ordinary modules, unless the
checkpoint stacks experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isclose, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from slimx.config.sections.trainer import Lora
from slimx.errors import SlimxError
from slimx.extras.lora.targets import adapts, peft_name, target_of
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part, matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table, stored
from slimx.models.files.index import read_object
from slimx.models.files.reader import check_finite
from slimx.reshard.manifest import ADAPTER_PREFIX

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""Projection of an expert -> transformers' stacked parameter that contains the projection."""
PARAMETERS = (".gate", ".gate_proj", ".up_proj", ".down_proj")
"""Endings of the names of modules that PEFT can adapt only through `target_parameters` if the model has experts: the
router, because it is not a linear module, and the projections, because PEFT takes their names in `target_modules` for
experts (peft 0.21.2, utils/transformers_weight_conversion.py)."""
WRAPPED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Stacked parameter -> suffix in the name of the PEFT module that contains the parameter's adapter."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "alora_invocation_tokens": ([], None),
    # Other values (PiSSA, OLoRA, CorDA, LoftQ) also change the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Field of adapter_config.json -> values with which the adapter is plain LoRA, which only adds scale * B A to its
module's weight."""


class StackItem(NamedTuple):
    """Projections of one routed expert, as an item of a stacked parameter in transformers."""

    mlp: str
    """Name of the module that contains the experts."""
    parameter: str
    """Name of the stacked parameter, a key of `WRAPPED`."""
    expert: int

    @property
    def module(self) -> str:
        """Name of the PEFT module that contains the parameter's adapter."""
        return f"{self.mlp}.experts{WRAPPED[self.parameter]}"


def stack_item(source: str) -> StackItem | None:
    """Returns the stack item to which the checkpoint tensor `source`, or an item of a stacked one, belongs; None if it
    is not part of a routed expert."""
    tensor = stored(source)
    mlp, marker, name = tensor.name.partition(".experts.")
    if not marker:
        return None
    if tensor.index is not None:
        return StackItem(mlp, name, tensor.index)
    index, projection = name.split(".")[:2]
    return StackItem(mlp, STACKED[projection], int(index))


class PeftAdapters:
    """LoRA adapters stored in one directory in PEFT's format; each tensor is read when it is used."""

    def __init__(self, path: Path):
        """Opens the adapters' files in the directory `path`. Raises SlimxError if they are missing or damaged."""
        self.path = path
        for name in (CONFIG, TENSORS):
            if not (path / name).is_file():
                raise self._error("none", str(path), f"{name} is missing; use a directory that PEFT or slimx wrote")
        self.config = read_object(path / CONFIG)
        try:
            self._file = safe_open(path / TENSORS, framework="pt")
        except SafetensorError as error:
            raise self._error("file", TENSORS, f"{TENSORS} is damaged ({error}); copy the file again") from error
        self._names = frozenset(self._file.keys())
        self._read: dict[str, tuple[str, torch.Tensor]] = {}
        """"A" or "B" -> name and values of the last tensor read. This tensor is kept because it may contain all experts
        of a layer, which are read one after the other."""

    def check(self, table: Table, lora: Lora) -> None:
        """Raises SlimxError unless the adapters are exactly those that a run with `lora` trains for a model with
        `table`.

        The message names the first field or tensor that differs; nothing is ignored or guessed."""
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise self._error(
                "kind", "peft_type", f"peft_type is {kind}, but slimx supports only LORA; use LoRA adapters"
            )
        self._check_fields()
        self._check_tensors(table, lora)
        stacked = max((len(self._stacked(part)) for part in _adapted(table, lora)), default=1)
        rank = stacked * self.config["r"]
        alpha = stacked * self.config["lora_alpha"]
        if self.config.get("use_rslora"):
            alpha *= sqrt(self.config["r"])
        same = {"rank": lora.rank == rank, "alpha": isclose(lora.alpha, alpha, rel_tol=1e-9)}
        for key, equal in same.items():
            if not equal:
                raise self._error(
                    key,
                    f"trainer.lora.{key}",
                    f"trainer.lora.{key} is {getattr(lora, key):.12g}, but up to {stacked} adapters of rank "
                    f"{self.config['r']} share a weight here; set trainer.lora.rank={rank} and "
                    f"trainer.lora.alpha={alpha:.12g}",
                )

    def _check_fields(self) -> None:
        for field, plain in _PLAIN.items():
            value = self.config.get(field)
            if value not in plain:
                raise self._error(
                    "field",
                    field,
                    f"{field}={value} is not supported, because slimx only adds alpha / r * B A to a weight; merge "
                    "the adapters into the base model",
                )
        kinds: dict[str, tuple[type, ...]] = {"r": (int,), "lora_alpha": (int, float)}
        for field, types in kinds.items():
            number: Any = self.config.get(field)
            if type(number) not in types or number <= 0:
                raise self._error(
                    "field", field, f"{field} is {number}, not a positive number; set the number used in training"
                )

    def matrices(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A [n r, columns] and B [rows, n r] for the rows and columns of a weight that `part` contains.

        n: number of distinct matrices A among the modules that share the weight; r: rank of the adapters in the
        directory."""
        rows, cols = matrix(part.shape)
        rank = self.config["r"]
        col = part.rects[0].col
        stacked = self._stacked(part)
        a = torch.zeros(len(stacked) * rank, cols)
        b = torch.zeros(rows, len(stacked) * rank)
        for index, sources in enumerate(stacked):
            block = slice(index * rank, (index + 1) * rank)
            a[block] = self._pair(part, sources[0])[0][:, col : col + cols]
            for rect in part.rects:
                if rect.source in sources:
                    last = rect.row + (rect.rows - 1) * rect.step + 1
                    source_rows = self._pair(part, rect.source)[1][rect.row : last : rect.step]
                    b[rect.local_row : rect.local_row + rect.rows, block] = source_rows
        return a, b

    def _stacked(self, part: Part) -> list[list[int]]:
        """Returns the indices, in `part.sources`, of the checkpoint tensors that have adapters, grouped into one list
        for each shared matrix A."""
        out: list[list[int]] = []
        for index, source in enumerate(part.sources):
            module, _ = self._module(source)
            if f"{module}.lora_A.weight" not in self._names:
                continue
            for sources in out:
                first, _ = self._module(part.sources[sources[0]])
                if first == module or torch.equal(self._tensor(first, "A"), self._tensor(module, "A")):
                    sources.append(index)
                    break
            else:
                out.append([index])
        return out

    def _pair(self, part: Part, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A and B for the checkpoint tensor `part.sources[source]`, which is the weight of a module or of one
        expert's projection."""
        name, expert = self._module(part.sources[source])
        a = self._tensor(name, "A")
        b = self._tensor(name, "B")
        if expert is None:
            return a, b
        rank = self.config["r"]
        rows = len(b) // len(part.sources)
        by_expert = b.view(len(b), rank, -1)
        expert_b = by_expert[source * rows : (source + 1) * rows, :, expert]
        return a[expert * rank : (expert + 1) * rank], expert_b

    def _tensor(self, module: str, letter: str) -> torch.Tensor:
        name = f"{module}.lora_{letter}.weight"
        if self._read.get(letter, ("",))[0] != name:
            values = self._file.get_tensor(name)
            check_finite(values, name, self.path / TENSORS)
            self._read[letter] = name, values
        return self._read[letter][1]

    def _check_tensors(self, table: Table, lora: Lora) -> None:
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._names}
        expected: dict[str, tuple[int, ...]] = {}
        absent: dict[str, str] = {}
        for part in _adapted(table, lora):
            part_shapes = self._shapes(part, table.experts)
            expected |= part_shapes
            target = str(target_of(part.name))
            if shapes.keys() & part_shapes.keys():
                absent[target] = ""
            else:
                absent.setdefault(target, next(iter(part_shapes)))
        for name in sorted(shapes.keys() - expected.keys()):
            raise self._error(
                "unknown",
                name,
                f"{name} belongs to no module in trainer.lora.targets; add its target, or use adapters of this model",
            )
        for target, name in absent.items():
            if name:
                raise self._error(
                    "target",
                    "trainer.lora.targets",
                    f"there are no adapters for the target {target} (such as {name}); set trainer.lora.targets to the "
                    "targets that the directory contains",
                )
        for name, shape in sorted(shapes.items()):
            pair = name[: -len("A.weight")] + ("B" if name.endswith("A.weight") else "A") + ".weight"
            if pair not in shapes:
                raise self._error("missing", pair, f"{name} is present, but {pair} is missing; copy the adapters again")
            if expected[name] != shape:
                raise self._error(
                    "shape",
                    name,
                    f"{name} has shape {list(shape)}, but the model requires {list(expected[name])}; use adapters of "
                    "this model",
                )

    def _shapes(self, part: Part, experts: int) -> dict[str, tuple[int, ...]]:
        """Returns {name: shape} for the tensors that the directory must contain for the adapter of `part`, an unsplit
        weight."""
        rank = self.config["r"]
        rows, cols = matrix(part.shape)
        shapes: dict[str, tuple[int, ...]] = {}
        for index, source in enumerate(part.sources):
            module, expert = self._module(source)
            if expert is None:
                source_rows = sum(rect.rows for rect in part.rects if rect.source == index)
                stack = 1
            else:
                source_rows = rows
                stack = experts
            shapes[f"{module}.lora_A.weight"] = stack * rank, cols
            shapes[f"{module}.lora_B.weight"] = source_rows, rank * stack
        return shapes

    def _module(self, source: str) -> tuple[str, int | None]:
        """Returns PEFT's name for the module whose weight is the checkpoint tensor `source`, and the expert's index if
        the module is a stack of experts, else None."""
        name = peft_name(source, "A")
        item = stack_item(source)
        if item is None or name in self._names:
            return name.removesuffix(".lora_A.weight"), None
        return f"{ADAPTER_PREFIX}{item.module}", item.expert

    def _error(self, code: str, about: str, problem: str) -> SlimxError:
        return SlimxError(f"{self.path}: {problem}", code=f"peft.{code}", about=about)


@torch.no_grad()
def fill(adapters: Mapping[str, tuple[torch.Tensor, torch.Tensor]], parts: Iterable[Part], path: str) -> None:
    """Copies adapters from the directory `path` into A and B of this rank.

    `adapters`: weight name -> (A, B). `parts`: the rank's weights; only their rows and columns are read. If A has more
    rows than the stored matrix, its remaining rows keep their initial values, and the corresponding columns of B are
    set to zero."""
    stored = PeftAdapters(Path(path))
    for part in parts:
        if part.name in adapters:
            a, b = adapters[part.name]
            stored_a, stored_b = stored.matrices(part)
            a[: len(stored_a)] = stored_a
            b.zero_()[:, : len(stored_a)] = stored_b


def _adapted(table: Table, lora: Lora) -> Iterator[Part]:
    """Returns the unsplit weights that `lora` adapts."""
    return (part for part in MegatronLayout(table, Sizes()).parts() if adapts(lora.targets, part.name))
