"""Adapters in PEFT's format, adapter_config.json and adapter_model.safetensors: their names, and a reader.

PEFT adapts modules of transformers. One A of slimx's is that of several of them: of queries, keys and values, whose
rows of B come apart; gate and up projection of a dense layer likewise. The experts of a layer are two stacked
parameters in transformers 5 (`gate_up_proj` [E, 2 I, h], `down_proj` [E, h, I]), which PEFT wraps one around the other
in this order (`target_parameters`; peft 0.21.2, tuners/lora/layer.py, ParamWrapper), with A as [E r, in] and B as
[out, r E].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slimx.config.sections.trainer import Lora
from slimx.errors import SlimxError
from slimx.layout.adapters import ROOT, adapts
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part, matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table
from slimx.models.files.index import read_object

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
"""Parameter of transformers that a projection of an expert is in."""
PARAMETERS = (".gate", ".gate_proj", ".up_proj", ".down_proj")
"""Endings of modules of a model with experts that PEFT finds as parameters only: a router is no linear module, and the
others among `target_modules` mean experts (peft 0.21.2, utils/transformers_weight_conversion.py)."""
WRAPPED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Ending of the module that has the adapter of such a parameter."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
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
"""Values of fields of adapter_config.json with which an adapter is alpha / r * B A beside its module, and no more."""


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
        self._read: dict[str, tuple[str, torch.Tensor]] = {}
        """The tensor read last, by A and B: the experts of a layer are in one."""

    def check(self, table: Table, lora: Lora) -> None:
        """Compare them with what a run with `lora` trains of a model with `table`. Raises SlimxError naming the first
        field or tensor that differs: nothing of them is left out or guessed."""
        if (kind := self.config.get("peft_type")) != "LORA":
            raise self._wrong("kind", "peft_type", f"peft_type is {kind}; slimx trains LORA only")
        for field, key, given in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
            if (found := self.config.get(field)) != given:
                raise self._wrong(
                    key, f"trainer.lora.{key}", f"{field} is {found}, trainer.lora.{key} {given}; make them equal"
                )
        for field, plain in _PLAIN.items():
            if (found := self.config.get(field)) not in plain:
                raise self._wrong(
                    "field",
                    field,
                    f"{field}={found} is more than slimx computes (alpha / r * B A); merge it into the base",
                )
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        wanted: dict[str, tuple[int, ...]] = {}
        for part in _adapted(table, lora):
            wanted |= self._shapes(part, table.experts)
        for name in sorted(shapes.keys() - wanted.keys()):
            raise self._wrong(
                "unknown",
                name,
                f"{name} belongs to no module in trainer.lora.targets; add its target, or give adapters of this model",
            )
        for name, shape in wanted.items():
            if name not in shapes:
                raise self._wrong(
                    "missing", name, f"{name} is missing; name only targets that it has in trainer.lora.targets"
                )
            if shapes[name] != shape:
                what = f"{name} has shape {list(shapes[name])}, the model wants {list(shape)}; give those of this model"
                raise self._wrong("shape", name, what)
        for part in _adapted(table, lora):
            self._check_shared(part)

    def matrices(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, columns] and B [rows, r] beside the rows and columns that `part` has of a weight."""
        (rows, cols), rank = matrix(part.shape), self.config["r"]
        a, b = torch.empty(rank, cols), torch.empty(rows, rank)
        for rect in part.rects:
            whole_a, whole_b = self._of(part, rect.source)
            last = rect.row + (rect.rows - 1) * rect.step + 1
            a[:, rect.local_col : rect.local_col + rect.cols] = whole_a[:, rect.col : rect.col + rect.cols]
            b[rect.local_row : rect.local_row + rect.rows] = whole_b[rect.row : last : rect.step]
        return a, b

    def _of(self, part: Part, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of one module, or of one projection of one expert."""
        name, expert = _place(part.sources[source])
        a, b = (self._tensor(name, letter) for letter in "AB")
        if expert is None:
            return a, b
        rank, share = self.config["r"], len(b) // len(part.sources)
        own = b.view(len(b), rank, -1)[source * share : (source + 1) * share, :, expert]
        return a[expert * rank : (expert + 1) * rank], own

    def _tensor(self, module: str, letter: str) -> torch.Tensor:
        name = f"{module}.lora_{letter}.weight"
        if self._read.get(letter, ("",))[0] != name:
            self._read[letter] = name, self._file.get_tensor(name)
        return self._read[letter][1]

    def _shapes(self, part: Part, experts: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a whole weight."""
        rank, (rows, cols) = self.config["r"], matrix(part.shape)
        out = {}
        for number, source in enumerate(part.sources):
            module, expert = _place(source)
            own = rows if expert is not None else sum(r.rows for r in part.rects if r.source == number)
            stack = 1 if expert is None else experts
            out[f"{module}.lora_A.weight"] = stack * rank, cols
            out[f"{module}.lora_B.weight"] = own, rank * stack
        return out

    def _check_shared(self, part: Part) -> None:
        modules = [_place(source)[0] for source in part.sources]
        first = self._tensor(modules[0], "A")
        for module in modules[1:]:
            if module != modules[0] and not torch.equal(first, self._tensor(module, "A")):
                raise self._wrong(
                    "several_a",
                    f"{module}.lora_A.weight",
                    f"{module} and {modules[0]} have different A, where slimx trains one for both; give adapters that "
                    "a run of slimx trained, or merge these into the base",
                )

    def _wrong(self, code: str, about: str, what: str) -> SlimxError:
        return SlimxError(f"{self.path}: {what}", code=f"peft.{code}", about=about)


def _adapted(table: Table, lora: Lora) -> Iterator[Part]:
    """Whole weights beside which `lora` puts adapters."""
    return (part for part in MegatronLayout(table, Sizes()).parts() if adapts(lora.targets, part.name))


def _place(source: str) -> tuple[str, int | None]:
    """PEFT's name of the module that the checkpoint's tensor `source` is in, and the expert it is of."""
    module = source.removesuffix(".weight")
    layer, found, expert = module.partition(".experts.")
    if not found:
        return f"{ROOT}{module}", None
    number, projection = expert.split(".")
    return f"{ROOT}{layer}.experts{WRAPPED[STACKED[projection]]}", int(number)
