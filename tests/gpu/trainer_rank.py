"""One trainer process of test_trainer, on a GPU (NCCL) or on the CPU (gloo), without Ray.

    python -m tests.gpu.trainer_rank DEVICE OUT CASE...

It begins as `slimx.trainer.worker` does. Each case trains a few GRPO steps and writes OUT/CASE.json (metrics) and
OUT/CASE.safetensors (log-probs, gradients and weights by Megatron's names, in fp32).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.alone import alone


def run(name: str, out: Path, parallel: Any) -> None:
    import torch
    from safetensors.torch import save_file

    from slimx.algorithms.advantages.estimate import group_advantages
    from slimx.data.batch import make_rows
    from slimx.data.loss_weights import loss_weights
    from slimx.data.packing import pack
    from slimx.models.families import read_model
    from slimx.trainer.checkpoint import files
    from slimx.trainer.trainer import PolicyTrainer
    from tests.gpu.trainer_cases import CASES, STEPS, VERSION, config, rollouts, write_model

    case = CASES[name]
    path = write_model(out / name / "model", case["hf"], case["mtp"], seed=1)
    policy = write_model(out / name / "policy", case["hf"], case["mtp"], seed=2)
    settings = config(path, out, case)
    trainer = PolicyTrainer(settings, read_model(path, mtp_layers=case["mtp"]), parallel)
    trainer.weights.load(str(policy))  # another than the reference
    trainer.optimizer.reload_model_params()
    tensors: dict[str, torch.Tensor] = {}

    def keep(kind: str, values: dict[str, torch.Tensor]) -> None:
        tensors.update({f"{kind}.{key}": value.detach().float().cpu().clone() for key, value in values.items()})

    def batches(step: int) -> Any:
        groups = rollouts(step, case["routes"])
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        advantages = [value for group in groups for value in group_advantages(settings.algorithm, group)]
        rows = make_rows(trajectories, advantages, loss_weights(trajectories, "token"))
        return pack(rows, data_size=1, max_tokens=settings.trainer.max_tokens_per_microbatch).shards[0]

    def step(number: int) -> dict[str, float]:
        return trainer.train_step(batches(number), step=number, version=VERSION)

    keep("before", trainer.weights.parameters)
    keep("logprobs", {str(k): torch.tensor(v) for k, v in enumerate(trainer.logprobs(batches(0)))})
    report: dict[str, Any] = {"steps": [step(0)]}
    # Buffers (the router's selection bias) have no gradient.
    keep("gradient", {k: p.main_grad for k, p in trainer.weights.parameters.items() if hasattr(p, "main_grad")})
    report["steps"] += [step(number) for number in range(1, STEPS)]
    keep("weights", trainer.weights.parameters)

    checkpoint = out / name / "checkpoint"
    (checkpoint / files.REPORTS).mkdir(parents=True)
    trainer.save(str(checkpoint), step=STEPS)
    report["after_save"] = step(STEPS)  # while the files are written
    end = time.monotonic() + 60
    while files.unreported(checkpoint, range(1)):
        assert time.monotonic() < end, f"the checkpoint {checkpoint} is not written after 60 s"
        time.sleep(0.01)
    trainer.restore(str(checkpoint), same_layout=True)
    keep("restored", trainer.weights.parameters)
    trainer.offload()
    trainer.reload()
    report["after_restore"] = step(STEPS)
    if parallel.device.type == "cuda":
        report["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    (out / f"{name}.json").write_text(json.dumps(report))
    save_file(tensors, out / f"{name}.safetensors")


def main() -> None:
    kind, out, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    with alone(kind, threads=1 if kind == "cpu" else 4) as parallel:
        for name in names:
            run(name, out, parallel)


if __name__ == "__main__":
    main()
