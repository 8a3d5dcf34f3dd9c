"""The link model: predicts the duration of a publication from the rates of links and the bytes of a compiled plan.

A stage takes (bytes of its busiest rank) / rate + calls x latency. Stages overlap as in the publisher
(`slimx.reshard.publish`): bucket i + 1 is packed while bucket i is transferred and checked.

    pack 0 | pack 1        | pack 2        |               | load all | verify all
           | move, check 0 | move, check 1 | move, check 2 |

Over links (`publish.transport: nixl`) bucket i + 1 is also transferred while bucket i is checked, and each link
proceeds independently. The bytes are divided among ranks as in a run (`direct_traffic`). With `publish.staging: bucket`
a bucket is loaded right after it is checked, and counts as checked then.

The model ignores contention between links and any other load on them. Its figures for unmeasured machines are therefore
shown only if its prediction for a measured machine is accurate (`LinkTrial`). `benchmarks/publish_direct.py` compares
it with links of a known rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from slimx.errors import SlimxError
from slimx.extras.direct.wire import move_bytes, summed
from slimx.layout.number_formats import ITEMSIZE
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan.copy_plan import Plan

TOLERANCE = 0.25
"""Maximum relative error in predicting measured publications; above it, predictions for other machines are not
shown."""
STEPS = 6
"""Number of calls to the engines per publication, in addition to the calls per bucket: begin, pause, load, verify,
commit and resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates and latencies of one rank and of the links between ranks. Rates are in bytes per second, latencies in
    seconds."""

    name: str
    pack: float
    """Rate at which the pack kernel reads parameters, in bytes/s."""
    link: float | None
    """Rate of transfers into or out of one rank, in bytes/s; None if sender and receiver map the same memory."""
    check: float
    """Rate at which staged bytes are read for the first time, to compute their checksums, in bytes/s."""
    copy: float
    """Rate of copying staged weights into parameters, in bytes/s."""
    verify: float
    """Rate at which parameters are read to compute their checksums, in bytes/s."""
    call: float
    """Latency of a kernel call or a copy, in seconds."""
    message: float
    """Latency of a message between ranks, in seconds."""
    control: float
    """Duration of one call to all trainer ranks or to all engines, in seconds."""
    cores: int | None = None
    """Number of processor cores that all ranks share; None if each rank has its own device."""
    domain: int | None = None
    """Maximum number of ranks that these links can connect; None: unlimited."""
    within: float | None = None
    """Rate at which the other ranks of its node together copy from a rank's memory, in bytes/s; None: not limited."""


def h100_infiniband() -> Links:
    """Returns the links of nodes with 8 H100 SXM and 8 x 400 Gb/s InfiniBand, one adapter per GPU.

    Public figures: 3.35 TB/s of memory per GPU (NVIDIA's H100 data sheet), eight 400 Gb/s ConnectX-7 per node (DGX H100
    user guide, "Network Modules"). Measured on one H100 (docs/benchmarks.md): a copy reaches 2.83 TB/s (reads and
    writes together), packing with checksums reaches 87% of a copy's rate, and a kernel launch takes 20 us on the host.
    NVLink: 450 GB/s per direction (NVIDIA's H100 data sheet). Assumed: 80% of it; 90% of the link rate because of RDMA
    headers; checksums at 85% of the 2.83 TB/s; 20 us per message; 8 ms per call to all ranks, as Ray and an SGLang
    server take on the CPU (docs/benchmarks.md: ten calls in 79 ms)."""
    name = "H100, 8 x 400 Gb/s InfiniBand per node"
    return _cluster(name, memory=2.83e12, pack=0.87, link=0.9 * 400e9 / 8, within=0.8 * 450e9, message=20e-6)


def gb300_nvlink() -> Links:
    """Returns the links of one GB300 NVL72: 72 GPUs in one NVLink domain.

    Public figures: 1.8 TB/s of NVLink 5 per GPU in both directions together, 130 TB/s per rack, and 8 TB/s of memory
    per GPU (NVIDIA's GB300 NVL72 product page and enterprise reference architecture). Assumed: 80% of the 900 GB/s in
    one direction, 90% of the memory rate; packing at 85% of a copy's rate; 10 us per message; all other rates and
    latencies as in `h100_infiniband`."""
    name = "GB300 NVL72, one NVLink domain"
    return _cluster(name, memory=0.9 * 8e12, pack=0.85, link=0.8 * 900e9, within=0.8 * 900e9, message=10e-6, domain=72)


