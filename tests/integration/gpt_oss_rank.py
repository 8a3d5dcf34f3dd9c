"""One gloo rank of test_gpt_oss: a checkpoint goes into the trainer; gradients and the checkpoint come out.

    python -m tests.integration.gpt_oss_rank JOB.json RANK

Under Hugging Face names, by the code that exports: `weights`, `gradients`, `after` (a step) and `restored` (from the
trainer's own checkpoint), each .safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from tests.integration import rank_start
from tests.integration.gathering import write_tensors
from tests.integration.saving import begin_save, finish_save
from tests.integration.trainer_rank import demonstrations, microbatch_tokens


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    out = Path(job["out"])
    config = Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": job["path"]},
            "numerics": {"dtype": "float32"},
            "trainer": {
                **job["layout"],
                "distributed_optimizer": False,  # it would leave each rank a part of the gradients
                "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
            },
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
        }
    )
    parallel = rank_start.join(config.trainer, rank, job["init_method"])
    import torch

    from slimx.models.families import read_model
    from slimx.trainer.trainer import PolicyTrainer

    spec, sizes = read_model(job["path"]), parallel.sizes
    trainer = PolicyTrainer(config, spec, parallel)

    def write(kind: str, tensors: dict[str, Any]) -> None:
        write_tensors(out / f"{kind}.safetensors", tensors, spec, parallel)

    write("weights", trainer.weights.parameters)
    batch = demonstrations(0)
    rows = make_rows(batch, [1.0] * len(batch), loss_weights(batch, "token"))
    packed = pack(
        rows,
        data_size=sizes.data,
        max_tokens=microbatch_tokens(rows, sizes.data),
        multiple_of=sizes.tensor * sizes.context,
        sequence_multiple=2 * sizes.context if sizes.context > 1 else 1,
    )
    batches = packed.shards[parallel.coordinates.data]
    trainer.train_step(batches, step=0, version=0)
    write("gradients", {name: parameter.main_grad for name, parameter in trainer.weights.parameters.items()})
    write("after", trainer.weights.parameters)
    begin_save(trainer, out / "checkpoint", step=0)
    finish_save(trainer, out / "checkpoint")
    with torch.no_grad():
        for parameter in trainer.weights.parameters.values():
            parameter.add_(1.0)
    trainer.restore(str(out / "checkpoint"), same_layout=True)
    write("restored", trainer.weights.parameters)
    rank_start.leave(parallel)


if __name__ == "__main__":
    main()
