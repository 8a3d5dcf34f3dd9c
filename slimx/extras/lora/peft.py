"""Adapters in PEFT's format, adapter_config.json and adapter_model.safetensors: their names, and a reader.

PEFT adapts modules of transformers. One A of slimx's is that of several of them: of queries, keys and values, whose
rows of B come apart; gate and up projection of a dense layer likewise. Where these have an A each, theirs are stacked,
and B is block-diagonal: n modules of rank r are one adapter of rank n r, whose alpha is n times theirs. The experts of
a layer are two stacked parameters in transformers 5 (`gate_up_proj` [E, 2 I, h], `down_proj` [E, h, I]), which PEFT
wraps one around the other in this order (`target_parameters`; peft 0.21.2, tuners/lora/layer.py, ParamWrapper), with A
as [E r, in] and B as [out, r E]; in transformers 4 they are modules like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isclose, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slimx.config.sections.trainer import Lora
from slimx.errors import SlimxError
from slimx.extras.lora.targets import adapts, peft_name, target_of
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part, matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table
from slimx.models.files.index import read_object
from slimx.models.files.reader import check_finite

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""Parameter of transformers that a projection of an expert is in."""
PARAMETERS = (".gate", ".gate_proj", ".up_proj", ".down_proj")
"""Endings of modules of a model with experts that PEFT finds as parameters only: a router is no linear module, and the
others among `target_modules` mean experts (peft 0.21.2, utils/transformers_weight_conversion.py)."""
WRAPPED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Ending of the module that has the adapter of such a parameter."""
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
    # PiSSA, OLoRA, CorDA and LoftQ change the base, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Values of fields of adapter_config.json with which an adapter is a scale times B A beside its module, and no more."""