def _cluster(
    name: str, *, memory: float, pack: float, link: float, within: float, message: float, domain: int | None = None
) -> Links:
    """Returns the links of ranks with one GPU each. `memory`: bandwidth of GPU memory, reads and writes together, in
    bytes/s. `pack`: rate of the pack kernel relative to that of a copy. The other parameters are fields of `Links`."""
    return Links(
        name=name,
        pack=pack * memory / 2,
        link=link,
        check=0.85 * memory,
        copy=memory / 2,
        verify=0.85 * memory,
        call=20e-6,
        message=message,
        control=8e-3,
        domain=domain,
        within=within,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes and messages of one publication to identical engines, by bucket and rank."""

    read: np.ndarray
    """Bytes of parameters that each trainer rank reads for each bucket, [buckets, sources]."""
    sent: np.ndarray
    """Bytes of each bucket that each trainer rank sends to all engines together, [buckets, sources]."""
    received: np.ndarray
    """Bytes of each bucket that each rank of one engine receives, [buckets, targets]."""
    sends: np.ndarray
    """Number of messages per bucket that each trainer rank sends to all engines together, [buckets, sources]."""
    receives: np.ndarray
    """Number of messages per bucket that each rank of one engine receives, [buckets, targets]."""
    tensors: int
    """Maximum number of tensors that an engine rank receives."""
    engine_ranks: int
    """Number of ranks of all engines together."""
    readers: int = 1
    """Number of engine ranks that read everything that one target receives."""
    loaded: int | None = None
    """Maximum number of bytes that an engine rank loads; None: all that it receives."""

    @property
    def buckets(self) -> int:
        return len(self.read)

    @property
    def sources(self) -> int:
        return self.read.shape[1]

    @property
    def ranks(self) -> int:
        """Total number of trainer and engine ranks."""
        return self.sources + self.engine_ranks


def traffic_of(plan: Plan, *, sources: int, engines: int, engine_ranks: int, encoding: Encoding) -> Traffic:
    """Returns the traffic of the publication `plan` if each trainer rank sends its moves (copies of parts of tensors)
    directly to each engine rank.

    `sources`: number of trainer ranks; `engines`: number of engines; `engine_ranks`: number of ranks per engine. With
    encoding "hf" every engine rank needs all bytes. A trainer rank then sends its bytes to only one rank of each
    engine, and the engine's ranks forward them to each other while receiving."""
    moved, targets = plan.moved, plan.targets
    elements = moved["rows"].astype(np.int64) * moved["cols"]
    bucket, source, target = moved["bucket"], moved["source"], moved["target"]
    read = summed((plan.count, sources), (bucket, source), elements * _itemsize_read(plan))
    wire = summed((plan.count, sources, targets), (bucket, source, target), move_bytes(plan))
    messages = wire > 0
    tensors = 0
    for target_buckets in plan.buckets:
        tensors = max(tensors, sum(len(part.tensors) for part in target_buckets))
    receivers = targets
    if encoding == "hf":
        receivers = engine_ranks
    return Traffic(
        read=read,
        sent=wire.sum(axis=2) * engines,
        received=wire.sum(axis=1),
        sends=messages.sum(axis=2) * engines,
        receives=messages.sum(axis=1),
        tensors=tensors,
        engine_ranks=engines * receivers,
    )


def direct_traffic(dealt: Plan, *, sources: int) -> Traffic:
    """Returns the traffic of a publication to all engines, whose bytes `slimx.extras.direct.dealing` has divided among
    `sources` trainer ranks in `dealt`, as in a run."""
    return traffic_of(dealt, sources=sources, engines=1, engine_ranks=dealt.targets, encoding="local")


def _itemsize_read(plan: Plan) -> np.ndarray:
    return np.array([ITEMSIZE[p.dtype] for p in plan.parameters], dtype=np.int64)[plan.moved["parameter"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Duration of one publication in seconds, in total and by stage."""

    pack: float
    """Seconds for packing all buckets. Gathering, conversion and packing take one kernel call per rank and bucket."""
    transfer: float
    check: float
    """Seconds for computing the checksums of staged bytes."""
    load: float
    verify: float
    """Seconds for computing the checksums of loaded parameters."""
    control: float
    """Seconds for calls to all ranks. The call that packs a bucket overlaps with the call that checks the previous
    bucket."""
    total: float
    """Duration of the publication in seconds. It is shorter than the sum of the stages, because packing overlaps with
    transfer and check."""


def predict(traffic: Traffic, links: Links, *, by_bucket: bool = False, copies: int = 0) -> Stages:
    """Returns the predicted duration of a publication with the traffic `traffic` on `links`, by stage. Raises
    SlimxError if the links cannot connect all ranks of the publication.

    `by_bucket`: True if engines load each bucket before the next one is checked (`publish.staging`). `copies`: number
    of copies of a bucket in an engine rank's memory between its arrival and its check."""
    if links.domain is not None and traffic.ranks > links.domain:
        raise SlimxError(
            f"a weight sync connects {traffic.ranks} ranks ({traffic.sources} of trainers, {traffic.engine_ranks} of "
            f"engines), but {links.name} can connect only {links.domain}; lower trainer.world_size, "
            "rollout.engines.count or rollout.engines.tensor",
            code="links.ranks",
            about=links.name,
        )
    packs = traffic.read / links.pack + (traffic.read > 0) * links.call
    checks = traffic.received * (1 / links.check + copies / links.copy) + (traffic.received > 0) * links.call
    if traffic.readers > 1 and links.within is not None:
        checks += traffic.received * (traffic.readers / links.within)
    pack = packs.max(axis=1)
    check = checks.max(axis=1)
    replicas = traffic.engine_ranks // traffic.received.shape[1]
    # If ranks share cores, overlapping stages take at least the sum of their core time.
    all_packs = _shared(packs.sum(axis=1), links.cores)
    all_checks = _shared((checks * replicas).sum(axis=1), links.cores)
    loaded_bytes = traffic.loaded
    if loaded_bytes is None:
        loaded_bytes = int(traffic.received.sum(axis=0).max())
    ranks_per_core = 1.0
    if links.cores:
        ranks_per_core = max(1.0, traffic.engine_ranks / links.cores)
    load = (loaded_bytes / links.copy + traffic.tensors * links.call) * ranks_per_core
    calls = 2
    loaded = np.zeros(traffic.buckets)
    if by_bucket:
        calls = 3
        loaded += load / traffic.buckets + links.control
    transfer = np.zeros(traffic.buckets)
    if links.link is None:
        # In time slot i bucket i is packed while bucket i - 1 is checked.
        alone = np.maximum(np.append(pack + links.control, 0), np.insert(check + loaded + links.control, 0, 0))
        staged = np.maximum(alone, np.append(all_packs, 0) + np.insert(all_checks, 0, 0)).sum()
    else:
        sending = traffic.sent / links.link + traffic.sends * links.message
        receiving = traffic.received / links.link + traffic.receives * links.message
        transfers = np.concatenate([sending, receiving], axis=1)
        transfer = transfers.max(axis=1)
        staged = _staged(pack + links.control, transfers, check + loaded + links.control)
    verify = (loaded_bytes / links.verify + links.call) * ranks_per_core
    total = float(staged + verify + STEPS * links.control)
    if not by_bucket:
        total += float(load)
    return Stages(
        pack=float(np.maximum(pack, all_packs).sum()),
        transfer=float(transfer.sum()),
        check=float(check.sum()),
        load=float(load),
        verify=float(verify),
        control=(calls * traffic.buckets + STEPS) * links.control,
        total=total,
    )


def _staged(pack: np.ndarray, transfer: np.ndarray, check: np.ndarray) -> float:
    """Returns the seconds until the last bucket has been checked. `pack` [buckets], `transfer` [buckets, links] and
    `check` [buckets]: seconds of each stage per bucket.

    A link starts transferring a bucket when the bucket is packed and the previous one has left the link. Packing of a
    bucket starts when the previous bucket is packed and the one before that is checked."""
    packed = 0.0
    checked = 0.0
    checked_before = 0.0
    free = np.zeros(transfer.shape[1])
    for index in range(len(pack)):
        packed = max(packed, checked_before) + pack[index]
        free = np.maximum(free, packed) + transfer[index]
        checked_before = checked
        checked = max(float(free.max()), checked) + check[index]
    return checked


def _shared(work: np.ndarray, cores: int | None) -> np.ndarray:
    if not cores:
        return np.zeros_like(work)
    return work / cores


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """Comparison of the link model with measured publications on one machine."""

    predicted: Sequence[float]
    """Predicted duration of each publication in seconds, based on rates that were measured immediately before it."""
    measured: Sequence[float]

    @property
    def off(self) -> float:
        """Relative error of the prediction: the median over the publications, positive if the predicted time is too
        long."""
        return median(p / m for p, m in zip(self.predicted, self.measured, strict=True)) - 1

    @property
    def holds(self) -> bool:
        return abs(self.off) <= TOLERANCE

    def __str__(self) -> str:
        return f"the prediction deviates by {self.off:+.0%} on this machine"
