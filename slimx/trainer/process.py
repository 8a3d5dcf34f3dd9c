"""The process of a trainer rank before the import of torch and megatron-core: its environment, adapters and log."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

from slimx.adapters.device import device_named
from slimx.runtime.allocator import set_expandable_segments, set_pinned_sizes
from slimx.runtime.children import clean_environment
from slimx.runtime.toolkit import NVSHMEM, set_build_tools


def prepare_process(
    device: str,
    *,
    shares_layers: bool,
    local: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
    deep_ep: bool = False,
    waiting: bool = False,
) -> None:
    """Sets the variables of gloo and CUDA that a rank needs; call before torch is imported. `shares_layers`: whether
    several ranks compute one layer together (tensor or context parallelism); `local`: whether they meet on loopback;
    `variables`: additional ones, for a GPU; `deep_ep`: for a flex dispatcher; `waiting`: for
    trainer.offload_activations."""
    clean_environment(os.environ)
    if local:
        # gloo would resolve the host name, which may be impossible, and listen at an address that other hosts reach.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        # The adapters depend on what torch sees: a rank configured for the CPU must not see the host's GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    # Packs of many lengths would fragment the GPU's memory: reserved, but unusable for the next allocation.
    set_expandable_segments(os.environ)
    if not waiting:
        set_pinned_sizes(os.environ)
    set_build_tools(os.environ)
    os.environ.update(variables)
    if deep_ep:
        for name, value in NVSHMEM.items():
            os.environ.setdefault(name, value)
    if shares_layers:
        # One hardware queue: a layer's collective is then launched before the product that should hide it, which
        # megatron-core's overlap of the two requires (it warns otherwise).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def install_adapters(*, plain: bool = False, deep_ep: bool = False) -> list[str]:
    """Prepares this process for megatron.core, before its first import; returns the names of the active adapters.

    `plain`: use plain torch layers on a GPU too; `deep_ep`: for a flex dispatcher."""
    import torch

    device = device_named("cuda" if torch.cuda.is_available() else "cpu")
    adapters = device.prepare_megatron(deep_ep=deep_ep)
    from slimx.adapters.megatron.imports import untracked

    with untracked():
        from slimx.adapters.megatron import layers as megatron_layers

    adapters += device.change_megatron()
    if megatron_layers.install(always=plain):
        adapters.append("torch_layers")
    return adapters


def redirect_output(path: str) -> None:
    """Redirects all output of this process and its children to the end of the file `path`."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
