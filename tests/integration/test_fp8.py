"""Training in fp8: what a layout changes, and that engines hold the very blocks that the trainer computes with."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.runtime.ports import free_port
from tests.integration import transformer_engine_stand
from tests.integration.block_models import make_block_deepseek, make_block_model
from tests.integration.conftest import Weights
from tests.integration.optimizer_rank import SEQUENCES
from tests.integration.rank_processes import run_ranks
from tests.needed import missing

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "TP2xETP2": {"world_size": 2, "tensor": 2, "expert_tensor": 2},
    "DP2xEP2": {"world_size": 2, "expert": 2},
    "PP2": {"world_size": 2, "pipeline": 2},
}
DEEP: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "PP2xVPP2": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
    "CP2": {"world_size": 2, "context": 2},
}
"""Layouts of a model of four layers."""

UNIFIED = ("computed_in_fp8", "same_codes", "same_scales", "moved", "same_later")
"""Arrays of each rank with its publication, before and after steps (`fp8_rank`)."""

COPIES = ("no_copies", "a_copy_of_each", "copies_leave")
"""Facts that each rank of Transformer Engine tells about its copies of weights: none when it starts, one of each weight
in fp8 after passes, none in a trainer that was offloaded."""


def run(
    model: Path,
    out: Path,
    layout: dict[str, Any],
    recipe: str,
    role: str = "rank",
    *,
    sequences: int = SEQUENCES,
) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Arrays of all ranks, and what each rank said."""
    out.mkdir()
    job = {"model": str(model), "layout": layout, "kinds": [], "out": str(out), "recipe": recipe}
    job |= {"engine": role != "rank", "sequences": sequences}
    job["init_method"] = f"tcp://127.0.0.1:{free_port()}"
    (out / "job.json").write_text(json.dumps(job))
    run_ranks("tests.integration.fp8_rank", out, layout["world_size"], role=role)
    ranks = range(layout["world_size"])
    arrays = {key: value for rank in ranks for key, value in np.load(out / f"{rank}.npz").items()}
    return arrays, [json.loads((out / f"{rank}.json").read_text()) for rank in ranks]


