"""A trainer's worker keeps its promises to the publisher while its memory comes and goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.data.packing import pack
from slimx.layout.ranks import sizes_of
from slimx.models.families import read_model
from slimx.reshard.plan.publication import export_plan
from slimx.trainer.worker import TrainerWorker
from tests.integration.conftest import ROOT
from tests.integration.trainer_rank import demonstrations, sft_rows

pytestmark = pytest.mark.integration
UNUSED = ("torch._dynamo", "tensorboard", "wandb", "transformers")
"""Packages that take long to import, and of which training on the CPU uses nothing."""


def publish(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Publishes before, while and after a worker without Ray is offloaded."""
    out = job["out"]
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
        updates = [pack(sft_rows(demonstrations(step)), data_size=1, max_tokens=60).shards[0]]
        return worker.call("model.train_updates", updates, step=step, version=0)

    trainer: Any = worker.rank.roles["model"]
    results: dict[str, Any] = {}
    first = published()
    trained(0)
    second = published()
    results["moved_by_training"] = first != second
    addresses = {name: parameter.data_ptr() for name, parameter in trainer.weights.parameters.items()}
    worker.call("rank.offload", weights=False)
    results["without_state"] = published() == second
    worker.call("rank.offload")
    results["offloaded"] = sum(trainer.offloading.sizes().values())
    results["on_demand"] = published() == second
    results["still_offloaded"] = list(trainer.offloading.away)
    worker.call("rank.offload")
    import torch

    taken = [torch.ones(4 * 10**6) for _ in range(3)]  # the memory that was given back goes to others
    worker.call("rank.reload")
    results["after_reload"] = published() == second
    results["other_addresses"] = sum(addresses[n] != p.data_ptr() for n, p in trainer.weights.parameters.items())
    results["memory"] = worker.call("rank.memory")
    results["trains"] = trained(1)["optim/skipped"] == 0.0 and published() != second
    results["memory_of_step"] = worker.call("rank.memory")
    results["imported"] = [name for name in UNUSED if name in sys.modules]
    del taken
    worker.stop()
    return results


def test_an_offloaded_worker_publishes_the_same_bytes(tiny_model: Path, tmp_path: Path):
    (tmp_path / "job.json").write_text(json.dumps({"model": str(tiny_model)}))
    # In a process that is not forked from another: of a fork's memory a part is its parent's.
    words = ["tests.integration.rank_main", f"{__name__}:publish", str(tmp_path / "job.json"), "0"]
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    results = json.loads((tmp_path / "0.json").read_text())
    assert results["imported"] == []
    assert results["moved_by_training"] and results["trains"]
    assert results["without_state"], "gradients and optimizer state are gone, the weights are not"
    assert results["offloaded"] == 0
    assert results["on_demand"] and results["still_offloaded"] == ["training"]
    assert results["after_reload"] and results["other_addresses"] > 0
    assert set(results["memory"]) == {f"memory/{name}_peak_mib" for name in ("generate", "publish", "train")}
    assert all(peak > 100 for peak in (results["memory"] | results["memory_of_step"]).values())
