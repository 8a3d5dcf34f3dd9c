"""One gloo rank of test_lora: trainers with adapters that learn, save, come back, and say what they hold.

    python -m tests.integration.lora_rank JOB.json RANK

It writes RANK.json; rank 0 adds the merged weights under Hugging Face names.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from tests.integration.gathering import write_tensors
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import Rank

LORA = {"rank": 4, "alpha": 8.0}
TRAINED = {"rank": 6, "alpha": 10.0}
"""That of two A of rank 3 with alpha 5."""
SCALE = LORA["alpha"] / LORA["rank"]
COLUMN = ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1")
AXES = dict.fromkeys(COLUMN, 0) | {"linear_proj": 1, "linear_fc2": 1}
"""Axes along which weights are split, by their layers' names; others are whole on every rank."""
STEPS = 2
LR = 2e-2
ASKED = "asked"
"""File of rank 0: it waits for transformers' gradients under the merged weights, in directory `merged`."""
ANSWER_S = 300.0


class LoraRank(Rank):
    def config(self, **trainer: Any) -> Config:
        distributed = trainer.pop("distributed_optimizer", True)
        trainer.pop("algorithm", None)
        optimizer = {"lr": LR, "clip_grad": 0.0}
        lora = LORA | {"targets": self.job["targets"]} | trainer.pop("lora", {})
        base = super().config(algorithm="sft", lora=lora, optimizer=optimizer, **trainer)
        # Without the distributed optimizer every rank has whole gradients; a user's file is refused.
        changed = base.trainer.model_copy(update={"distributed_optimizer": distributed})
        numerics = base.numerics.model_copy(update={"mode": self.job["mode"]})
        return base.model_copy(update={"trainer": changed, "numerics": numerics})

    def write_merged(self, name: str, trainer: Any) -> None:
        weights = trainer.weights
        write_tensors(
            self.out / f"{name}.safetensors",
            weights.parameters,
            self.spec,
            self.parallel,
            attached=weights.attached,
        )

    def steps(self, trainer: Any, first: int, count: int) -> list[dict[str, float]]:
        return [trainer.train_step(self.demonstrated(s), step=s, version=0) for s in range(first, first + count)]

    def held(self, trainer: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in trainer.weights.parameters.items()}

    def gradients(self) -> None:
        """Gradients of A and B against those that transformers' gradient of the merged weights implies:
        dA = s B' dW and dB = s dW A'."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        trainer = self.trainer(self.config(distributed_optimizer=False))
        base = self.held(trainer)
        first = trainer.logprobs(self.demonstrated(0))
        self.steps(trainer, 0, STEPS)
        self.reference(trainer, first)
        self.said["frozen"] = equal(base, self.held(trainer))
        merged = self.out / "merged"
        self.write_merged("merged", trainer)
        if self.rank == 0:
            (self.out / ASKED).touch()
            end = time.monotonic() + ANSWER_S
            while not merged.exists():
                assert time.monotonic() < end, merged
                time.sleep(0.05)
        self.barrier()
        whole = trainer.weights.copy_of(str(merged))
        adapters, tensor = trainer.weights.attached.adapters, parallel_state.get_tensor_model_parallel_group
        expected = {}
        for name, adapter in adapters.items():
            a, b = (parameter.detach().clone() for parameter in adapter.parameters)
            of_a, of_b = SCALE * b.T @ whole[name], SCALE * whole[name] @ a.T
            if (axis := AXES.get(name.rsplit(".", 2)[-2])) is not None:
                expert = ".experts." in name
                of = parallel_state.get_expert_tensor_parallel_group if expert else tensor
                dist.all_reduce((of_a, of_b)[axis], group=of())
            expected[name] = of_a, of_b
        self.steps(trainer, STEPS, 1)
        self.said["errors"] = {
            f"{name} {letter}": float((parameter.main_grad - each).abs().max() / each.abs().max())
            for name, pair in expected.items()
            for letter, parameter, each in zip("AB", adapters[name].parameters, pair, strict=True)
        }

    def reference(self, trainer: Any, first: list[Any]) -> None:
        """Compare the reference of adapters that have learned with the log-probs before, and with a copy of the
        weights from then."""
        from slimx.config.sections.algorithm import Algorithm
        from slimx.trainer.step.passes import ForwardPasses

        batches = self.demonstrated(0)
        algorithm = Algorithm(reference=True)
        trainer.passes = ForwardPasses(trainer.pipeline, trainer.routing, trainer.weights, algorithm, "none")
        policy = trainer.logprobs(batches)
        given = trainer.passes.before_updates(trainer._local(batches)).fields
        base, again = trainer.logprobs(batches, under="reference"), trainer.logprobs(batches)
        if not self.parallel.last_stage:
            return
        parts = [each["reference_logprobs"] for each in given]
        whole = [trainer.context.gather(part, b.lengths).numpy() for part, b in zip(parts, batches, strict=True)]
        self.said["reference"] = {
            "is_base": same(base, first),
            "is_given": same(whole, first),
            "policy_learned": not same(policy, first),
            "policy_is_back": same(again, policy),
        }

    def resumed(self) -> None:
        from slimx.extras.planner.memory.state import Buffers
        from slimx.extras.planner.memory.trainer import holdings

        config = self.config()
        trainer = self.trainer(config)
        self.steps(trainer, 0, STEPS)
        sizes, held = trainer.offloading.sizes(), holdings(config.trainer, config.numerics, self.spec)
        planned = Buffers(held.runs(self.sizes, self.rank), config.trainer, self.sizes).state(self.rank)
        self.said["bytes"] = [sizes["weights"], sizes["gradients"], sizes["optimizer state"]]
        self.said["planned"] = [planned.weights, planned.gradients, planned.optimizer]
        self.said["merged"] = [
            planned.adapted,
            sum(trainer.weights.parameters[name].numel() for name in trainer.weights.attached.merging),
        ]
        path = self.out / "checkpoint"
        begin_save(trainer, path, step=STEPS)
        finish_save(trainer, path)
        self.write_merged("saved", trainer)
        ahead = self.steps(trainer, STEPS, 2)
        fresh = self.trainer(config)
        fresh.restore(str(path), same_layout=True)
        self.said["restored"] = [ahead, self.steps(fresh, STEPS, 2)]
        self.said["restored_equal"] = equal(merged_in(trainer), merged_in(fresh))
        if self.job["moved"]:
            fresh.restore(self.job["moved"], same_layout=False)
            self.write_merged("moved", fresh)
            self.imported(adapters_in(fresh))

    def imported(self, wanted: dict[str, Any]) -> None:
        """Begin with the adapters in `peft`, and step once from there: a stale fp32 copy would step from elsewhere."""
        trainer = self.trainer(self.config(lora={"load": str(self.out / "peft")}))
        found = adapters_in(trainer)
        self.said["imported"] = equal(found, wanted)
        self.steps(trainer, 0, 1)
        after = adapters_in(trainer)
        self.said["moved_by"] = max(float((after[name] - value).abs().max()) for name, value in found.items())

    def trained_by_peft(self) -> None:
        """Begin with the adapters in `trained`, say their log-probs, and save a checkpoint."""
        if not (self.out / "trained").exists():
            return
        trainer = self.trainer(self.config(lora=TRAINED | {"load": str(self.out / "trained")}))
        batches = self.demonstrated(0)
        for number, (batch, found) in enumerate(zip(batches, trainer.logprobs(batches), strict=True)):
            arrays = {"tokens": batch.tokens, "labels": batch.labels, "logprobs": found}
            self.arrays |= {f"{key}.{number}": array for key, array in arrays.items()}
            self.arrays[f"lengths.{number}"] = np.array(batch.lengths)
        begin_save(trainer, self.out / "of_trained", step=0)
        finish_save(trainer, self.out / "of_trained")


def merged_in(trainer: Any) -> dict[str, Any]:
    return trainer.weights.parameters | {name: make() for name, make in trainer.weights.attached.merging.items()}


def adapters_in(trainer: Any) -> dict[str, Any]:
    return {
        f"{name} {letter}": parameter.detach().clone()
        for name, adapter in trainer.weights.attached.adapters.items()
        for letter, parameter in zip("AB", adapter.parameters, strict=True)
    }


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) > 0 and all((a == b).all() for a, b in zip(one, other, strict=True))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    rank = LoraRank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    rank.start()
    rank.gradients()
    rank.resumed()
    rank.trained_by_peft()
    rank.finish()


if __name__ == "__main__":
    main()