def distance(one: Weights, other: Weights) -> float:
    """Relative to the second, in the norm of all gradients together."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (apart / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray], kind: str = "fp8") -> np.ndarray:
    """Differences of log-probs, of the same sequences."""
    ours = {key.removeprefix(kind): value for key, value in one.items() if key.startswith(f"{kind} ")}
    theirs = {key.removeprefix("fp8"): value for key, value in other.items() if key.startswith("fp8 ")}
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 6
    return np.concatenate([np.abs(ours[key] - theirs[key]) for key in shared])


def largest(one: dict[str, np.ndarray], other: dict[str, np.ndarray], kind: str = "fp8") -> float:
    """Largest difference of log-probs, of the same sequences."""
    return float(apart(one, other, kind).max())


@pytest.mark.parametrize(
    ("make", "recipe", "share"),
    [
        (make_block_model, "blockwise", 0.5),
        pytest.param(make_block_model, "mxfp8", 0.5, marks=pytest.mark.slow("full grid of recipes")),
        # Latent attention: the projection to the latent and the rotating part has a block and a half.
        pytest.param(make_block_deepseek, "blockwise", 0.75, marks=pytest.mark.slow("full grid of models")),
    ],
)
def test_a_step_in_fp8_is_the_same_in_every_layout_as_far_as_blocks_are(
    make: Any, recipe: str, share: float, tmp_path: Path
) -> None:
    """`share`: of the distance between fp8 and bf16, what tensor parallelism may add to it."""
    model = make(tmp_path / "model")
    found = {name: run(model, tmp_path / name, layout, recipe) for name, layout in LAYOUTS.items()}
    single, _ = found["single"]
    gradients = {name: load_file(tmp_path / name / "fp8.safetensors") for name in LAYOUTS}
    rounding = distance(gradients["single"], load_file(tmp_path / "single" / "bf16.safetensors"))
    assert 0.05 < rounding < 0.5
    assert largest(single, single, "bf16") > 0.01
    recomputed = load_file(tmp_path / "single" / "recomputed.safetensors")
    assert all(torch.equal(recomputed[name], value) for name, value in gradients["single"].items())
    # Blocks of inputs lie within a token, but MKL may sum a row by the number of rows (on a Xeon with AMX). Those of
    # weights' gradients run over tokens, which other ranks then hold.
    assert largest(found["DP2xEP2"][0], single) < largest(single, single, "bf16") / 2
    assert 0.0 < distance(gradients["DP2xEP2"], gradients["single"]) < 0.05
    # Stages have the same packs.
    assert largest(found["PP2"][0], single) == distance(gradients["PP2"], gradients["single"]) == 0.0
    # Ranks of tensor parallelism add partial sums in bf16, with or without fp8.
    assert distance(gradients["TP2xETP2"], gradients["single"]) < share * rounding
    if recipe == "blockwise":
        check_unified(found)


def check_unified(found: dict[str, tuple[dict[str, np.ndarray], list[dict]]]) -> None:
    for _, said in found.values():
        for rank in said:
            wrong = [what for what in UNIFIED if rank[what] is not True]
            assert wrong == []


@pytest.mark.slow("full grid of recipes")
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_fp8_in_interleaved_stages_and_context_parallel_equals_one_rank(recipe: str, tmp_path: Path) -> None:
    model = make_block_model(tmp_path / "model", layers=4)
    # Nine make four packs: interleaved stages, which take an even number, have those of one rank.
    found = {name: run(model, tmp_path / name, layout, recipe, sequences=9) for name, layout in DEEP.items()}
    single, _ = found["single"]
    gradients = {name: load_file(tmp_path / name / "fp8.safetensors") for name in DEEP}
    rounding = distance(gradients["single"], load_file(tmp_path / "single" / "bf16.safetensors"))
    assert largest(found["PP2xVPP2"][0], single) == distance(gradients["PP2xVPP2"], gradients["single"]) == 0.0
    # Each rank of a sequence has other tokens, over which blocks of weights' gradients run, and a part of attention.
    assert 0.0 < distance(gradients["CP2"], gradients["single"]) < rounding / 2
    assert largest(found["CP2"][0], single) < largest(single, single, "bf16") / 2
    if recipe == "blockwise":
        check_unified(found)


@pytest.mark.slow("full grid of layouts")
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (make_block_model, LAYOUTS["TP2xETP2"]),
        (partial(make_block_model, layers=4), DEEP["PP2xVPP2"]),
        # megatron-core's own rotation of latent attention is a kernel of Triton's.
        (make_block_deepseek, LAYOUTS["TP2xETP2"] | {"megatron": {"apply_rope_fusion": False}}),
    ],
    ids=["TP2xETP2", "PP2xVPP2", "DeepSeek-TP2xETP2"],
)
def test_transformer_engines_layers_compute_in_fp8_what_torchs_do(
    make: Any, layout: dict[str, Any], tmp_path: Path
) -> None:
    """By megatron-core's contexts, with the padding of experts and copies of weights, and passes with other weights."""
    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    # The stand ends a rank whose scales are powers of two, whose tokens are too few for a product, or which computes
    # with a copy that is out of date; `run` then raises what it said.
    model = make(tmp_path / "model")
    found, said = run(model, tmp_path / "engine", layout, "blockwise", "rank_with_engine")
    plain, _ = run(model, tmp_path / "plain", layout, "blockwise")
    for rank in said:
        wrong = [what for what in COPIES if rank[what] is not True]
        assert wrong == []
    of = {name: load_file(tmp_path / f"{name}.safetensors") for name in ("engine/fp8", "engine/bf16", "plain/fp8")}
    rounding = distance(of["engine/fp8"], of["engine/bf16"])
    assert 0.05 < rounding < 0.5
    # Experts' tokens are padded here, so that blocks of weights' gradients hold others; and a router whose input
    # differs in its last bit may choose otherwise.
    assert distance(of["engine/fp8"], of["plain/fp8"]) < 0.75 * rounding
    assert apart(found, plain).mean() < 0.75 * apart(found, found, "bf16").mean()
