"""Runs the trainers of test_families: one start of real ranks per layout, for the models of all families."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from slimx.config.sections.trainer import Trainer
from slimx.data.records import Group, Prompt
from slimx.data.saved.codec import save_groups
from slimx.extras.convert.run import hf_to_megatron
from slimx.extras.convert.work import convert
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes, sizes_of
from slimx.layout.table import Table, stored
from slimx.models.families import Family, load_family, read_model
from tests.integration import transformer_engine_stand
from tests.integration.conftest import Weights
from tests.integration.family_cases import CASES
from tests.integration.family_oracle import Oracle
from tests.integration.rank_processes import cached, run_ranks
from tests.integration.trainer_rank import by_sequence
from tests.needed import missing

ENGINE, ENGINE_STAGES = "engine-TP2xEP2", "engine-TP2xPP2"
"""The layers are Transformer Engine's (transformer_engine_stand.py)."""
ENGINES = (ENGINE, ENGINE_STAGES)
LAYOUTS = {
    "single": {"world_size": 1},
    "TP2xEP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "PP2": {"world_size": 2, "pipeline": 2},
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
    "TP2xPP2xEP2xETP2": {"world_size": 8, "tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 2},
    "CP2": {"world_size": 2, "context": 2},
    "CP2xTP2xPP2": {"world_size": 8, "context": 2, "tensor": 2, "pipeline": 2},
    ENGINE: {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    ENGINE_STAGES: {"world_size": 4, "tensor": 2, "pipeline": 2},
}
SIZES = {name: sizes_of(Trainer(**layout)) for name, layout in LAYOUTS.items()}
STAGED = ("V3", "Qwen3-Next", "Nemotron-3")
"""Models with experts whose layers differ from stage to stage: a dense one first, delta nets, Mamba-2."""
TIED = ("Llama-tied", "Qwen3-tied")
"""Qwen2 has its embeddings tied in `make test`."""
SAVED = ("V3", "Qwen3-Next", "Qwen2-tied")
"""Thorough models that are so in layouts of `make test` too; test_convert saves and loads every family."""


def quick(layout: str, model: str) -> bool:
    """Returns True if `make test` has the model in that layout: each is split in one way that combines two."""
    if model in TIED:
        return False
    if layout in ENGINES:
        return model == ("V3" if layout == ENGINE else "Qwen3")
    return layout == ("TP2xPP2" if CASES[model].dense else "TP2xEP2") or layout == "PP2" and model in STAGED


def thorough(layout: str, model: str) -> bool:
    """Returns True if the ranks also save, restore and convert the model there, and build it in bfloat16."""
    return CASES[model].thorough and (model in SAVED or not quick(layout, model))


def family_of(model: str) -> Family | None:
    """Returns the family of a case that slimx does not bring; None for the others."""
    path = CASES[model].family
    return load_family(path) if path else None


class Laboratory:
    """Makes each model and runs each layout once, when it is first requested."""

    def __init__(self, directory: Path, chosen: Iterable[tuple[str, str]], train: Callable[..., None]):
        """`chosen`: layouts and names of cases. `train`: for `run_ranks`; its job has `cases` and `groups`."""
        self.directory, self.chosen, self.train = directory, set(chosen), train
        self.oracles: dict[str, Oracle] = {}
        self.run_ranks = cached(self._run)

    def oracle(self, model: str) -> Oracle:
        if model not in self.oracles:
            self.oracles[model] = oracle = CASES[model].make(self.directory / model, list(CASES).index(model))
            group = Group(id="g", prompt=Prompt(id="p", token_ids=[1]), trajectories=oracle.trajectories())
            save_groups(self.directory / f"{model}.groups", [group])
        return self.oracles[model]

    def release(self, model: str) -> Path:
        """Returns the checkpoint as a release of Megatron-LM."""
        out = self.directory / f"{model}.release"
        if not out.exists():
            convert(hf_to_megatron(self.oracle(model).path, family=family_of(model)), out, threads=1, verify=False)
        return out

    def __call__(self, layout: str, model: str) -> Ran:
        """Raises the error of a rank if the model or the whole layout failed."""
        self.run_ranks(layout)
        for file in sorted((self.directory / layout).glob(f"{model}.*error")):
            raise AssertionError(f"{file.name}: {file.read_text()}")
        return Ran(self.directory / layout, model, SIZES[layout], self.oracle(model))

    def _run(self, layout: str) -> None:
        if layout in ENGINES and not transformer_engine_stand.PACKAGE.is_dir():
            missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
        cases = []
        for name, case in CASES.items():
            if (layout, name) not in self.chosen:
                continue
            model = {"path": self.oracle(name).path, "family": case.family}
            job = {"name": name, "model": model, "mtp": case.mtp, "vision": case.vision, "dtype": "float32"}
            release = self.release(name) if thorough(layout, name) else None
            cases.append({**job, "release": release})
            if thorough(layout, name):
                cases.append({**job, "name": f"{name}.half", "dtype": "bfloat16", "release": None})
        job = {"cases": cases, "layout": LAYOUTS[layout], "groups": self.directory}
        role = "rank_with_engine" if layout in ENGINES else "rank"
        run_ranks(self.train, self.directory / layout, SIZES[layout].world, job, role=role)


class Ran:
    """Files that the ranks of one layout wrote of one model."""

    def __init__(self, directory: Path, model: str, sizes: Sizes, oracle: Oracle):
        self.directory, self.model, self.sizes = directory, model, sizes
        self.checkpoint = directory / f"{model}.checkpoint"
        self.table: Table = read_model(oracle.path, mtp_layers=CASES[model].mtp, family=family_of(model)).table

    def sequences(self, rank: int, key: str) -> dict[tuple[int, ...], np.ndarray]:
        """Returns `key` of every sequence (its tokens and the last label) that `rank` saw; empty if not known there."""
        return by_sequence(np.load(self.directory / f"{self.model}.{rank}.npz"), f"{key}.{{}}")

    def modules(self) -> set[str]:
        """Returns class names of the modules that the first rank's model is made of."""
        return set((self.directory / f"{self.model}.modules").read_text().split())

    def logits(self) -> dict[tuple[int, ...], np.ndarray]:
        """Returns [L - 1, vocab] of every sequence."""
        out = {}
        for rank in range(self.sizes.world):
            out |= self.sequences(rank, "logits")
        return out

    def local(self, kind: str, rank: int) -> Weights:
        """Returns local tensors of one rank by local name."""
        return load_file(self.directory / f"{self.model}.{kind}.{rank}.safetensors")

    def assembled(self, kind: str) -> Weights:
        """Returns checkpoint tensors out of the ranks' local ones; ranks with the same part must agree bit for bit."""
        tensors = [self.local(kind, rank) for rank in range(self.sizes.world)]
        shapes = self.table.sources()
        out: Weights = {}
        # Copies come after the tensors that they repeat.
        for part in sorted(MegatronLayout(self.table, self.sizes).parts(), key=lambda part: part.copy):
            if part.name not in tensors[part.ranks[0]]:
                continue
            locals_ = [tensors[rank][part.name].view(matrix(part.shape)) for rank in part.ranks]
            assert all(torch.equal(locals_[0], other) for other in locals_[1:]), part.name
            for rect in part.rects:
                name = part.sources[rect.source]
                whole = out.setdefault(name, torch.full(shapes[name], torch.nan)).view(matrix(shapes[name]))
                local = locals_[0][rect.local_row :, rect.local_col :][: rect.rows, : rect.cols]
                rows, cols = rect.extent
                place = whole[rect.row : rect.row + rows : rect.step, rect.col : rect.col + cols]
                assert not part.copy or torch.equal(place, local), part.name
                place.copy_(local)
        return stacked(out)


def stacked(sources: Weights) -> Weights:
    """Returns tensors by the names of a table's sources, those of stacks put together as the checkpoint has them."""
    out: Weights = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in sources.items():
        place = stored(name)
        if place.index is None:
            out[name] = tensor
        else:
            stacks.setdefault(place.name, {})[place.index] = tensor.T if place.transposed else tensor
    return out | {name: torch.stack([parts[k] for k in range(len(parts))]) for name, parts in stacks.items()}


def difference(found: Weights, expected: Weights) -> tuple[float, str]:
    """Returns the largest max|a - b| / max|b| over tensors, and the name of its tensor."""
    errors = {n: ((found[n] - b).abs().max() / b.abs().max()).item() for n, b in expected.items()}
    return max((value, name) for name, value in errors.items())
