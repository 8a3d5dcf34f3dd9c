"""A DeepSeek-V3 in the trainer computes what transformers computes, in every layout, and comes back bit for bit.

Each layout is one start of real processes (`deepseek_v3_rank.py`) that load two models: one with compressed queries,
yarn, expert groups and a layer of multi-token prediction (V3), one without any of them (Moonlight).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.data.codec import save_groups
from slimx.data.records import Group, Prompt
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes, coordinates
from slimx.layout.table import Table
from slimx.models.families import read_model
from slimx.ports import free_port
from tests.integration.conftest import Weights
from tests.integration.deepseek_v3_oracle import MODELS, Oracle
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_rank import demonstrations

pytestmark = pytest.mark.integration

LAYOUTS = {
    "single": {"world_size": 1},
    "TP2xEP2": {"world_size": 2, "tensor": 2, "expert": 2, "expert_tensor": 1},
    "TP2xPP2": {"world_size": 4, "tensor": 2, "pipeline": 2},
}
SIZES = {
    "single": Sizes(),
    "TP2xEP2": Sizes(tensor=2, expert=2),
    "TP2xPP2": Sizes(tensor=2, pipeline=2, expert_tensor=2),
}
DEADLINE_S = 120
WRONG = (5, 3)
"""Sequence and position at which the last layer's route is not the model's."""


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    directory = tmp_path_factory.mktemp("models")
    return {name: Oracle(directory / name, seed, fields) for seed, (name, fields) in enumerate(MODELS.items())}


# The trainer ----------------------------------------------------------------------------------------------------------


class Laboratory:
    """Runs each layout once, when it is first asked for."""

    def __init__(self, directory: Path, oracles: dict[str, Oracle]):
        self.directory, self.oracles = directory, oracles
        self._ran: set[str] = set()
        for name, oracle in oracles.items():
            save_groups(directory / f"{name}.groups", [self.group(oracle)])

    def group(self, oracle: Oracle) -> Group:
        """Demonstrations with the model's routes, one of them wrong."""
        trajectories = demonstrations(0)
        for number, trajectory in enumerate(trajectories):
            trajectory.routed_experts = oracle.routes(trajectory.token_ids[:-1])
            if number == WRONG[0]:
                chosen = trajectory.routed_experts[WRONG[1], -1]
                chosen[0] = next(expert for expert in range(8) if expert not in chosen)
        return Group(id="g", prompt=Prompt(id="p", token_ids=[1]), trajectories=trajectories)

    def __call__(self, layout: str, model: str) -> Ran:
        if layout not in self._ran:
            self._run(layout)
            self._ran.add(layout)
        return Ran(self.directory / layout, model, SIZES[layout], self.oracles[model])

    def _run(self, layout: str) -> None:
        out = self.directory / layout
        out.mkdir()
        cases = [
            {"name": name, "path": str(oracle.path), "mtp": MODELS[name]["num_mtp_layers"], "dtype": "float32"}
            for name, oracle in self.oracles.items()
        ]
        job = {
            "cases": [*cases, {**cases[0], "name": "half", "dtype": "bfloat16"}],
            "layout": LAYOUTS[layout],
            "groups": str(self.directory),
            "out": str(out),
            "init_method": f"tcp://127.0.0.1:{free_port()}",
        }
        (out / "job.json").write_text(json.dumps(job))
        run_ranks("tests.integration.deepseek_v3_rank", out, SIZES[layout].world, DEADLINE_S)


