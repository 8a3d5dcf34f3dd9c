"""Lets megatron-core 0.19.2 train where torch has no CUDA: 'cuda' means the CPU, NCCL means gloo.

`install()` changes torch for the whole process, so only the trainer's process entry calls it, before it imports
megatron.core. Where torch has CUDA it does nothing. Each entry below names the line of upstream that needs it.
A TorchFunctionMode instead of the replaced functions does not work: it is off while autograd runs backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._device import _device_constructors

MEGATRON_CORE = "0.19.2"

_FACTORIES = (
    "arange empty empty_like eye full full_like linspace ones ones_like rand randint randn randperm tensor zeros "
    "zeros_like"
)
_METHODS = "new_empty new_full new_ones new_tensor new_zeros"


def install() -> list[str]:
    """Apply every entry that this machine needs; returns their names (empty where CUDA exists)."""
    if torch.cuda.is_available():
        return []
    entries = (_devices, _cuda_module, _collectives, _compile)
    for entry in entries:
        entry()
    return [entry.__name__.strip("_") for entry in entries]


def install_megatron() -> list[str]:
    """Entries inside megatron.core itself; call after `install()`, before a model is built."""
    if torch.cuda.is_available():
        return []
    entries = (_yarn_device, _token_dispatcher, _shared_storage)
    for entry in entries:
        entry()
    return [entry.__name__.strip("_") for entry in entries]


def _is_cuda(device: Any) -> bool:
    # An int is a CUDA ordinal: Tensor.to(torch.cuda.current_device()).
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def _served_by_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _devices() -> None:
    """Tensors asked for on 'cuda' come from the CPU (megatron.core names the device in some 200 places)."""
    # torch.device as a context looks for its factories once, and calls them by what they are here: transformers loads
    # models within torch.device("meta"), and buffers that are not there stay uninitialised.
    _device_constructors()
    for name in _FACTORIES.split():
        setattr(torch, name, _served_by_cpu(getattr(torch, name)))
    for name in _METHODS.split():
        setattr(torch.Tensor, name, _served_by_cpu(getattr(torch.Tensor, name)))
    move = _served_by_cpu(torch.Tensor.to)
    kind = torch.Tensor.type
    torch.Tensor.to = lambda self, *args, **kwargs: move(self, *("cpu" if _is_cuda(a) else a for a in args), **kwargs)
    # The distributed optimizer groups parameters by type() and asserts that it begins with torch.cuda.
    torch.Tensor.type = lambda self, *args, **kwargs: (
        kind(self, *args, **kwargs) if args or kwargs else kind(self).replace("torch.", "torch.cuda.", 1)
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None


class _Event(torch.cpu.Event):
    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass


def _cuda_module() -> None:
    """torch.cuda answers for one device without streams; its random state is the CPU's."""
    cuda, generator, stream = torch.cuda, torch.default_generator, _Stream()
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, lambda s: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda._lazy_call = lambda function, **kwargs: function()  # tensor_parallel.random sets its states through it
    cuda.default_generators = (generator,)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: generator.get_state()
        module.set_rng_state = lambda state, device=None: generator.set_state(state)
        module.manual_seed = lambda seed: generator.manual_seed(seed)


def _collectives() -> None:
    """gloo's all_gather and reduce_scatter want equal shards, NCCL's do not (EP with ETP > 1 counts on it)."""
    dist = torch.distributed
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def rows(shards: Sequence[torch.Tensor]) -> list[int]:
        return [shard.shape[0] if shard.dim() else 1 for shard in shards]

    def pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])])

    @functools.wraps(gather)
    def all_gather(out: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts = rows(out)
        if len(set(counts)) == 1:
            return gather(out, tensor, *args, **kwargs)
        padded = [pad(shard, max(counts)) for shard in out]
        gather(padded, pad(tensor, max(counts)), *args, **kwargs)
        for target, source in zip(out, padded, strict=True):
            target.copy_(source[: target.shape[0]])
        return None

    @functools.wraps(scatter)
    def reduce_scatter(out: torch.Tensor, shards: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        counts = rows(shards)
        if len(set(counts)) == 1:
            return scatter(out, shards, *args, **kwargs)
        padded = pad(out, max(counts))
        scatter(padded, [pad(shard, max(counts)) for shard in shards], *args, **kwargs)
        out.copy_(padded[: out.shape[0]])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _compile() -> None:
    """megatron.core's jit_fuser is torch.compile; inductor costs a compiler run per small function and gains nothing
    here. torch imports the compiler too, a second of CPU time, for it to pass over these methods."""
    torch.compile = lambda model=None, **kwargs: model or (lambda function: function)
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(torch.optim.Optimizer, name).__wrapped__
        setattr(method, "__dynamo_disable", method)


def _yarn_device() -> None:
    """YarnRotaryEmbedding enters torch.device(torch.cuda.current_device()), and MLA does not tell it that the model is
    initialised on the CPU."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    YarnRotaryEmbedding.__init__ = functools.partialmethod(YarnRotaryEmbedding.__init__, use_cpu_initialization=True)


def _token_dispatcher() -> None:
    """gloo's all_to_all_single wants lists as split sizes; the dispatcher's helper leaves CPU tensors as they are."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _shared_storage() -> None:
    """A recomputed output is copied into the storage of the first one (`CheckpointWithoutOutput`): upstream compiles a
    C++ extension in the first backward pass so that they share it, which needs ninja and 20 seconds."""
    from megatron.core.tensor_parallel import random

    def share(to: torch.Tensor, of: torch.Tensor) -> None:
        target, source = to.untyped_storage(), of.untyped_storage()
        target.resize_(source.nbytes())
        target.copy_(source)

    random._get_share_storage = lambda: share