class PeftAdapters:
    """The adapters in one directory; only what is asked for is read."""

    def __init__(self, path: Path):
        """Raises SlimxError if there are none."""
        self.path = path
        for name in (CONFIG, TENSORS):
            if not (path / name).is_file():
                raise self._wrong("none", str(path), f"no {name}; name a directory that PEFT or slimx wrote")
        self.config = read_object(path / CONFIG)
        try:
            self._file = safe_open(path / TENSORS, framework="pt")
        except SafetensorError as error:
            raise self._wrong("file", TENSORS, f"{TENSORS} is damaged ({error}); copy it again") from error
        self._names = frozenset(self._file.keys())
        self._read: dict[str, tuple[str, torch.Tensor]] = {}
        """The tensor read last, by A and B: the experts of a layer are in one."""

    def check(self, table: Table, lora: Lora) -> None:
        """Compare them with what a run with `lora` trains of a model with `table`. Raises SlimxError naming the first
        field or tensor that differs: nothing of them is left out or guessed."""
        if (kind := self.config.get("peft_type")) != "LORA":
            raise self._wrong("kind", "peft_type", f"peft_type is {kind}; slimx trains LORA only")
        for field, plain in _PLAIN.items():
            if (found := self.config.get(field)) not in plain:
                raise self._wrong(
                    "field",
                    field,
                    f"{field}={found} is more than slimx computes (alpha / r * B A); merge it into the base",
                )
        for field, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
            if type(found := self.config.get(field)) not in kinds or found <= 0:
                raise self._wrong(
                    "field", field, f"{field} is {found}; write the positive number that it was trained with"
                )
        self._check_tensors(table, lora)
        stacked = max((len(self._stacked(part)) for part in _adapted(table, lora)), default=1)
        rank, alpha = stacked * self.config["r"], stacked * self.config["lora_alpha"]
        alpha *= sqrt(self.config["r"]) if self.config.get("use_rslora") else 1
        same = lora.rank == rank, isclose(lora.alpha, alpha, rel_tol=1e-9)
        for key, right in zip(("rank", "alpha"), same, strict=True):
            if not right:
                raise self._wrong(
                    key,
                    f"trainer.lora.{key}",
                    f"trainer.lora.{key} is {getattr(lora, key):.12g}, and up to {stacked} A of rank "
                    f"{self.config['r']} share a weight; set trainer.lora.rank={rank} and "
                    f"trainer.lora.alpha={alpha:.12g}",
                )

    def matrices(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """A [n r, columns] and B [rows, n r] beside the rows and columns that `part` has of a weight, for the n
        different A of its modules."""
        (rows, cols), rank, col = matrix(part.shape), self.config["r"], part.rects[0].col
        stacked = self._stacked(part)
        a, b = torch.zeros(len(stacked) * rank, cols), torch.zeros(rows, len(stacked) * rank)
        for number, sources in enumerate(stacked):
            at = slice(number * rank, (number + 1) * rank)
            a[at] = self._of(part, sources[0])[0][:, col : col + cols]
            for rect in part.rects:
                if rect.source in sources:
                    last = rect.row + (rect.rows - 1) * rect.step + 1
                    whole = self._of(part, rect.source)[1]
                    b[rect.local_row : rect.local_row + rect.rows, at] = whole[rect.row : last : rect.step]
        return a, b

    def _stacked(self, part: Part) -> list[list[int]]:
        """Numbers of those sources of `part` that have adapters, in one list where they have the same A."""
        out: list[list[int]] = []
        for number, source in enumerate(part.sources):
            module, _ = self._place(source)
            if f"{module}.lora_A.weight" not in self._names:
                continue
            for sources in out:
                first, _ = self._place(part.sources[sources[0]])
                if first == module or torch.equal(self._tensor(first, "A"), self._tensor(module, "A")):
                    sources.append(number)
                    break
            else:
                out.append([number])
        return out

    def _of(self, part: Part, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of one module, or of one projection of one expert."""
        name, expert = self._place(part.sources[source])
        a, b = (self._tensor(name, letter) for letter in "AB")
        if expert is None:
            return a, b
        rank, share = self.config["r"], len(b) // len(part.sources)
        own = b.view(len(b), rank, -1)[source * share : (source + 1) * share, :, expert]
        return a[expert * rank : (expert + 1) * rank], own

    def _tensor(self, module: str, letter: str) -> torch.Tensor:
        name = f"{module}.lora_{letter}.weight"
        if self._read.get(letter, ("",))[0] != name:
            values = self._file.get_tensor(name)
            check_finite(values, name, self.path / TENSORS)
            self._read[letter] = name, values
        return self._read[letter][1]

    def _check_tensors(self, table: Table, lora: Lora) -> None:
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._names}
        wanted: dict[str, tuple[int, ...]] = {}
        absent: dict[str, str] = {}
        for part in _adapted(table, lora):
            of_part = self._shapes(part, table.experts)
            wanted |= of_part
            target = str(target_of(part.name))
            if shapes.keys() & of_part.keys():
                absent[target] = ""
            else:
                absent.setdefault(target, next(iter(of_part)))
        for name in sorted(shapes.keys() - wanted.keys()):
            raise self._wrong(
                "unknown",
                name,
                f"{name} belongs to no module in trainer.lora.targets; add its target, or give adapters of this model",
            )
        for target, name in absent.items():
            if name:
                raise self._wrong(
                    "target",
                    "trainer.lora.targets",
                    f"it has no adapters of {target} ({name} and others); name only targets that it has in "
                    "trainer.lora.targets",
                )
        for name, shape in sorted(shapes.items()):
            pair = name[: -len("A.weight")] + ("B" if name.endswith("A.weight") else "A") + ".weight"
            if pair not in shapes:
                raise self._wrong("missing", pair, f"{pair} is missing, and {name} is there; copy the file again")
            if wanted[name] != shape:
                what = f"{name} has shape {list(shape)}, the model wants {list(wanted[name])}; give those of this model"
                raise self._wrong("shape", name, what)

    def _shapes(self, part: Part, experts: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a whole weight."""
        rank, (rows, cols) = self.config["r"], matrix(part.shape)
        out = {}
        for number, source in enumerate(part.sources):
            module, expert = self._place(source)
            own = rows if expert is not None else sum(r.rows for r in part.rects if r.source == number)
            stack = 1 if expert is None else experts
            out[f"{module}.lora_A.weight"] = stack * rank, cols
            out[f"{module}.lora_B.weight"] = own, rank * stack
        return out

    def _place(self, source: str) -> tuple[str, int | None]:
        """PEFT's name of the module that the checkpoint's tensor `source` is in, and the expert it is of in a stack."""
        name = peft_name(source, "A")
        layer, found, expert = name.partition(".experts.")
        if not found or name in self._names:
            return name.removesuffix(".lora_A.weight"), None
        number, projection = expert.split(".")[:2]
        return f"{layer}.experts{WRAPPED[STACKED[projection]]}", int(number)

    def _wrong(self, code: str, about: str, what: str) -> SlimxError:
        return SlimxError(f"{self.path}: {what}", code=f"peft.{code}", about=about)


@torch.no_grad()
def fill(adapters: Mapping[str, tuple[torch.Tensor, torch.Tensor]], parts: Iterable[Part], path: str) -> None:
    """Fill A and B by the names of weights in `parts` from the directory `path`, of which the rows and columns of these
    parts are read. Ranks beyond those that a weight has there are new: B is zero."""
    found = PeftAdapters(Path(path))
    for part in parts:
        if part.name in adapters:
            (a, b), (there_a, there_b) = adapters[part.name], found.matrices(part)
            a[: len(there_a)] = there_a
            b.zero_()[:, : len(there_a)] = there_b


def _adapted(table: Table, lora: Lora) -> Iterator[Part]:
    """Whole weights beside which `lora` puts adapters."""
    return (part for part in MegatronLayout(table, Sizes()).parts() if adapts(lora.targets, part.name))
