"""Rules about the machine that a run starts on: its GPU, and packages that the configuration needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.run import Cluster
from slimx.config.sections.trainer import Trainer


@rule("cluster.no_gpu", about="cluster.device")
def has_gpu(cluster: Cluster, local_device: str) -> Iterator[str]:
    if cluster.device == "cuda" and cluster.ray_address is None and not _shows_gpu():
        yield "cluster.device is cuda, and this machine has no GPU; set cluster.device=cpu"


def _shows_gpu() -> bool:
    import pynvml  # where there are GPUs, torch may not have been imported yet

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False


@rule("muon.package", about="trainer.optimizer.kind")
def has_muon(trainer: Trainer, local_device: str) -> Iterator[str]:
    if trainer.optimizer.kind == "muon" and importlib.util.find_spec("emerging_optimizers") is None:
        yield (
            "trainer.optimizer.kind=muon, but the package emerging-optimizers, which has megatron-core's Muon, is not "
            "installed here; pip install slimx[muon], or set trainer.optimizer.kind=adam"
        )
