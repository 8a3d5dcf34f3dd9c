"""Tensors that pretend to lie on a GPU: every operator that mixes devices raises, every wait for the GPU is counted.

A `Pretended` tensor says `cuda:0` and keeps its numbers in host memory, where torch computes with them. So the GPU's
branches of Python code run on a machine without one, and what would fail there for a tensor on the wrong device fails
here. Kernels, streams, the allocator and NCCL are not shown by it.

`install()` changes torch for the whole process: a test calls it in a process of its own, before megatron-core.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from slimx.config.sections.trainer import Trainer
from slimx.extras.cpu.adapters import megatron as megatron_cpu
from slimx.layout.ranks import sizes_of

DEVICE = torch.device("cuda", 0)
WAITS: Counter[str] = Counter()
"""`FILE:LINE` in Python -> how often the host would have waited there until the GPU has done what is queued."""

_CROSSING = frozenset({"aten::copy_"})
_INDEXING = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"})
"""CUDA takes indices from the host."""
_READING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"})
"""Their result, or its size, is known to the host only when the GPU has computed it."""
_NATIVE = frozenset({"custom_backward", "_engine_run_backward", "_padded_attention"})
"""Python functions from which torch's C++ goes on alone (autograd, the mask of causal attention). Tensors that it
creates are on the device that C++ knows, the CPU, which says nothing about ours."""


class LiveBytes:
    """Counts the memory of tensors that are made on the GPU inside a `with` block: `now`, and the most at any time,
    `peak`. Memory that several tensors share counts once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._tensors: Counter[int] = Counter()
        """By the address of their memory, tensors that live."""

    def __enter__(self) -> LiveBytes:
        # They are kept alive, so that nothing new takes their addresses.
        self._before = [x for x in gc.get_objects() if issubclass(type(x), Pretended)]
        self._known = {x.host_tensor.untyped_storage().data_ptr() for x in self._before}
        _METERS.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _METERS.remove(self)

    def add(self, tensor: Pretended) -> None:
        storage = tensor.host_tensor.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place in self._known:
            return
        self.now += nbytes if not self._tensors[place] else 0
        self._tensors[place] += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._drop, place, nbytes)

    def _drop(self, place: int, nbytes: int) -> None:
        self._tensors[place] -= 1
        self.now -= nbytes if not self._tensors[place] else 0


_METERS: list[LiveBytes] = []


class Pretended(torch.Tensor):
    """A tensor that says it is on DEVICE; `host_tensor` has its numbers."""

    host_tensor: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, host_tensor: torch.Tensor) -> Pretended:
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            host_tensor.shape,
            strides=host_tensor.stride(),
            storage_offset=host_tensor.storage_offset(),
            dtype=host_tensor.dtype,
        )
        out.host_tensor = host_tensor.detach()
        for meter in _METERS:
            meter.add(out)
        return out

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, Pretended):
            raise RuntimeError(f"{_place()}: the data of a tensor on the GPU becomes memory of the host")
        self.host_tensor = other.host_tensor
        _data.__set__(self, other)

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        WAITS[_place()] += 1
        return self.host_tensor.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"{_place()}: a tensor on the GPU cannot become a numpy array")

    def data_ptr(self) -> int:
        return self.host_tensor.data_ptr()

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return super().type(*args, **kwargs)
        return self.host_tensor.type().replace("torch.", "torch.cuda.")


_data = torch.Tensor.data


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Pretended(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _host_tensor(grad)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _host_tensor(x).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Pretended(grad)


def _host_tensor(x: Any) -> Any:
    return x.host_tensor if isinstance(x, Pretended) else x


def _compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes one operator on the host tensors, after checking where its arguments are."""
    name = function._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, Pretended)]
    host = [x for x in tensors if not isinstance(x, Pretended)]
    collective = name.startswith("c10d::")
    # Numbers without dimensions may come from the host.
    if any(x.dim() for x in host) and not collective and _caller().f_code.co_name not in _NATIVE:
        if name not in _CROSSING | _INDEXING or (name in _INDEXING and not isinstance(args[0], Pretended)):
            shapes = [tuple(x.shape) for x in here], [tuple(x.shape) for x in host]
            raise RuntimeError(f"{_place()}: {name} of tensors on the GPU {shapes[0]} and on the host {shapes[1]}")
        if not (len(args) > 2 and args[2] is True):  # non_blocking
            WAITS[_place()] += 1
    by_mask = name in _INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
    if name in _READING or by_mask:
        WAITS[_place()] += 1
    settings = {**tree_map(_host_tensor, kwargs), **({"device": torch.device("cpu")} if "device" in kwargs else {})}
    out = function(*tree_map(_host_tensor, args), **settings)
    if name == "aten::copy_":
        return args[0]
    # Operators in place return their argument.
    arguments = {id(x.host_tensor): x for x in here} | {id(x): x for x in host}

    def dressed(x: Any) -> Any:
        if id(x) in arguments:
            return arguments[id(x)]
        return Pretended(x) if isinstance(x, torch.Tensor) else x

    return tree_map(dressed, out)


def _caller() -> FrameType:
    """Returns the frame of the Python code that computes: neither this file nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or "/torch/_" in frame.f_code.co_filename):
        if frame.f_code.co_name in _NATIVE:
            break
        frame = frame.f_back
    return frame


