"""A NIXL agent with memory of this process, for nixl 1.5, whose transport UCX uses RDMA, shared memory or TCP.

Descriptors are created from (address, bytes, device). NIXL's serialized descriptors are pickles and are not used."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from slimx.errors import SlimxError
from slimx.extras.direct.ends.offer import Region
from slimx.reshard.transports.device import DeviceMemory
from slimx.runtime.ports import is_loopback

RDMA = Path("/sys/class/infiniband")
BACKEND = "UCX"
HOST = "DRAM"
GPU = "VRAM"
PATIENCE_US = 1000
"""Maximum time in microseconds for which an agent's thread sleeps before it polls the network; every network event
wakes the thread earlier."""


class LinkError(SlimxError):
    """Raised if an agent cannot be reached or a transfer fails."""


class Agent:
    """NIXL agent that registers memory, connects to other agents and writes into their memory. Only one thread at a
    time may call its methods."""

    def __init__(self, name: str, host: str):
        """Starts an agent.

        `name`: unique among the agents of a run. `host`: this machine's address in the run's network; without RDMA only
        the network interface with this address carries transfers. Raises LinkError if NIXL cannot start."""
        api = load_nixl()
        self.name = name
        try:
            self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
            self._agent.agent = api.nixlBind.nixlAgent(name, _waiting(api))  # its thread starts with the backend
            # With this setting, the death of a peer makes only the transfers to that peer fail.
            options = {"ucx_error_handling_mode": "peer", "ucx_devices": ",".join(devices_at(host))}
            self._agent.create_backend(BACKEND, options)
        except Exception as error:  # NIXL has no exception class for errors in its library
            raise LinkError(
                f"NIXL cannot start an agent for {name} at address {host} ({first_words(error)}); set cluster.network "
                "to a network whose device UCX supports, or set publish.transport=disk",
                code="direct.agent",
                about=name,
            ) from None
        self._registered: list[tuple[torch.Tensor | DeviceMemory, Any]] = []

    def register(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Allocates host memory, uint8 [nbytes], and registers it for transfers until the agent is closed.

        `pinned`: True to pin the memory, so that this process's GPU can copy into it at full rate."""
        memory = torch.zeros(max(nbytes, 1), dtype=torch.uint8, pin_memory=pinned)
        remedy = "raise the limit of locked memory (ulimit -l), or lower publish.bucket_mib"
        self._register(memory, Region(memory.data_ptr(), len(memory)), remedy)
        return memory

    def register_gpu(self, nbytes: int, device: torch.device | int) -> DeviceMemory:
        """Allocates `nbytes` bytes of memory on GPU `device` and registers them for transfers until the agent is
        closed.

        All registered GPU memory of an agent must be on one GPU, because NIXL's UCX backend has one CUDA context."""
        memory = DeviceMemory(max(nbytes, 1), device)
        remedy = "load nvidia-peermem or enable dma-buf, so that network devices can reach GPU memory, or set "
        self._register(memory, region_of(memory), remedy + "publish.staging=model, which uses host memory")
        return memory

    def _register(self, memory: torch.Tensor | DeviceMemory, region: Region, remedy: str) -> None:
        gpu = max(region.device, 0)
        try:
            descriptors = [(region.address, region.nbytes, gpu, "")]
            registration = self._agent.register_memory(descriptors, mem_type=_kind([region]))
        except Exception as error:
            kind = "host memory" if region.device < 0 else f"the memory of GPU {gpu}"
            raise LinkError(
                f"NIXL cannot register {region.nbytes >> 20} MiB of {kind} for {self.name} ({first_words(error)}); "
                f"{remedy}",
                code="direct.register",
                about="publish.bucket_mib",
            ) from None
        self._registered.append((memory, registration))

    @property
    def metadata(self) -> bytes:
        """Connection data with which another agent can write into the memory that this agent has registered so far."""
        return self._agent.get_agent_metadata()

    def meet(self, metadata: bytes) -> str:
        """Connects to the agent that sent `metadata` and returns its name. Raises LinkError for invalid metadata."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise LinkError(
                f"{self.name} cannot use the NIXL metadata received from a peer ({first_words(error)}); install the "
                "same version of nixl on all machines, and set cluster.network to a network that connects them",
                code="direct.metadata",
                about=self.name,
            ) from None
        return name.decode() if isinstance(name, bytes) else name

    def part(self, peer: str) -> None:
        """Disconnects from the agent `peer`. Prints errors instead of raising them, because the peer's process may have
        ended."""
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            print(f"slimx: {self.name} could not disconnect from {peer}: {first_words(error)}", flush=True)

    def write(self, peer: str, sources: Sequence[Region], targets: Sequence[Region], notice: bytes) -> Transfer:
        """Starts writing the regions `sources` of this agent's memory into the regions `targets` of `peer`'s memory.

        `notice`: message that the peer receives after the last byte. Raises LinkError if the write cannot start."""
        try:
            handle = self._agent.initialize_xfer("WRITE", self._descs(sources), self._descs(targets), peer, notice)
            transfer = Transfer(self._agent, handle, peer)
            transfer.state = self._agent.transfer(handle)
        except Exception as error:
            raise LinkError(
                f"{self.name} could not start writing to {peer} ({first_words(error)}); find the cause in the log "
                f"of {peer}, then publish again",
                code="direct.write",
                about=peer,
            ) from None
        return transfer

    def notices(self) -> Iterator[bytes]:
        """Yields the notices (messages sent with writes) that this agent has received since the last call."""
        for received in self._agent.get_new_notifs().values():
            yield from received

    def close(self) -> None:
        """Releases all registered memory; further writes to it fail."""
        for memory, registration in self._registered:
            self._agent.deregister_memory(registration)
            if isinstance(memory, DeviceMemory):
                memory.close()
        self._registered.clear()
        self._agent = None

    def _descs(self, regions: Sequence[Region]) -> Any:
        descriptors = [(region.address, region.nbytes, max(region.device, 0)) for region in regions]
        return self._agent.get_xfer_descs(descriptors, mem_type=_kind(regions))


class Transfer:
    """Started write into another agent's memory."""

    def __init__(self, agent: Any, handle: Any, peer: str):
        self._agent = agent
        self._handle = handle
        self.peer = peer
        self.state = "PROC"

    @property
    def ended(self) -> bool:
        """True once the write is done or has failed. Must be polled, because NIXL makes progress on the write only
        during this call."""
        if self.state == "PROC":
            try:
                self.state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                self.state = f"ERR: {first_words(error)}"
        return self.state != "PROC"

    @property
    def done(self) -> bool:
        """True once all bytes have arrived. Raises LinkError if the write has failed."""
        if self.ended and self.state != "DONE":
            raise LinkError(
                f"the write to {self.peer} failed ({self.state}); find the cause in the log of {self.peer}, or "
                "restore the network connection, then publish again",
                code="direct.broken",
                about=self.peer,
            )
        return self.state == "DONE"

    def drop(self) -> None:
        """Releases the write, cancelling it if it is still in flight.

        A write that cannot be cancelled does no harm, because received memory is verified before it is used."""
        try:
            self._handle.release()
        except Exception as error:
            print(f"slimx: a write to {self.peer} could not be cancelled: {first_words(error)}", flush=True)


