"""A model of every family in the trainer computes what transformers computes, in every layout, and comes back bit for
bit.

Each layout is one start of real processes that load the models of all families (`family_cases.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.data.saved.codec import load_groups
from slimx.layout.ranks import coordinates
from slimx.orchestration.batches import make_packer
from tests.integration import rank_start
from tests.integration.chosen import chosen_cases
from tests.integration.deepseek_v3_oracle import MODELS
from tests.integration.family_cases import CASES
from tests.integration.family_laboratory import ENGINE, ENGINE_STAGES, SIZES, Laboratory, difference, quick, thorough
from tests.integration.prediction_oracle import WRONG
from tests.integration.saved_tensors import saved_tensors, written_by_0_16
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import demonstrations, packed, sft_rows

pytestmark = pytest.mark.integration
MAX_TOKENS = 160


class FamilyRank:
    """Loads checkpoints into the trainer and writes what comes out.

    Per case, CASE.RANK.npz holds the micro-batches with their logits (last pipeline stage, first tensor-parallel rank)
    and, where the sequences have routes, whether the model's differ; CASE.KIND.RANK.safetensors holds local tensors by
    local name; CASE.RANK.error says why there is no more.
    """

    def __init__(self, job: dict[str, Any], rank: int):
        self.job, self.rank, self.out = job, rank, job["out"]
        self.parallel = rank_start.join(self.config(job["cases"][0]).trainer, rank, job["init_method"])

    def config(self, case: dict[str, Any], **trainer: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": case["model"]["path"]},  # which has the images
                "model": case["model"],
                "numerics": {"dtype": case["dtype"]},
                "trainer": {
                    **self.job["layout"],
                    **trainer,
                    "distributed_optimizer": False,
                    "max_tokens_per_microbatch": MAX_TOKENS,
                    "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
                    "megatron": {"mtp_num_layers": case["mtp"]} if case["mtp"] else {},
                    "vision": {"train": case["vision"]} if case["vision"] else None,
                },
                "rollout": {"prompts": "p", "engines": []},
                "algorithm": {"name": "sft"},
            }
        )

    def run(self, case: dict[str, Any]) -> None:
        from slimx.models.families import configured_model
        from slimx.trainer.model.build import unwrap
        from slimx.trainer.trainer import PolicyTrainer

        self.case = case["name"]
        config = self.config(case)
        trainer = PolicyTrainer(config, configured_model(config), self.parallel)
        self.write("weights", trainer.weights.parameters)
        kinds = {type(module).__name__ for chunk in trainer.chunks for module in chunk.modules()}
        (self.out / f"{self.case}.modules").write_text(" ".join(sorted(kinds)))
        if case["dtype"] != "float32":
            return
        (group,) = load_groups(str(Path(self.job["groups"]) / f"{self.case}.groups"))
        sizes = self.parallel.sizes
        packed = make_packer(config, trainer.weights.spec, sizes)(sft_rows(group.trajectories))
        batches = packed.shards[self.parallel.coordinates.data]
        self.write_forward(trainer, unwrap(trainer.chunks[0]), batches)
        if case["mtp"] and sizes.pipeline * sizes.context == 1:
            self.write_prediction(trainer, batches[0])
        values = trainer.train_step(batches, step=0, version=0)
        np.save(self.out / f"{self.case}.norm.{self.rank}.npy", values["optim/grad_norm"])
        self.compare_plan(trainer)
        self.write_gradients("gradients", trainer)
        if case["release"]:
            self.write("after", trainer.weights.parameters)
            self.write_restored(trainer)
            begun = PolicyTrainer(self.config(case, load=case["release"]), configured_model(config), self.parallel)
            self.write("released", begun.weights.parameters)

    def compare_plan(self, trainer: Any) -> None:
        """Checks that `slimx plan` knows the bytes that this rank holds now, of every family."""
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        config, sizes = trainer.config, self.parallel.sizes
        runs = holdings(config.trainer, config.numerics, trainer.weights.spec).runs(sizes, self.rank)
        planned = Buffers(runs, config.trainer, sizes).state(self.rank)
        sizes = tuple(trainer.offloading.sizes().values())
        assert (planned.weights, planned.gradients, planned.optimizer) == sizes, (planned, sizes)

    def write_forward(self, trainer: Any, model: Any, batches: list[MicroBatch]) -> None:
        arrays, logits = packed(batches), self.recorded_logits(model, model.decoder)
        local = [trainer.context.take(batch) for batch in batches]
        with trainer.routing.forward(local):
            trainer.pipeline.scores(local)
        if batches[0].routed_experts is not None:
            differs = trainer.routing.differing(local).split([len(batch.tokens) for batch in local])
            for number, (values, batch) in enumerate(zip(differs, batches, strict=True)):
                arrays[f"differs.{number}"] = trainer.context.gather(values, batch.lengths).numpy()
        for number, (values, batch) in enumerate(zip(logits, batches, strict=False)):  # only on the last stage
            arrays[f"logits.{number}"] = trainer.context.gather(values, batch.lengths).numpy()
        np.savez(self.out / f"{self.case}.{self.rank}.npz", **arrays)

    def write_prediction(self, trainer: Any, batch: MicroBatch) -> None:
        """Writes logits of the MTP layer, and the gradients that its loss alone gives."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        from slimx.trainer.model.build import unwrap
        from slimx.trainer.model.logprobs import Targets

        bounds = torch.tensor([0, *batch.lengths]).cumsum(0).to(torch.int32)
        longest = max(batch.lengths)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        tokens, labels, weight = (torch.from_numpy(getattr(batch, key))[None] for key in ("tokens", "labels", "weight"))
        chunk = trainer.chunks[0]
        model = unwrap(chunk)
        chunk.zero_grad_buffer()
        recorded = self.recorded_logits(model, model.mtp)
        targets = Targets(labels=labels[0])
        logprobs, _ = chunk(
            tokens, torch.zeros_like(tokens), None, packed_seq_params=packed, labels=targets, loss_mask=weight
        )
        (logprobs * 0).sum().backward()
        chunk.config.finalize_model_grads_func([chunk])
        arrays = {"tokens": batch.tokens, "labels": batch.labels, "weight": batch.weight, "lengths": batch.lengths}
        np.savez(self.out / f"{self.case}.mtp.{self.rank}.npz", logits=recorded[0].numpy(), **arrays)
        self.write_gradients("mtp", trainer)

    def write_restored(self, trainer: Any) -> None:
        """Writes the weights that a checkpoint of the trainer gives back after all have changed."""
        import torch

        path = self.out / f"{self.case}.checkpoint"
        begin_save(trainer, path, step=0)
        finish_save(trainer, path)
        with torch.no_grad():
            for tensor in trainer.weights.parameters.values():
                tensor.add_(1.0)
        trainer.restore(str(path), same_layout=True)
        self.write("restored", trainer.weights.parameters)

    def recorded_logits(self, model: Any, part: Any) -> list[Any]:
        """Returns a list that grows with the whole vocabulary's logits [T, vocab] of what `part` of the model gives, at
        every call; of an MTP block those of its (first) prediction. The model itself never holds them."""
        import torch
        import torch.distributed as dist

        recorded: list[torch.Tensor] = []

        def whole(part: torch.Tensor, axis: int) -> torch.Tensor:
            parts = [torch.empty_like(part) for _ in range(self.parallel.sizes.tensor)]
            dist.all_gather(parts, part.contiguous(), group=self.parallel.tensor_group)
            return torch.cat(parts, axis)

        def record(_: Any, __: Any, output: Any) -> None:
            states = output.detach()[:, 0]
            if part is not model.decoder:
                states = states.chunk(2)[1]
            tied = model.share_embeddings_and_output_weights
            weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
            recorded.append(whole(whole(states, 0) @ weight.detach().t(), 1))

        if self.parallel.last_stage:
            part.register_forward_hook(record)
        return recorded

    def write_gradients(self, kind: str, trainer: Any) -> None:
        self.write(kind, {n: t.main_grad for n, t in trainer.weights.parameters.items() if hasattr(t, "main_grad")})

    def write(self, kind: str, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        save_file(copies, self.out / f"{self.case}.{kind}.{self.rank}.safetensors")


def train(job: dict[str, Any], number: int) -> None:
    rank = FamilyRank(job, number)
    for case in job["cases"]:
        try:
            rank.run(case)
        except Exception:  # whatever it is, the other models of this layout need the rest
            (rank.out / f"{case['name']}.{rank.rank}.error").write_text(traceback.format_exc())
    rank_start.leave(rank.parallel)


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """Makes a tiny model of every family in transformers and in the trainers of several layouts: those `layout`s and
    `model`s that the chosen tests are about."""
    cases = ((case["layout"], case["model"]) for case in chosen_cases(request))
    return Laboratory(tmp_path_factory.mktemp("families"), cases, train)


def models(chosen: Callable[[str, str], bool]) -> pytest.MarkDecorator:
    """Returns every model in every layout that it can be split into, and that is chosen for it."""
    return pytest.mark.parametrize(
        ("layout", "model"),
        [
            pytest.param(
                layout,
                model,
                marks=[] if quick(layout, model) else [pytest.mark.slow("full grid of layouts and families")],
            )
            for layout, sizes in SIZES.items()
            for model, case in CASES.items()
            if case.fits(sizes) and chosen(layout, model)
        ],
    )


every_model = models(lambda *_: True)


@every_model
def test_logits_are_those_of_transformers_at_every_position(families, layout, model):
    ran = families(layout, model)
    found = ran.logits()
    logits, _ = families.oracle(model).answers
    assert found.keys() == logits.keys()
    for tokens, expected in logits.items():
        assert (torch.from_numpy(found[tokens]) - expected).abs().max() <= 1e-4


@every_model
def test_a_checkpoint_comes_back_from_the_trainer_bit_for_bit(families, layout, model):
    back, weights = families(layout, model).assembled("weights"), families.oracle(model).weights
    assert back.keys() == weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(back[name], tensor)] == []


