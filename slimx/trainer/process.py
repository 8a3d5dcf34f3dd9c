"""Preparation of a trainer rank's process before torch and megatron-core are imported: environment variables,
adaptations of megatron-core, log file."""

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
    """Sets the environment variables of gloo and CUDA that a rank needs. Must be called before torch is imported.

    `shares_layers`: True if several ranks compute one layer together (tensor or context parallelism). `local`: True if
    ranks connect over the loopback interface. `variables`: additional variables for ranks with a GPU. `deep_ep`: True
    for the flex dispatcher. `waiting`: True if trainer.offload_activations is set; then torch's default sizes of pinned
    memory blocks are kept."""
    clean_environment(os.environ)
    if local:
        # By default, gloo resolves the host name, which may fail, and listens at an address that other hosts can reach.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        # The adaptations depend on the devices that torch finds, so a rank on the CPU must not find the host's GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    # Micro-batches of many lengths would otherwise fragment the GPU's memory.
    set_expandable_segments(os.environ)
    if not waiting:
        set_pinned_sizes(os.environ)
    set_build_tools(os.environ)
    os.environ.update(variables)
    if deep_ep:
        for name, value in NVSHMEM.items():
            os.environ.setdefault(name, value)
    if shares_layers:
        # With one hardware queue, a layer's collective starts before the matrix product that overlaps with it, as
        # megatron-core requires (it warns otherwise).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def install_adapters(*, plain: bool = False, deep_ep: bool = False) -> list[str]:
    """Adapts megatron-core to this process and device; must be called before megatron-core is first imported. Returns
    the names of the active adaptations. `plain`: True to use plain torch layers even on a GPU. `deep_ep`: True for the
    flex dispatcher."""
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
    """Redirects standard output and standard error of this process and its children to the file `path`, appending to
    it."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
