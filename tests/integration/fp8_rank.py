"""One gloo rank of test_fp8: a model whose linear layers compute in fp8, and what they rounded its weights to.

python -m tests.integration.fp8_rank JOB.json RANK
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, make_rows
from slimx.data.loss_weights import loss_weights
from slimx.orchestration.batches import make_packer
from tests.integration.optimizer_rank import OptimizerRank, equal
from tests.integration.trainer_rank import demonstrations

BEFORE_TRAINING = 2
"""Steps between two looks at the weights."""


class Fp8Rank(OptimizerRank):
    def config(self, **options: Any) -> Config:
        fp8 = options.pop("fp8", self.job["recipe"])
        base = super().config(dtype="bfloat16", **options)
        return base.model_copy(update={"trainer": base.trainer.model_copy(update={"fp8": fp8})})

    def demonstrated(self, step: int) -> list[MicroBatch]:
        """Packed as a run packs them: tokens of a rank are whole blocks."""
        trajectories = demonstrations(step)[: self.job["sequences"]]
        rows = make_rows(trajectories, [1.0] * len(trajectories), loss_weights(trajectories, "token"))
        pack = make_packer(self.config(), self.spec, self.sizes)
        return pack(rows).shards[self.parallel.coordinates.data]

    def gradients_of(self, name: str, **options: Any) -> None:
        """Log-probs and gradients of one step."""
        trainer = self.built(distributed_optimizer=False, optimizer={"clip_grad": 0.0}, **options)
        batches = self.demonstrated(0)
        # Only the last stage has log-probs.
        for batch, logprobs in zip(batches, trainer.logprobs(batches), strict=self.parallel.last_stage):
            at = np.cumsum([0, *batch.lengths])
            for first, last in pairwise(at.tolist()):
                own = np.arange(first, last)[~batch.padding[first:last]]
                if own.size:
                    self.arrays[f"{name} {batch.tokens[own].tolist()}"] = logprobs[own]
        self.steps(trainer, 1)
        self.write_tensors(name, self.gradients(trainer))

    def weights_as_computed_with(self, trainer: Any) -> dict[str, Any]:
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

    def published(self, trainer: Any) -> None:
        """A publication's codes and scales of the checkpoint's tensors, and those that the layers computed with."""
        import torch

        from slimx.extras.low_precision.block_fp8 import SCALE_SUFFIX, quantization
        from slimx.layout.megatron import MegatronLayout
        from slimx.layout.number_formats import Precision
        from slimx.reshard.pack.packer import Packer
        from slimx.reshard.plan.copy_plan import compile_plan

        seen = self.weights_as_computed_with(trainer)
        held = MegatronLayout(self.spec.table, self.sizes).parts_of(self.rank)
        parts = [part._replace(ranks=(0,)) for part in held if part.quantized]
        self.said["computed_in_fp8"] = sorted(seen) == sorted(part.name for part in parts)
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
        self.said["same_codes"] = all(torch.equal(codes, published[name]) for name, (codes, _) in seen.items())
        self.said["same_scales"] = all(
            torch.equal(scales.view(torch.uint8).flatten(), published[name + SCALE_SUFFIX].flatten())
            for name, (_, scales) in seen.items()
        )

    def copies(self) -> None:
        """Passes with other weights and a step between passes with these: the stand of Transformer Engine fails where
        a copy of weights is out of date."""
        trainer = self.built()
        modules = [module for chunk in trainer.chunks for module in chunk.modules()]
        copies = [module._fp8_workspaces for module in modules if hasattr(module, "_fp8_workspaces")]
        self.said["no_copies"] = not any(copies)
        self.said["no_copies"] &= bool(copies)
        first = trainer.weights.snapshot()
        self.steps(trainer, 1)
        trainer.logprobs(self.demonstrated(1))
        with trainer.weights.switching() as switch:
            switch(first)
            trainer.logprobs(self.demonstrated(1))
        trainer.logprobs(self.demonstrated(2))
        held = {number: set(each) for number, each in enumerate(copies) if each}
        weights = sum(part.quantized for part in trainer.weights.parts)
        self.said["a_copy_of_each"] = sum(map(len, held.values())) == weights
        trainer.offload()
        self.said["copies_leave"] = not any(copies)
        trainer.reload()
        self.steps(trainer, 1, 1)

    def unified(self) -> None:
        trainer = self.built()
        self.published(trainer)
        before = self.held(trainer)
        self.steps(trainer, BEFORE_TRAINING)
        self.said["moved"] = not equal(self.held(trainer), before)
        first = dict(self.said)
        self.published(trainer)
        self.said["same_later"] = all(self.said[name] and first[name] for name in ("same_codes", "same_scales"))


def main() -> None:
    rank = Fp8Rank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.gradients_of("fp8")
    if rank.job["engine"]:
        rank.gradients_of("bf16", fp8=None)
        rank.copies()
        rank.finish()
        return
    if rank.sizes.world == 1:
        rank.gradients_of("bf16", fp8=None)
        rank.gradients_of("recomputed", recompute={"granularity": "full"})
    if rank.job["recipe"] == "blockwise":
        rank.unified()
    rank.finish()


if __name__ == "__main__":
    main()