class Ran:
    """What the ranks of one layout wrote of one model."""

    def __init__(self, directory: Path, model: str, sizes: Sizes, oracle: Oracle):
        self.directory, self.model, self.sizes = directory, model, sizes
        self.table: Table = read_model(oracle.path, mtp_layers=MODELS[model]["num_mtp_layers"]).table

    def sequences(self, rank: int, key: str) -> dict[tuple[int, ...], np.ndarray]:
        """`key` of every sequence (its tokens and the last label) that `rank` saw; empty if it does not know it."""
        out = {}
        with np.load(self.directory / f"{self.model}.{rank}.npz") as arrays:
            for number in range(sum(name.startswith("tokens.") for name in arrays)):
                if f"{key}.{number}" not in arrays:
                    continue
                end = np.cumsum(arrays[f"lengths.{number}"])
                for start, stop in zip([0, *end], end, strict=False):
                    tokens, labels = (arrays[f"{name}.{number}"][start:stop] for name in ("tokens", "labels"))
                    if tokens.any():  # not the padding
                        out[(*tokens.tolist(), int(labels[-1]))] = arrays[f"{key}.{number}"][start:stop]
        return out

    def local(self, model: str, kind: str, rank: int) -> Weights:
        """Local tensors of one rank by local name."""
        return load_file(self.directory / f"{model}.{kind}.{rank}.safetensors")

    def assembled(self, kind: str) -> Weights:
        """Checkpoint tensors out of the ranks' local ones; ranks that hold the same part must agree bit for bit."""
        held = [self.local(self.model, kind, rank) for rank in range(self.sizes.world)]
        shapes = self.table.checkpoint()
        out: Weights = {}
        # Copies come after the tensors that they repeat.
        for part in sorted(MegatronLayout(self.table, self.sizes).parts(), key=lambda part: part.copy):
            if part.name not in held[part.ranks[0]]:
                continue
            locals_ = [held[rank][part.name].view(matrix(part.shape)) for rank in part.ranks]
            assert all(torch.equal(locals_[0], other) for other in locals_[1:]), part.name
            for rect in part.rects:
                name = part.sources[rect.source]
                whole = out.setdefault(name, torch.full(shapes[name], torch.nan)).view(matrix(shapes[name]))
                local = locals_[0][rect.local_row :, rect.local_col :][: rect.rows, : rect.cols]
                place = whole[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
                assert not part.copy or torch.equal(place, local), part.name
                place.copy_(local)
        return out


@pytest.fixture(scope="module")
def laboratory(oracles: dict[str, Oracle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    yield Laboratory(tmp_path_factory.mktemp("layouts"), oracles)


def difference(found: Weights, expected: Weights) -> tuple[float, str]:
    """The largest max|a - b| / max|b| over tensors, and whose it is."""
    each = {n: ((found[n] - b).abs().max() / b.abs().max()).item() for n, b in expected.items()}
    return max((value, name) for name, value in each.items())


every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_model = pytest.mark.parametrize("model", MODELS)


@every_model
@every_layout
def test_logits_are_those_of_transformers_at_every_position(laboratory, oracles, layout, model):
    ran = laboratory(layout, model)
    found = ran.sequences(ran.sizes.world - ran.sizes.tensor, "logits")
    wanted, _ = oracles[model].answers
    assert found.keys() == wanted.keys()
    for tokens, expected in wanted.items():
        assert (torch.from_numpy(found[tokens]) - expected).abs().max() <= 1e-4


@every_model
@every_layout
def test_every_layer_routes_as_transformers_does_and_one_wrong_route_is_found_where_it_is(laboratory, layout, model):
    ran = laboratory(layout, model)
    wrong = tuple(demonstrations(0)[WRONG[0]].token_ids.tolist())
    for rank in range(ran.sizes.world):
        last = coordinates(rank, ran.sizes).pipeline == ran.sizes.pipeline - 1
        for tokens, differs in ran.sequences(rank, "differs").items():
            expected = [WRONG[1]] if last and tokens == wrong else []
            assert np.flatnonzero(differs).tolist() == expected, rank


@every_model
@every_layout
def test_a_checkpoint_comes_back_from_the_trainer_bit_for_bit(laboratory, oracles, layout, model):
    back, weights = laboratory(layout, model).assembled("weights"), oracles[model].weights
    assert back.keys() == weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(back[name], tensor)] == []


@every_model
@every_layout
def test_gradients_are_those_of_transformers(laboratory, oracles, layout, model):
    worst, name = difference(laboratory(layout, model).assembled("gradients"), oracles[model].answers[1])
    assert worst <= 2e-5, name


@every_layout
def test_the_selection_bias_is_exact_in_a_bfloat16_model_and_no_step_moves_it(laboratory, oracles, layout):
    ran = laboratory(layout, "V3")
    for rank in range(ran.sizes.world):
        half = ran.local("half", "weights", rank)
        before, after = (ran.local("V3", kind, rank) for kind in ("weights", "after"))
        exact = {name for name, tensor in half.items() if tensor.dtype != torch.bfloat16}
        assert exact and exact == {name for name in half if name.endswith("expert_bias")}
        for name, tensor in before.items():
            assert torch.equal(half[name], tensor.to(half[name].dtype)), name
        assert {name for name in before if torch.equal(before[name], after[name]) and "mtp" not in name} == {
            name for name in exact if "mtp" not in name
        }


@every_layout
def test_a_trainers_checkpoint_gives_every_weight_back_bit_for_bit(laboratory, layout):
    ran = laboratory(layout, "V3")
    for rank in range(ran.sizes.world):
        saved, restored = (ran.local("V3", kind, rank) for kind in ("after", "restored"))
        assert [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)] == []


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if SIZES[name].pipeline == 1])
def test_the_prediction_layer_learns_as_in_transformers_and_leaves_the_policy_alone(laboratory, oracles, layout):
    ran, oracle = laboratory(layout, "V3"), oracles["V3"]
    oracle.mtp.zero_grad()
    with np.load(ran.directory / "V3.mtp.0.npz") as arrays:
        at = 0
        for length in arrays["lengths"]:
            tokens, labels, weight, found = (
                arrays[key][at : at + length] for key in ("tokens", "labels", "weight", "logits")
            )
            at += length
            if not tokens.any():
                continue
            expected = oracle.predicted(tokens)
            assert (torch.from_numpy(found[:-1]) - expected).abs().max() <= 1e-4
            # Position t, which knows token t + 1, predicts token t + 2.
            loss = torch.nn.functional.cross_entropy(expected, torch.from_numpy(labels[1:]), reduction="none")
            (0.1 * torch.from_numpy(weight[1:]) * loss).sum().backward()
    wanted = oracle.renamed({name: parameter.grad for name, parameter in oracle.mtp.named_parameters()})
    gradients = ran.assembled("mtp")
    worst, name = difference(gradients, wanted)
    assert worst <= 2e-5, name
    assert [name for name in gradients.keys() - wanted.keys() if gradients[name].any()] == []
