"""One gloo rank of test_families: it loads checkpoints into the trainer and writes what comes out.

Per case, CASE.RANK.npz holds the micro-batches with their logits (last pipeline stage, first tensor-parallel rank) and,
where the sequences have routes, whether the model's differ; CASE.KIND.RANK.safetensors holds local tensors by local
name; CASE.RANK.error says why there is no more.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.data.saved.codec import load_groups
from slimx.orchestration.batches import make_packer
from tests.integration import rank_start
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import sft_rows

MAX_TOKENS = 160


class Rank:
    def __init__(self, job: dict[str, Any], rank: int):
        self.job, self.rank, self.out = job, rank, job["out"]
        self.parallel = rank_start.join(self.config(job["cases"][0]).trainer, rank, job["init_method"])

    def config(self, case: dict[str, Any], **trainer: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"dir": str(self.out)},
                "model": case["model"],
                "numerics": {"dtype": case["dtype"]},
                "trainer": {
                    **self.job["layout"],
                    **trainer,
                    "distributed_optimizer": False,
                    "max_tokens_per_microbatch": MAX_TOKENS,
                    "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
                    "megatron": {"mtp_num_layers": case["mtp"]} if case["mtp"] else {},
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
        """`slimx plan` knows the bytes that this rank holds now, of every family."""
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        config, sizes = trainer.config, self.parallel.sizes
        runs = holdings(config.trainer, config.numerics, trainer.weights.spec).runs(sizes, self.rank)
        planned = Buffers(runs, config.trainer, sizes).state(self.rank)
        sizes = tuple(trainer.offloading.sizes().values())
        assert (planned.weights, planned.gradients, planned.optimizer) == sizes, (planned, sizes)

    def write_forward(self, trainer: Any, model: Any, batches: list[MicroBatch]) -> None:
        arrays, logits = {}, self.recorded_logits(model, model.decoder)
        local = [trainer.context.take(batch) for batch in batches]
        with trainer.routing.forward(local):
            trainer.pipeline.scores(local)
        for number, batch in enumerate(batches):
            arrays |= {f"{key}.{number}": getattr(batch, key) for key in ("tokens", "labels", "padding")}
            arrays[f"lengths.{number}"] = np.array(batch.lengths)
        if batches[0].routed_experts is not None:
            differs = trainer.routing.differing(local).split([len(batch.tokens) for batch in local])
            for number, (values, batch) in enumerate(zip(differs, batches, strict=True)):
                arrays[f"differs.{number}"] = trainer.context.gather(values, batch.lengths).numpy()
        for number, (values, batch) in enumerate(zip(logits, batches, strict=False)):  # only on the last stage
            arrays[f"logits.{number}"] = trainer.context.gather(values, batch.lengths).numpy()
        np.savez(self.out / f"{self.case}.{self.rank}.npz", **arrays)

    def write_prediction(self, trainer: Any, batch: MicroBatch) -> None:
        """Logits of the MTP layer, and the gradients that its loss alone gives."""
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
        """A list that grows with the whole vocabulary's logits [T, vocab] of what `part` of the model gives, at every
        call; of an MTP block those of its (first) prediction. The model itself never holds them."""
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
    rank = Rank(job, number)
    for case in job["cases"]:
        try:
            rank.run(case)
        except Exception:  # whatever it is, the other models of this layout need the rest
            (rank.out / f"{case['name']}.{rank.rank}.error").write_text(traceback.format_exc())
    rank_start.leave(rank.parallel)
