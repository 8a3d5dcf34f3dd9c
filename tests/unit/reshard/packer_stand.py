"""Packing of all ranks of a trainer in one process, and the proof of every byte of what they packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.pack.packer import Packer, describe
from slimx.reshard.pack.pieces import compact, pieces_of, spread
from slimx.reshard.packed import PackedBucket
from slimx.reshard.plan.copy_plan import Plan
from tests import reshard_reference as reference
from tests.unit.layout.layout_stand import (
    MODELS,
    Tensors,
)

HUGE = 2**40
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8, "float8_e4m3fn": torch.uint8}
"""Codes are compared as bytes."""


class Values:
    """A number for every element of a numbered checkpoint; element 0 is the padding's 0."""

    def __init__(self, count: int = 200_000):
        self._values = torch.randn(count, generator=torch.Generator().manual_seed(1))
        self._values[0] = 0

    def dress(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """Replaces numbers by values in `dtype`; router biases are fp32 in every model."""
        return {n: self._values[t].to(torch.float32 if is_bias(n) else dtype) for n, t in tensors.items()}


def is_bias(name: str) -> bool:
    return name.endswith(("expert_bias", "e_score_correction_bias"))


VALUES = Values()


def pack_all(plan: Plan, trainers: list[Tensors]) -> Iterable[tuple[PackedBucket, torch.Tensor]]:
    """Packs all ranks into one memory, bucket by bucket."""
    packers = [Packer(plan, rank, tensors) for rank, tensors in enumerate(trainers)]
    for bucket in range(plan.count):
        form = packers[0].form(bucket)
        memory = torch.zeros(form.size, dtype=torch.uint8)
        yield describe(form, ["/a/path"], [packer.pack(bucket, memory) for packer in packers]), memory


def assert_packed(plan: Plan, trainers: list[Tensors], expected: list[Tensors]) -> None:
    """Asserts every byte of every bucket: tensors at their offsets, zeros between them, and checksums."""
    seen: list[dict[str, torch.Tensor]] = [{} for _ in expected]
    for packed, memory in pack_all(plan, trainers):
        left = memory.clone()
        assert packed.size == len(memory) and packed.path == "/a/path" and len(packed.targets) == plan.targets
        for target, tensors in enumerate(packed.targets):
            assert not tensors or tensors[0].offset % 4096 == 0, "an engine rank maps its own pages"
            for t in tensors:
                raw = memory[t.offset : t.offset + t.nbytes]
                tensor = expected[target][t.name]
                assert raw.view(DTYPES[t.dtype]).view(t.shape).equal(tensor), t.name
                assert t.checksum == reference.checksum(tensor), t.name
                left[t.offset : t.offset + t.nbytes] = 0
                seen[target][t.name] = raw
        assert not left.any(), "something is written between the tensors"
    assert [tensors.keys() for tensors in seen] == [tensors.keys() for tensors in expected]


def assert_runs_give_the_same(plan: Plan, trainers: list[Tensors]) -> None:
    """Asserts that the run of a remote rank lands where the rank would have written itself."""
    for bucket, (_, memory) in enumerate(pack_all(plan, trainers)):
        again = torch.zeros_like(memory)
        for rank, tensors in enumerate(trainers):
            packer = Packer(plan, rank, tensors)
            form = packer.form(bucket)
            run, share = packer.pack_run(bucket)
            pieces = pieces_of(plan, plan.moves_of(rank, bucket), form, None)
            assert compact(pieces)[1] == len(run)
            kernel.pack(spread(pieces, run), again, np.zeros(1, np.uint64))
            packed = packer.pack(bucket, torch.zeros_like(memory))
            assert np.array_equal(packed.sums, share.sums) and np.array_equal(packed.flags, share.flags)
        assert again.equal(memory)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: waking another for each tiny bucket costs more than packing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


WIDE = MODELS["deepseek"].hf | {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
"""Dimensions of whole blocks of 128 for two ranks; kv_b_proj ends with half a block of columns."""