@every_model
def test_gradients_are_those_of_transformers(families, layout, model):
    ran, expected = families(layout, model), families.oracle(model).answers[1]
    worst, name = difference(ran.assembled("gradients"), expected)
    assert worst <= CASES[model].rounding, name
    if not CASES[model].mtp:  # whose own gradients count too
        norm = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
        for rank in range(ran.sizes.world):
            assert np.load(ran.directory / f"{model}.norm.{rank}.npy") == pytest.approx(norm.item(), rel=1e-5)


thorough_models = models(thorough)


@thorough_models
def test_a_trainers_checkpoint_gives_every_weight_back_bit_for_bit(families, layout, model):
    ran = families(layout, model)
    for rank in range(ran.sizes.world):
        saved, restored = (ran.local(kind, rank) for kind in ("after", "restored"))
        assert [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)] == []


@pytest.mark.parametrize(("layout", "model"), [("single", "V3"), ("single", "MiniMax-M2"), (ENGINE, "V3")])
def test_a_trainers_checkpoint_has_the_layout_of_megatron_core_0_16(families, layout, model):
    """Latent attention, a layer of multi-token prediction, norms over all heads; without the distributed optimizer.

    Each module of Transformer Engine keeps in addition an object of its own for fp8."""
    found, written = saved_tensors(families(layout, model).checkpoint), written_by_0_16(model)
    if layout == ENGINE:
        assert set(found) > set(written)
        found, written = ([line for line in x if not line.endswith("._extra_state")] for x in (found, written))
    assert found == written


