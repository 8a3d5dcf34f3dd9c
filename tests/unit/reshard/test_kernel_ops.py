"""The kernels as an operator of torch: it says what it writes, and gives the kernels' bytes when compiled."""

import random

import numpy as np
import pytest
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import ops
from slimx.reshard.kernels.cpu import NONFINITE, OP, RULE
from tests.unit.reshard.kernel_stand import Plan, Tensor, plan, random_weights

Arguments = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def arguments(seed: int = 0) -> tuple[Plan, Arguments]:
    rng = random.Random(seed)
    x = random_weights((40, 70), torch.bfloat16, rng)
    x[0, 0] = torch.inf
    tensors = [
        Tensor(OP.QUANTISE_FP8, x, torch.uint8, RULE.UE8M0, (16, 16)),
        Tensor(OP.COPY_CHECKED, x[1:].clone(), x.dtype),
    ]
    made = plan(tensors, rng)
    sums = torch.from_numpy(made.sums().view(np.int64))
    bucket, flags = torch.zeros(made.nbytes, dtype=torch.uint8), torch.zeros(len(sums), dtype=torch.int32)
    return made, (made.memory, ops.record_bytes(made.pieces), bucket, sums, flags)


def expected(made: Plan) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    bucket, sums, flags = (
        torch.zeros(made.nbytes, dtype=torch.uint8),
        made.sums(),
        np.zeros(len(made.places), np.uint32),
    )
    kernel.pack(made.pieces, bucket, sums, flags)
    assert flags.tolist() == [NONFINITE, 0, 0]
    return bucket, sums, flags


def test_opcheck() -> None:
    _, args = arguments()
    torch.library.opcheck(torch.ops.slimx.pack.default, args)


def test_the_operator_packs_what_the_kernel_packs() -> None:
    made, args = arguments()
    torch.ops.slimx.pack(*args)
    bucket, sums, flags = expected(made)
    assert torch.equal(args[2], bucket)
    assert args[3].numpy().view(np.uint64).tolist() == sums.tolist() and args[4].tolist() == flags.tolist()


def test_a_traced_program_keeps_its_effects() -> None:
    def program(sources, pieces, bucket, sums, flags):
        torch.ops.slimx.pack(sources, pieces, bucket, sums, flags)
        return bucket.sum(), sums * 1

    made, args = arguments()
    total, sums = torch.compile(program, backend="aot_eager", fullgraph=True)(*args)
    bucket, expected_sums, _ = expected(made)
    assert int(total) == int(bucket.sum()) and torch.equal(args[2], bucket)
    assert sums.numpy().view(np.uint64).tolist() == expected_sums.tolist()


def test_wrong_arguments_are_refused() -> None:
    _, (sources, pieces, bucket, sums, flags) = arguments()
    for wrong, message in [
        ((sources, pieces.view(-1), bucket, sums, flags), r"uint8 \[n, 128\]"),
        ((sources, pieces, bucket, sums, flags[:1]), "of one length"),
        ((sources, pieces, bucket, sums.int(), flags), "of one length"),
    ]:
        with pytest.raises(SlimxError, match=message):
            torch.ops.slimx.pack(*wrong)
    assert not bucket.any()
