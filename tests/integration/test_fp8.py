"""Training in fp8: what a layout changes, and that engines hold the very blocks that the trainer computes with."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.orchestration.batches import make_packer
from tests.integration import transformer_engine_stand
from tests.integration.block_models import make_block_deepseek, make_block_model
from tests.integration.conftest import Weights
from tests.integration.rank_processes import run_ranks
from tests.integration.trainer_rank import CLIPPED, Rank, demonstrations, equal, sft_rows
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

BEFORE_TRAINING = 2
"""Steps between two looks at the weights."""
UNIFIED = ("computed_in_fp8", "same_codes", "same_scales", "moved", "same_later")
"""Facts of each rank about its publication, before and after steps (`Fp8Rank`)."""

COPIES = ("no_copies", "a_copy_of_each", "copies_leave")
"""Facts of each rank of Transformer Engine about its copies of weights: none when it starts, one of each weight
in fp8 after passes, none in a trainer that was offloaded."""


class Fp8Rank(Rank):
    optimizer = CLIPPED

    def config(self, **options: Any) -> Config:
        fp8 = options.pop("fp8", self.job["recipe"])
        base = super().config(dtype="bfloat16", **options)
        return base.model_copy(update={"trainer": base.trainer.model_copy(update={"fp8": fp8})})

    def demonstrated(self, step: int) -> list[MicroBatch]:
        """Packed as a run packs them: tokens of a rank are whole blocks."""
        rows = sft_rows(demonstrations(step)[: self.job["sequences"]])
        pack = make_packer(self.config(), self.spec, self.sizes)
        return pack(rows).shards[self.parallel.coordinates.data]

    def write_gradients(self, name: str, **options: Any) -> None:
        """Log-probs and gradients of one step."""
        trainer = self.trainer(distributed_optimizer=False, optimizer={"clip_grad": 0.0}, **options)
        batches = self.demonstrated(0)
        # Only the last stage has log-probs.
        for batch, logprobs in zip(batches, trainer.logprobs(batches), strict=self.parallel.last_stage):
            at = np.cumsum([0, *batch.lengths])
            for first, last in pairwise(at.tolist()):
                places = np.arange(first, last)[~batch.padding[first:last]]
                if places.size:
                    self.arrays[f"{name} {batch.tokens[places].tolist()}"] = logprobs[places]
        self.steps(trainer, (0,))
        self.write_tensors(name, self.gradients(trainer))

    def computed_weights(self, trainer: Any) -> dict[str, Any]:
        """By local name: codes and scales that a forward pass made of each weight."""
        from slimx.extras.low_precision import products

        by_address = {value.data_ptr(): name for name, value in trainer.weights.parameters.items()}
        seen: dict[str, Any] = {}
        plain = products.quantize

        def watched(values: Any, *rest: Any) -> Any:
            out = plain(values, *rest)
            name = by_address.get(values.data_ptr())
            if name is not None and values.shape == trainer.weights.parameters[name].shape:
                seen[name] = out
            return out

        products.quantize = watched
        try:
            trainer.logprobs(self.demonstrated(0))
        finally:
            products.quantize = plain
        return seen

    def compare_publication(self, trainer: Any) -> None:
        """A publication's codes and scales of the checkpoint's tensors, and those that the layers computed with."""
        import torch

        from slimx.extras.low_precision.block_fp8 import SCALE_SUFFIX, quantization
        from slimx.layout.megatron import MegatronLayout
        from slimx.layout.number_formats import Precision
        from slimx.reshard.pack.packer import Packer
        from slimx.reshard.plan.copy_plan import compile_plan

        seen = self.computed_weights(trainer)
        local = MegatronLayout(self.spec.table, self.sizes).parts_of(self.rank)
        parts = [part._replace(ranks=(0,)) for part in local if part.quantized]
        self.results["computed_in_fp8"] = sorted(seen) == sorted(part.name for part in parts)
        plan = compile_plan(
            parts, parts, precision=Precision("bfloat16", "bfloat16", quantization("te")), bucket_bytes=2**62
        )
        packer = Packer(plan, 0, {part.name: trainer.weights.parameters[part.name].detach() for part in parts})
        form = packer.form(0)
        memory = torch.zeros(form.size, dtype=torch.uint8)
        packer.pack(0, memory)
        published = {
            tensor.name: memory[start : start + tensor.nbytes].view(tensor.shape if tensor.dtype != "float32" else -1)
            for tensor, start in zip(form.tensors, form.offset.tolist(), strict=True)
        }
        self.results["same_codes"] = all(torch.equal(codes, published[name]) for name, (codes, _) in seen.items())
        self.results["same_scales"] = all(
            torch.equal(scales.view(torch.uint8).flatten(), published[name + SCALE_SUFFIX].flatten())
            for name, (_, scales) in seen.items()
        )

    def check_copies(self) -> None:
        """Passes with other weights and a step between passes with these: the stand of Transformer Engine fails where
        a copy of weights is out of date."""
        trainer = self.trainer()
        modules = [module for chunk in trainer.chunks for module in chunk.modules()]
        copies = [module._fp8_workspaces for module in modules if hasattr(module, "_fp8_workspaces")]
        self.results["no_copies"] = not any(copies)
        self.results["no_copies"] &= bool(copies)
        first = trainer.weights.snapshot()
        self.steps(trainer, (0,))
        trainer.logprobs(self.demonstrated(1))
        with trainer.weights.switching() as switch:
            switch(first)
            trainer.logprobs(self.demonstrated(1))
        trainer.logprobs(self.demonstrated(2))
        count = sum(map(len, copies))
        weights = sum(part.quantized for part in trainer.weights.parts)
        self.results["a_copy_of_each"] = count == weights
        trainer.offload()
        self.results["copies_leave"] = not any(copies)
        trainer.reload()
        self.steps(trainer, (1,))

    def compare_publications(self) -> None:
        trainer = self.trainer()
        self.compare_publication(trainer)
        before = self.weights(trainer)
        self.steps(trainer, range(BEFORE_TRAINING))
        self.results["moved"] = not equal(self.weights(trainer), before)
        first = dict(self.results)
        self.compare_publication(trainer)
        self.results["same_later"] = all(self.results[name] and first[name] for name in ("same_codes", "same_scales"))


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    fp8 = Fp8Rank(job, rank)
    fp8.write_gradients("fp8")
    if job["engine"]:
        fp8.write_gradients("bf16", fp8=None)
        fp8.check_copies()
        return fp8.finish()
    if fp8.sizes.world == 1:
        fp8.write_gradients("bf16", fp8=None)
        fp8.write_gradients("recomputed", recompute={"granularity": "full"})
    if job["recipe"] == "blockwise":
        fp8.compare_publications()
    return fp8.finish()


def run(
    model: Path,
    out: Path,
    layout: dict[str, Any],
    recipe: str,
    role: str = "rank",
    *,
    sequences: int = 6,
) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Arrays of all ranks, and results by rank."""
    job = {"model": model, "layout": layout, "recipe": recipe, "engine": role != "rank", "sequences": sequences}
    results = run_ranks(train, out, layout["world_size"], job, role=role)
    arrays = {key: value for rank in range(len(results)) for key, value in np.load(out / f"{rank}.npz").items()}
    return arrays, results


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
    for _, results in found.values():
        for rank in results:
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
    found, results = run(model, tmp_path / "engine", layout, "blockwise", "rank_with_engine")
    plain, _ = run(model, tmp_path / "plain", layout, "blockwise")
    for rank in results:
        wrong = [what for what in COPIES if rank[what] is not True]
        assert wrong == []
    of = {name: load_file(tmp_path / f"{name}.safetensors") for name in ("engine/fp8", "engine/bf16", "plain/fp8")}
    rounding = distance(of["engine/fp8"], of["engine/bf16"])
    assert 0.05 < rounding < 0.5
    # Experts' tokens are padded here, so that blocks of weights' gradients hold others; and a router whose input
    # differs in its last bit may choose otherwise.
    assert distance(of["engine/fp8"], of["plain/fp8"]) < 0.75 * rounding
    assert apart(found, plain).mean() < 0.75 * apart(found, found, "bf16").mean()