@pytest.mark.parametrize(
    ("layout", "model", "modules"),
    [
        (ENGINE, "V3", {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TELinear"}),
        (ENGINE_STAGES, "Qwen3", {"TELayerNormColumnParallelLinear"}),
        pytest.param(
            ENGINE_STAGES, "MiMo", {"TELayerNormColumnParallelLinear"}, marks=pytest.mark.slow("full grid of families")
        ),
    ],
)
def test_layers_are_transformer_engines_where_it_is_installed(families, layout, model, modules):
    built = families(layout, model).modules()
    assert built >= {"TERowParallelLinear", "TEDotProductAttention"} | modules
    assert not {"NormColumnParallelLinear", "PackedAttention", "RowParallelLinear"} & built


@thorough_models
def test_a_trainer_starts_from_the_converted_checkpoint(families, layout, model):
    ran = families(layout, model)
    for rank in range(ran.sizes.world):
        plain, released = (ran.local(kind, rank) for kind in ("weights", "released"))
        assert plain.keys() == released.keys()
        assert [name for name, tensor in plain.items() if not torch.equal(released[name], tensor)] == []


# Parts that DeepSeek-V3 brought and GLM-4.5 and Ling-2 took over ------------------------------------------------------


def every_layout(*models: str) -> pytest.MarkDecorator:
    """Returns a parametrization over the models in every layout of up to four ranks."""
    return pytest.mark.parametrize(
        ("layout", "model"),
        [
            pytest.param(name, model, marks=[] if quick(name, model) else [pytest.mark.slow("full grid of layouts")])
            for name, sizes in SIZES.items()
            if sizes.world <= 4
            for model in models
        ],
    )


@every_layout(*MODELS, "GLM-4.5", "Ling-2")
def test_every_layer_routes_as_transformers_and_wrong_routes_are_found(families, layout, model):
    ran = families(layout, model)
    wrong = tuple(demonstrations(0)[WRONG[0]].token_ids.tolist())
    for rank in range(ran.sizes.world):
        assert ran.sequences(rank, "differs"), rank
        last = coordinates(rank, ran.sizes).pipeline == ran.sizes.pipeline - 1
        for tokens, differs in ran.sequences(rank, "differs").items():
            expected = [WRONG[1]] if last and tokens == wrong else []
            assert np.flatnonzero(differs).tolist() == expected, rank


@every_layout("V3")
def test_the_selection_bias_is_exact_in_bfloat16_and_not_trained(families, layout, model):
    ran = families(layout, model)
    for rank in range(ran.sizes.world):
        half = ran.local("half.weights", rank)
        before, after = (ran.local(kind, rank) for kind in ("weights", "after"))
        exact = {name for name, tensor in half.items() if tensor.dtype != torch.bfloat16}
        assert exact and exact == {name for name in half if name.endswith("expert_bias")}
        for name, tensor in before.items():
            assert torch.equal(half[name], tensor.to(half[name].dtype)), name
        assert {name for name in before if torch.equal(before[name], after[name]) and "mtp" not in name} == {
            name for name in exact if "mtp" not in name
        }


@pytest.mark.parametrize("model", ["V3", "GLM-4.5", "Ling-2", "V3.2", "GLM-5"])
@pytest.mark.parametrize(
    "layout", [pytest.param("single", marks=pytest.mark.slow("one rank repeats what two show")), "TP2xEP2"]
)
def test_the_prediction_layer_learns_as_in_transformers(families, layout, model):
    ran, oracle = families(layout, model), families.oracle(model)
    oracle.mtp.zero_grad()
    with np.load(ran.directory / f"{model}.mtp.0.npz") as arrays:
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
    trained = {name: x.grad for name, x in oracle.mtp.named_parameters() if x.grad is not None}
    expected = oracle.renamed(trained)  # without an indexer's
    gradients = ran.assembled("mtp")
    worst, name = difference(gradients, expected)
    assert worst <= 2e-5, name
    assert [name for name in gradients.keys() - expected.keys() if gradients[name].any()] == []
