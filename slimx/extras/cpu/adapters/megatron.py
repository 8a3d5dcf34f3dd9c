"""Lets megatron-core 0.19.2 train without CUDA: the device "cuda" becomes the CPU, and NCCL becomes gloo.

`install()` patches torch for the whole process, so only the trainer's process entry calls it, before it imports
megatron.core. With CUDA it does nothing. Each function below makes one change, and its docstring names the upstream
code that requires the change. A TorchFunctionMode cannot be used instead of patches, because it is off while autograd
runs backward."""

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
    """Applies the changes to torch and returns their names. Does nothing and returns an empty list if CUDA is
    available."""
    if torch.cuda.is_available():
        return []
    entries = (_devices, _cuda_module, _collectives, _compile)
    for entry in entries:
        entry()
    return [entry.__name__.strip("_") for entry in entries]


def install_megatron() -> list[str]:
    """Applies the changes inside megatron.core and returns their names; must be called after `install()` and before a
    model is built. Does nothing and returns an empty list if CUDA is available."""
    if torch.cuda.is_available():
        return []
    entries = (_yarn_device, _token_dispatcher, _shared_storage)
    for entry in entries:
        entry()
    return [entry.__name__.strip("_") for entry in entries]
    return [entry.__name__.strip("_") for entry in entries]


def _patch(target: object, **replacements: object) -> None:
    """Sets attributes of the module or class `target` to the given values."""
    for name, value in replacements.items():
        setattr(target, name, value)


def _is_cuda(device: Any) -> bool:
    # An int is a CUDA ordinal, as in Tensor.to(torch.cuda.current_device()).
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _devices() -> None:
    """Creates tensors for the device "cuda" on the CPU, because megatron.core names that device in about 200 places."""
    # torch.device as a context manager looks up its factories once, here before they are patched. transformers loads
    # models within torch.device("meta"), and buffers whose factories are missing would stay uninitialized.
    _device_constructors()
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS.split():
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    move = _on_cpu(torch.Tensor.to)
    kind = torch.Tensor.type

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return move(tensor, *("cpu" if _is_cuda(argument) else argument for argument in args), **kwargs)

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(tensor, *args, **kwargs)
        # The distributed optimizer groups parameters by type() and asserts that the name starts with torch.cuda.
        return kind(tensor).replace("torch.", "torch.cuda.", 1)

    _patch(
        torch.Tensor,
        to=to,
        type=type_name,
        cuda=lambda self, *args, **kwargs: self,
        pin_memory=lambda self, *args, **kwargs: self,
        record_stream=lambda self, stream: None,
    )


class _CpuEvent(torch.cpu.Event):
    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _CpuStream(torch.cpu.Stream):
    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _CpuEvent()

    def synchronize(self) -> None:
        pass


def _cuda_module() -> None:
    """Makes torch.cuda behave like a single device that has no streams and uses the CPU's random state."""
    cuda = torch.cuda
    generator = torch.default_generator
    stream = _CpuStream()
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    _patch(
        cuda,
        current_device=lambda: 0,
        device_count=lambda: 1,
        Stream=_CpuStream,
        Event=_CpuEvent,
        stream=lambda s: contextlib.nullcontext(),
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        _lazy_call=lambda function, **kwargs: function(),  # tensor_parallel.random sets its states by it
        default_generators=(generator,),
    )
    for module in (cuda, cuda.random):
        _patch(
            module,
            get_rng_state=lambda device=None: generator.get_state(),
            set_rng_state=lambda state, device=None: generator.set_state(state),
            manual_seed=lambda seed: generator.manual_seed(seed),
        )


def _collectives() -> None:
    """Pads shards of unequal sizes, because NCCL's all_gather and reduce_scatter support unequal sizes (used by EP with
    ETP > 1), but gloo's do not."""
    dist = torch.distributed
    gather = dist.all_gather
    scatter = dist.reduce_scatter

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

    _patch(dist, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _compile() -> None:
    """Disables torch.compile, which megatron.core uses as jit_fuser: inductor would run a compiler for each small
    function, without making it faster.

    The optimizer's methods are marked as disabled as well; otherwise torch would import the compiler, which takes a
    second of CPU time, only to skip them.
    """
    _patch(torch, compile=lambda model=None, **kwargs: model or (lambda function: function))
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(torch.optim.Optimizer, name).__wrapped__
        setattr(method, "__dynamo_disable", method)


def _yarn_device() -> None:
    """Makes YarnRotaryEmbedding initialize on the CPU. The original enters torch.device(torch.cuda.current_device()),
    because MLA does not pass on the setting that initializes the model on the CPU."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    YarnRotaryEmbedding.__init__ = functools.partialmethod(YarnRotaryEmbedding.__init__, use_cpu_initialization=True)


def _token_dispatcher() -> None:
    """Replaces the token dispatcher's helper that moves split sizes to the host: the original leaves CPU tensors
    unchanged, but gloo's all_to_all_single requires lists."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _shared_storage() -> None:
    """Makes `CheckpointWithoutOutput` copy a recomputed output into the storage of the original output. Upstream shares
    the storage through a C++ extension, whose compilation in the first backward pass needs ninja and takes 20
    seconds."""
    from megatron.core.tensor_parallel import random

    def share(to: torch.Tensor, of: torch.Tensor) -> None:
        target = to.untyped_storage()
        source = of.untyped_storage()
        target.resize_(source.nbytes())
        target.copy_(source)

    random._get_share_storage = lambda: share
