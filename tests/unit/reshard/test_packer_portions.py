"""A run goes to host memory through a bounded part of a GPU's, byte for byte as if it had been packed at once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.extras.families import deepseek_v3
from slimx.extras.low_precision import int4
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.extras.planner.memory.publication import packed_on_gpu
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import Sizes
from slimx.layout.table import checkpoint_parts
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.pack.packer import PORTION, Packer
from slimx.reshard.pack.pieces import compact, portions, spread
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from tests.unit.layout.layout_stand import Model, Tensors, checkpoint, trainer_shards
from tests.unit.reshard.cuda_stand import DEVICE, use_emulator
from tests.unit.reshard.packer_stand import HUGE, WIDE, Values, one_thread

RULES = {
    "bf16": None,
    "te": quantization("te", (128, 128)),
    "narrow": quantization("ieee", (16, 64)),
    "mxfp8": quantization("mxfp8", (1, 32)),
    "int4": int4.QUANTIZATION,
}


@pytest.fixture(autouse=True)
def single_threaded():
    with one_thread():
        yield


def plan_and_parameters(rule: str) -> tuple[Plan, Tensors]:
    """Returns one bucket of everything, and the parameters of the first of two ranks."""
    model = Model(WIDE, deepseek_v3.weight_table(WIDE))
    sizes, table = Sizes(tensor=2, data=1), int4.FORMAT.chosen(model.table) if rule == "int4" else model.table
    whole = checkpoint(model)
    values = Values(1 + max(int(tensor.max()) for tensor in whole.values()))
    precision = Precision("bfloat16", "bfloat16", RULES[rule])
    trainers, parts = MegatronLayout(model.table, sizes).parts(), list(checkpoint_parts(table))
    plan = compile_plan(trainers, parts, precision=precision, bucket_bytes=HUGE, ranks=1)
    return plan, values.dress(trainer_shards(model, sizes)[0], torch.bfloat16)


@pytest.mark.parametrize("limit", [1000, 2**14 + 8, 2**17, HUGE])
@pytest.mark.parametrize("rule", RULES)
def test_portions_are_bounded_and_cover_every_byte_of_a_run_once(rule, limit):
    plan, parameters = plan_and_parameters(rule)
    pieces = Packer(plan, 0, parameters)._records(0, 0)
    packed, size = compact(pieces)
    filled, rows = np.zeros(size, np.int64), 0
    for portion in portions(pieces, limit):
        rows += int((portion.pieces["rows"] * portion.pieces["cols"]).sum())
        blocks = portion.pieces["block_rows"].max(initial=1)
        assert portion.size <= limit or (len(portion.pieces) == 1 and portion.pieces["rows"][0] <= max(1, blocks))
        for start, place, nbytes in portion.copies:
            assert start + nbytes <= portion.size
            filled[place : place + nbytes] += 1
    assert rows == (pieces["rows"] * pieces["cols"]).sum() and filled.max() == 1
    padding = np.flatnonzero(filled == 0)
    written = np.zeros(size, bool)
    run = torch.zeros(size, dtype=torch.uint8)
    for copy in spread(pieces, run):
        first = int(copy["src"]) - run.data_ptr()
        written[first : first + int(copy["rows"] * copy["cols"])] = True
    assert not written[padding].any() and len(packed)


@pytest.mark.parametrize("limit", [3000, 2**16])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_in_portions_is_the_run_of_the_cpu_kernel(
    emulator_library: Path, monkeypatch: pytest.MonkeyPatch, rule: str, limit: int
):
    library: ctypes.CDLL = use_emulator(emulator_library, monkeypatch)
    library.emulator_seed(limit)
    plan, parameters = plan_and_parameters(rule)
    on_cpu, on_gpu = Packer(plan, 0, parameters), Packer(plan, 0, parameters, portion=limit)
    on_gpu._device = DEVICE
    form, pieces = on_cpu.form(0), on_cpu._records(0, 0)
    assert compact(pieces)[1] > 2 * limit
    memories, shares = [], []
    for packer in (on_cpu, on_gpu, on_gpu):
        run, share = packer.pack_run(0, torch.full((compact(pieces)[1] + 5,), 0xAA, dtype=torch.uint8))
        memories.append(torch.zeros(form.size, dtype=torch.uint8))
        kernel.pack(spread(pieces, run), memories[-1], np.zeros(1, np.uint64))
        shares.append(share)
    for memory, share in zip(memories[1:], shares[1:], strict=True):
        assert memory.equal(memories[0])
        assert np.array_equal(share.sums, shares[0].sums) and np.array_equal(share.flags, shares[0].flags)


def test_a_plan_counts_one_portion_of_the_gpus_memory():
    plan, _ = plan_and_parameters("bf16")
    whole = packed_on_gpu(plan, ranks=2)
    assert 0 < whole < PORTION == 256 * 2**20
    assert packed_on_gpu(plan, ranks=2, portion=1000) == 1000
