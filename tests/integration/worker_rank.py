"""A trainer's worker process without Ray, for test_worker: what it publishes before, while and after it is offloaded.

python -m tests.integration.worker_rank JOB.json RANK
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
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.reshard.plan.publication import export_plan
from slimx.trainer.worker import TrainerWorker
from tests.integration.trainer_rank import demonstrations

UNUSED = ("torch._dynamo", "tensorboard", "wandb", "transformers")
"""Packages that take long to import, and of which training on the CPU uses nothing."""


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(job["out"])
    config = Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": job["model"]},
            "numerics": {"dtype": "float32"},
            "rollout": {"prompts": "p"},
            "schedule": {"colocate": True},
            "trainer": {"optimizer": {"lr": 1e-3}},
        }
    )
    worker = TrainerWorker(0, config.model_dump(mode="json"), str(out / "worker.log"), "cpu", ["model"])
    worker.start(worker.rendezvous())
    plan = export_plan(config, read_model(job["model"]), sizes_of(config.trainer))
    assert plan.count == 1
    worker.call("weights.prepare", name="publish", plan=plan.to_bytes(), remote=[], on_device=False)

    def published() -> bytes:
        path = worker.call("weights.open", name="publish", bucket=0)[0]
        worker.call("weights.fill", name="publish", bucket=0, paths=[path])
        worker.call("weights.release", name="publish", bucket=None)
        return Path(path).read_bytes()

    def trained(step: int) -> dict[str, float]:
        trajectories = demonstrations(step)
        rows = make_rows(trajectories, [1.0] * len(trajectories), loss_weights(trajectories, "token"))
        updates = [pack(rows, data_size=1, max_tokens=60).shards[0]]
        return worker.call("model.train_updates", updates, step=step, version=0)

    trainer: Any = worker.rank.roles["model"]
    said: dict[str, Any] = {}
    first = published()
    trained(0)
    second = published()
    said["moved_by_training"] = first != second
    addresses = {name: parameter.data_ptr() for name, parameter in trainer.weights.parameters.items()}
    worker.call("rank.offload", weights=False)
    said["without_state"] = published() == second
    worker.call("rank.offload")
    said["away"] = sum(trainer.offloading.sizes().values())
    said["on_demand"] = published() == second
    said["away_still"] = list(trainer.offloading.away)
    worker.call("rank.offload")
    import torch

    taken = [torch.ones(4 * 10**6) for _ in range(3)]  # the memory that was given back goes to others
    worker.call("rank.reload")
    said["after_reload"] = published() == second
    said["other_addresses"] = sum(addresses[n] != p.data_ptr() for n, p in trainer.weights.parameters.items())
    said["memory"] = worker.call("rank.memory")
    said["trains"] = trained(1)["optim/skipped"] == 0.0 and published() != second
    said["memory_of_step"] = worker.call("rank.memory")
    said["imported"] = [name for name in UNUSED if name in sys.modules]
    del taken
    worker.stop()
    (out / "0.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
