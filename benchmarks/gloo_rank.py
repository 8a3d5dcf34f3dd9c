"""Starts a rank of a benchmark as `slimx.trainer.worker` does, without Ray."""

from __future__ import annotations

import os
import warnings
from typing import Any


def join(config: dict[str, Any], rank: int, init_method: str) -> tuple[Any, Any, Any]:
    """Calls `prepare` and joins the other ranks; returns the checked configuration, the model's description and the
    parallel state."""
    prepare()
    return enter(config, rank, init_method)


def prepare() -> None:
    """Installs the adapters, then imports torch; once per process."""
    # gloo would look up the host's name, which need not resolve; gloo's own variable.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")  # megatron-core's, of what is absent without a GPU
    from slimx.trainer.worker import install_adapters

    install_adapters()
    import torch

    torch.set_num_threads(1)


def enter(config: dict[str, Any], rank: int, init_method: str) -> tuple[Any, Any, Any]:
    """Joins the ranks as `join` does, in a prepared process that has left its earlier groups."""
    import torch

    from slimx.config.schema import Config
    from slimx.layout.ranks import sizes_of
    from slimx.models.families import read_model
    from slimx.trainer.parallel import ParallelState

    checked = Config.model_validate(config)
    device = torch.device("cpu")
    parallel = ParallelState(
        sizes_of(checked.trainer), rank=rank, init_method=init_method, device=device, deadline_s=60, seed=1
    )
    return checked, read_model(checked.model.path), parallel
