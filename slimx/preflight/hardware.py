"""Published figures of GPUs and their nodes for `slimx plan`, with their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slimx.config.sections.general import Cluster

GIB = 2**30
OVERHEAD = 3 * GIB
"""Bytes that a process on a GPU is assumed to need in addition to tensors: CUDA context, NCCL buffers, cuBLAS
workspaces, and fragmentation of torch's allocator. On one H100 with one rank, 1.2 GiB were measured
(docs/planning.md)."""
DRIVER = 560 * 2**20
"""Bytes of GPU memory that the driver reserves. Measured on one H100 80GB HBM3 with driver 580.159.04 on 2026-11-27: of
79.65 GiB, torch reports 79.1 GiB, and 78.50 GiB are free after a process has created its context. The same is assumed
for other GPUs."""
MARGIN = 3 * GIB
"""Bytes that a plan should leave free on every GPU, because activations and overheads are only estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Specifications of one type of GPU and of its nodes. Rates are in bytes per second in each direction."""

    name: str
    memory: int
    """GPU memory in bytes available to processes: the amount that nvidia-smi reports, minus `DRIVER`."""
    per_node: int
    """Number of GPUs per node."""
    domain: int
    """Number of GPUs in an NVLink domain."""
    nvlink: float
    """Bandwidth of a GPU's NVLink connection, in bytes per second in each direction."""
    network: float
    """Bandwidth of a GPU's network adapter (InfiniBand), in bytes per second in each direction; each GPU has one
    adapter."""
    host: float
    """Bandwidth between a GPU and host memory, in bytes per second in each direction."""
    host_memory: int
    """Host memory of a node in bytes."""
    bandwidth: float
    """Bandwidth of the GPU's memory in bytes per second."""
    flops: float
    """Peak rate of dense bf16 matrix products, in FLOPs per second."""


# NVIDIA H100 and H200 data sheets (SXM: NVLink 4 with 900 GB/s both ways, PCIe 5 x16 with 128 GB/s both ways, 989
# TFLOP/s dense bf16); DGX H100 user guide (8 GPUs and 8 ConnectX-7 of 400 Gb/s per node). nvidia-smi: 81559 MiB and
# 143771 MiB. A DGX H100 or H200 has 2 TB of system memory.
_H100 = GpuSpec(
    name="H100 SXM",
    memory=81559 * 2**20 - DRIVER,
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
    "h200": replace(_H100, name="H200 SXM", memory=143771 * 2**20 - DRIVER, bandwidth=4.8e12),
    # NVIDIA GB300 NVL72 product page: 72 GPUs in one NVLink 5 domain (1.8 TB/s both ways each), 4 GPUs per compute
    # tray, 279 GB of HBM3e each as sold (20 TB per rack), 8 TB/s, NVLink-C2C of 900 GB/s both ways per Grace (two
    # GPUs) and 17 TB of LPDDR5X per rack (18 trays), ConnectX-8 of 800 Gb/s, 180 PFLOP/s dense bf16 per rack.
    "gb300": GpuSpec(
        name="GB300 NVL72",
        memory=int(279e9) - DRIVER,
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
    """The hardware that a plan assumes for a run, from section `cluster` of its configuration."""

    gpu: GpuSpec | None
    """Specifications of the GPU type; None if the configuration does not name it."""
    memory: int | None
    """Memory of one GPU in bytes; None if unknown."""
    per_node: int
    """Number of GPUs per node."""
    nodes: int | None
    """Number of available nodes; None: as many as the run needs."""
    host_memory: int | None
    """Host memory per node in bytes; None if unknown."""

    @property
    def domain(self) -> int:
        """Number of GPUs in an NVLink domain, which may span several nodes."""
        if self.gpu is None:
            return self.per_node
        return max(self.per_node, self.gpu.domain)


def nodes_known(cluster: Cluster, device: str) -> bool:
    """Returns True if the configuration determines the number of ranks per node. `device`: "cpu" or "cuda", the device
    on which the ranks run."""
    return device == "cuda" and bool(cluster.gpu or cluster.gpus_per_node)


def machine_of(cluster: Cluster) -> Machine:
    """Returns the hardware that section `cluster` describes."""
    gpu = None
    memory = None
    host_memory = None
    per_node = cluster.gpus_per_node or 8
    if cluster.gpu:
        gpu = GPUS[cluster.gpu]
        memory = gpu.memory
        per_node = cluster.gpus_per_node or gpu.per_node
        host_memory = gpu.host_memory * per_node // gpu.per_node
    if cluster.gpu_memory_gib:
        memory = int(cluster.gpu_memory_gib * GIB)
    if cluster.host_memory_gib:
        host_memory = int(cluster.host_memory_gib * GIB)
    return Machine(gpu=gpu, memory=memory, per_node=per_node, nodes=cluster.nodes, host_memory=host_memory)