def _place() -> str:
    frame: FrameType | None = _caller()
    while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    if frame is None:
        return "autograd"
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"


def install() -> None:
    """Makes 'cuda' a pretended GPU from now on; torch.cuda answers without streams, as megatron_cpu makes it."""
    for entry in (megatron_cpu._cuda_module, megatron_cpu._compile, megatron_cpu._collectives):
        entry()
    for name in megatron_cpu._FACTORIES.split():
        setattr(torch, name, _making(getattr(torch, name)))
    for name in megatron_cpu._METHODS.split():
        setattr(torch.Tensor, name, _making(getattr(torch.Tensor, name)))
    torch.Tensor.to = _moving(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(DEVICE)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module._apply = _swapping(torch.nn.Module._apply)


def join(job: dict[str, Any], rank: int) -> Any:
    """Returns the parallel state of a rank on the pretended device, where ranks meet over gloo. Call it after
    `install`: it imports the trainer's layers. `job`: of `run_ranks`, with the `layout` of the section `trainer`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet = dist.init_process_group
    dist.init_process_group = lambda backend, **kwargs: meet("gloo", **kwargs)
    from slimx.adapters.megatron import layers as megatron_layers
    from slimx.trainer.parallel import ParallelState

    megatron_layers.install()
    ParallelState._check_devices = lambda self: None  # there are no properties of a GPU to ask for
    torch.set_num_threads(1)
    sizes, device = sizes_of(Trainer(**job["layout"])), torch.device("cuda")
    return ParallelState(sizes, rank=rank, init_method=job["init_method"], device=device, deadline_s=600, seed=1)


def _making(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a factory whose 'cuda' makes a pretended tensor."""

    @functools.wraps(function)
    def make(*args: Any, pin_memory: bool = False, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if function.__name__ == "tensor":  # a list of numbers that a GPU holds is read one by one
            numbers = [x for x in tree_leaves(args) if isinstance(x, Pretended)]
            if numbers:
                WAITS[_place()] += len(numbers)
            args = tree_map(lambda x: x.host_tensor.item() if isinstance(x, Pretended) else x, args)
        if megatron_cpu._is_cuda(device):
            out = Pretended(function(*tree_map(_host_tensor, args), **{**kwargs, "device": "cpu"}))
        else:
            out = function(*(tree_map(_host_tensor, args) if device is not None else args), **kwargs)
        return out.requires_grad_() if requires_grad else out

    return make


def _moving(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a `Tensor.to` that knows the pretended device."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, waits = kwargs.pop("device", None), not kwargs.pop("non_blocking", False)
        rest = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                device = arg.device
                rest.append(arg.dtype)
            elif isinstance(arg, torch.device | str) or type(arg) is int:
                device = arg
            elif not isinstance(arg, bool):
                rest.append(arg)
        out = self
        if device is not None and megatron_cpu._is_cuda(device) is not isinstance(self, Pretended):
            WAITS[_place()] += waits
            out = (_ToHost if isinstance(self, Pretended) else _ToDevice).apply(self)
        return function(out, *rest, **kwargs) if rest or kwargs else out

    return to


def _swapping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has Module.to keep the parameters' identity and attributes, as it does between real devices."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return function(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply


def move_rotation_of_latent_attention() -> None:
    """Has megatron-core's YarnRotaryEmbedding make its frequencies on the host, and moves them.

    It computes them under `with torch.device(...)`, below what the pretence replaces."""
    import torch
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    build = YarnRotaryEmbedding.__init__

    @functools.wraps(build)
    def init(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        build(self, *args, **{**kwargs, "use_cpu_initialization": True})
        for values in (vars(self), self._buffers):
            moved = {name: value.to("cuda") for name, value in values.items() if isinstance(value, torch.Tensor)}
            values.update(moved)

    YarnRotaryEmbedding.__init__ = init