def region_of(memory: torch.Tensor | DeviceMemory) -> Region:
    """Returns the address, size and device of registered memory."""
    if isinstance(memory, DeviceMemory):
        return Region(memory.address, memory.size, -1 if memory.device.index is None else memory.device.index)
    return Region(memory.data_ptr(), len(memory))


def current(memory: torch.Tensor | DeviceMemory) -> AbstractContextManager[object]:
    """Returns a context manager that makes the GPU of the registered `memory` the current one, because UCX uses the
    thread's CUDA context; for host memory it does nothing."""
    return torch.cuda.device(memory.device) if isinstance(memory, DeviceMemory) else nullcontext()


def _kind(regions: Sequence[Region]) -> str:
    """Returns NIXL's name for the memory type of `regions`, which are all in host memory or all in GPU memory."""
    return HOST if regions[0].device < 0 else GPU


def load_nixl() -> Any:
    """Returns NIXL's Python module. Raises SlimxError if it is not installed or cannot be imported."""
    try:
        from nixl_cu13 import _api
    except ImportError as error:
        raise SlimxError(
            f"publish.transport=nixl requires NIXL, which cannot be imported ({error}); install nixl-cu13 as pinned in "
            "requirements/, or set publish.transport=disk",
        ) from None
    return _api


def _waiting(api: Any) -> Any:
    """Returns settings for an agent whose thread waits for events instead of polling, because a polling thread would
    occupy a core that the trainer or engine needs. NIXL's Python interface does not expose this setting."""
    settings = api.nixlBind.nixlAgentConfig()
    settings.useProgThread = True
    settings.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE.value  # only one thread at a time calls an Agent
    settings.pthrDelay = PATIENCE_US
    return settings


def devices_at(host: str) -> list[str]:
    """Returns the names of the network devices that transfers use on the machine with address `host`. An empty list
    means all devices, including RDMA."""
    if not is_loopback(host) and RDMA.is_dir() and any(RDMA.iterdir()):
        return []
    for device, rows in psutil.net_if_addrs().items():
        addresses = [row.address.partition("%")[0] for row in rows if row.family in (socket.AF_INET, socket.AF_INET6)]
        # The loopback interface accepts all addresses of 127.0.0.0/8 but lists only one.
        if host in addresses or (is_loopback(host) and any(map(is_loopback, addresses))):
            return [device]
    raise SlimxError(
        f"no network interface of {socket.gethostname()} has the address {host}; set cluster.network to a network of "
        "this machine",
        code="direct.interface",
        about=host,
    )


def first_words(error: Exception) -> str:
    """Returns the type and message of an error on one line, cut to 200 characters."""
    return " ".join(f"{type(error).__name__} {error}".split())[:200]
