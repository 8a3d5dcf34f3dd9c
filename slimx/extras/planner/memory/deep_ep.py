"""Memory of DeepEP's buffers, which a process keeps from its first batch until it exits.

Formulas: `get_nvl_buffer_size_hint`, `get_rdma_buffer_size_hint` and `get_low_latency_rdma_size_hint` in DeepEP's
`csrc/config.hpp`. The buffers are created by megatron-core 0.19.2 in `transformer/moe/fused_a2a.py` and by SGLang
0.5.23 in `srt/layers/moe/token_dispatcher/deepep.py`."""

from __future__ import annotations

from slimx.config.sections.engines import Engines
from slimx.config.sections.trainer import Trainer
from slimx.layout.kernels import DEEP_EP_NODE
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec

CHANNELS = 20 // 2
"""Number of channels: half of the streaming multiprocessors (SMs) that send. Both megatron-core and SGLang use 20 SMs
by default."""
META = 8 + 128 * 8 + 128 * 4 + 128 * 4
"""Bytes of metadata sent with the hidden state of a token (a row): its source, and indices (int64), weights and scales
for up to 128 experts."""
NVL_ROWS = {16: 288, 24: 288, 32: 288, 48: 288, 64: 288, 96: 480, 128: 560, 144: 720, 160: 720}
"""Number of rows (tokens) buffered for a rank on the same node, by number of ranks (256 rows for numbers that are not
listed), from `get_dispatch_config` in `deep_ep/buffers/legacy.py` of sgl-deep-ep 0.1.2."""
RDMA_ROWS = 128
"""Number of rows (tokens) buffered for another node, before rounding up to complete chunks."""
RDMA_CHUNK = {16: 20, 96: 12, 128: 12, 144: 12, 160: 12}
"""Number of rows (tokens) in a chunk that is sent to another node, by number of ranks (8 rows for numbers that are not
listed): the larger of the sizes for dispatch and combine."""
LOW_LATENCY_TOKENS = 128
"""Default value of SGLang's environment variable SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK."""
BF16 = 2


def trainer_buffers(trainer: Trainer, spec: ModelSpec, sizes: Sizes, device: str) -> int:
    """Returns the size in bytes of DeepEP's buffers on a trainer rank; 0 if the flex dispatcher does not use DeepEP."""
    flex = trainer.moe.dispatcher == "flex" and trainer.moe.flex_backend == "deepep" and device == "cuda"
    ranks = sizes.expert * sizes.expert_tensor
    if not flex or not spec.experts or ranks == 1:
        return 0
    hidden = spec.transformer["hidden_size"]
    return nvl_buffer(hidden, ranks) + rdma_buffer(hidden, ranks)


def engine_buffers(group: Engines, spec: ModelSpec, sizes: EngineSizes) -> int:
    """Returns the size in bytes of DeepEP's buffers on an engine rank; 0 unless `moe_a2a_backend` is deepep. With
    deepep, experts are distributed over all ranks of a server."""
    if group.sglang.get("moe_a2a_backend") != "deepep" or not spec.experts:
        return 0
    mode = group.sglang.get("deepep_mode") or "auto"
    hidden = spec.transformer["hidden_size"]
    experts = spec.experts + (group.sglang.get("ep_num_redundant_experts") or 0)
    nvl = 0
    rdma = 0
    if mode != "low_latency":
        nvl = nvl_buffer(hidden, sizes.tensor)
        rdma = rdma_buffer(hidden, sizes.tensor)
    if mode != "normal":
        rdma = max(rdma, low_latency_buffer(hidden, experts))
    return nvl + rdma


def nvl_buffer(hidden: int, ranks: int) -> int:
    """Returns the size in bytes of the NVLink buffer, for communication between ranks on the same node. `hidden`:
    hidden size; `ranks`: number of expert-parallel ranks."""
    ranks_per_node = min(ranks, DEEP_EP_NODE)
    nodes = max(1, ranks // DEEP_EP_NODE)
    rows = NVL_ROWS.get(ranks, 256)
    return _aligned(CHANNELS * ranks_per_node * ((2 * nodes + 3) * 4 + rows * (hidden * BF16 + META)))


def rdma_buffer(hidden: int, ranks: int) -> int:
    """Returns the size in bytes of the RDMA buffer, for communication with ranks on other nodes. `hidden`: hidden size;
    `ranks`: number of expert-parallel ranks."""
    if ranks <= DEEP_EP_NODE:
        return 0
    chunk = RDMA_CHUNK.get(ranks, 8)
    rows = -(-RDMA_ROWS // chunk) * chunk
    row = hidden * BF16 + META + 16
    return _aligned(CHANNELS * (ranks // DEEP_EP_NODE) * 2 * ((DEEP_EP_NODE * 2 + 2) * 4 + rows * row))


def low_latency_buffer(hidden: int, experts: int) -> int:
    """Returns the size in bytes of SGLang's low-latency buffer for decode batches, which has two rows per token and
    expert for sending, and two for receiving."""
    combined = hidden // 128 * 4 + hidden * BF16
    dispatched = 16 + hidden * BF16
    rows = 2 * experts * LOW_LATENCY_TOKENS
    return rows * combined + rows * max(dispatched, combined) + 2 * _aligned(experts * 4)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128
