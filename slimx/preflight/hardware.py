"""GPUs and the nodes they come in, as `slimx plan` knows them: public figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slimx.config.sections.run import Cluster

GIB = 2**30
OVERHEAD = 3 * GIB
"""Bytes that a process on a GPU needs besides: CUDA context, NCCL's buffers, workspaces of cuBLAS, gaps of torch's
allocator. Assumed; 1.2 GiB of it were measured on one H100 with one rank (docs/planning.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU. Rates in bytes per second and direction."""

    name: str
    memory: int
    """Bytes that a process can have, as the driver reports them."""
    per_node: int
    domain: int
    """GPUs that NVLink joins."""
    nvlink: float
    network: float
    """One InfiniBand adapter per GPU."""
    host: float
    """To and from host memory."""
    host_memory: int
    """Bytes of a node's host memory."""
    bandwidth: float
    """Bandwidth of its memory."""
    flops: float
    """Dense bf16, per second."""


# NVIDIA H100 and H200 data sheets (SXM: NVLink 4 with 900 GB/s both ways, PCIe 5 x16 with 128 GB/s both ways, 989
# TFLOP/s dense bf16); DGX H100 user guide (8 GPUs and 8 ConnectX-7 of 400 Gb/s per node). nvidia-smi: 81559 MiB and
# 143771 MiB. A DGX H100 or H200 has 2 TB of system memory.
_H100 = Gpu(
    name="H100 SXM",
    memory=81559 * 2**20,
    per_node=8,
    domain=8,
    nvlink=450e9,
    network=50e9,
    host=64e9,
    host_memory=2048 * GIB,
    bandwidth=3.35e12,
    flops=989e12,
)
GPUS = {
    "h100": _H100,
    "h200": replace(_H100, name="H200 SXM", memory=143771 * 2**20, bandwidth=4.8e12),
    # NVIDIA GB300 NVL72 product page: 72 GPUs in one NVLink 5 domain (1.8 TB/s both ways each), 4 GPUs per compute
    # tray, 279 GB of HBM3e each as sold (20 TB per rack), 8 TB/s, NVLink-C2C of 900 GB/s both ways per Grace (two
    # GPUs) and 17 TB of LPDDR5X per rack (18 trays), ConnectX-8 of 800 Gb/s, 180 PFLOP/s dense bf16 per rack.
    "gb300": Gpu(
        name="GB300 NVL72",
        memory=int(279e9),
        per_node=4,
        domain=72,
        nvlink=900e9,
        network=100e9,
        host=225e9,
        host_memory=int(17e12 / 18),
        bandwidth=8e12,
        flops=2.5e15,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which a run is to take place, as far as the configuration describes it."""

    gpu: Gpu | None
    memory: int | None
    """Bytes of one GPU; None: unknown."""
    per_node: int
    nodes: int | None
    """None: as many as needed."""
    host_memory: int | None
    """Bytes of one node; None: unknown."""

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins: of a node, or of several."""
        return max(self.per_node, self.gpu.domain if self.gpu else 0)


def nodes_known(cluster: Cluster, device: str) -> bool:
    """True if the configuration says how many ranks a node holds."""
    return device == "cuda" and bool(cluster.gpu or cluster.gpus_per_node)


def machine_of(cluster: Cluster) -> Machine:
    """The machine of section `cluster`."""
    gpu = GPUS[cluster.gpu] if cluster.gpu else None
    memory = int(cluster.gpu_memory_gib * GIB) if cluster.gpu_memory_gib else gpu.memory if gpu else None
    return Machine(
        gpu=gpu,
        memory=memory,
        per_node=cluster.gpus_per_node or (gpu.per_node if gpu else 8),
        nodes=cluster.nodes,
        host_memory=_host_memory(cluster, gpu),
    )


def _host_memory(cluster: Cluster, gpu: Gpu | None) -> int | None:
    if cluster.host_memory_gib:
        return int(cluster.host_memory_gib * GIB)
    if gpu is None:
        return None
    return gpu.host_memory * (cluster.gpus_per_node or gpu.per_node) // gpu.per_node
