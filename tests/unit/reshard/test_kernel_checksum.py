"""The checksum keeps its promises: the same for every way to sum it, another for every damage."""

import random

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE
from tests import reshard_reference as reference
from tests.refusals import refused
from tests.unit.reshard.kernel_stand import Tensor, plan, random_bits, random_weights


def test_checksum_is_the_same_for_every_order_and_split_and_bucket() -> None:
    t = random_bits((37, 53), torch.bfloat16, 0)
    for seed in range(20):
        rng = random.Random(seed)
        made = plan([Tensor(OP.COPY, t, t.dtype)], rng)
        source_sums, packed = made.sums(), made.sums()
        kernel.checksum_rects(made.pieces, source_sums)
        cut = rng.randrange(len(made.pieces) + 1)
        for pieces in (made.pieces[:cut], made.pieces[cut:]):  # two buckets
            kernel.pack(pieces, torch.zeros(made.nbytes, dtype=torch.uint8), packed)
        assert int(source_sums[0]) == int(packed[0]) == reference.checksum(t)


@pytest.mark.parametrize("rule", [RULE.IEEE, RULE.MXFP8])
def test_every_flipped_byte_of_codes_and_scales_is_detected_in_the_bucket(rule: RULE) -> None:
    """As a receiver looks: at the raw bytes in staging, against what the packing ranks summed."""
    x = random_weights((5, 70), torch.bfloat16, random.Random(0))
    op, block = (OP.QUANTIZE_MXFP8, (1, 32)) if rule == RULE.MXFP8 else (OP.QUANTIZE_FP8, (2, 16))
    made = plan([Tensor(op, x, torch.uint8, rule, block)], random.Random(0))
    bucket, packed = torch.zeros(made.nbytes, dtype=torch.uint8), made.sums()
    kernel.pack(made.pieces, bucket, packed)
    received = np.array(
        [
            kernel.rectangle(bucket[at : at + nbytes], tensor=k, pos=0, pos_ld=nbytes)
            for k, (at, nbytes) in enumerate(made.places)
        ],
        dtype=PIECE,
    )

    def sums() -> list[int]:
        out = made.sums()
        kernel.checksum_rects(received, out, threads=1)
        return out.tolist()

    assert sums() == packed.tolist()
    for k, (at, nbytes) in enumerate(made.places):
        for position in range(at, at + nbytes):
            bucket[position] ^= 1 << position % 8
            found = sums()
            assert found[k] != packed[k] and found[1 - k] == packed[1 - k], (k, position)
            bucket[position] ^= 1 << position % 8


def test_checksums_of_parts_of_different_ranks_add_up() -> None:
    t = random_bits((16, 33), torch.bfloat16, 0)  # odd columns: ranks share words
    whole = kernel.seeds([t.numel() * 2])
    for columns in t.split(11, dim=1):
        part = columns.contiguous()
        start = columns.data_ptr() - t.data_ptr()
        mine = np.zeros(1, dtype=np.uint64)
        kernel.checksum_rects(np.array([kernel.rectangle(part, tensor=0, pos=start, pos_ld=66)], PIECE), mine)
        whole += mine
    assert int(whole[0]) == reference.checksum(t)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 5, 63, 64, 65, 1027])
def test_checksum_is_that_of_zero_padded_words(nbytes: int) -> None:
    t = random_bits((nbytes,), torch.uint8, nbytes)
    assert kernel.checksum_tensor(t) == reference.checksum(t)
    share = reference.share(reference.tensor_bytes(t), 0)
    assert (reference.seed(nbytes) + share) & reference.MASK == reference.checksum(t)


def test_checksum_takes_a_tensor_in_any_storable_layout() -> None:
    t = random_bits((6, 10), torch.bfloat16, 0)
    assert kernel.checksum_tensor(t[:, 3:8]) == reference.checksum(t[:, 3:8])
    assert kernel.checksum_tensor(t[::2]) == reference.checksum(t[::2])
    assert kernel.checksum_tensor(t[0].expand(4, 10)) == reference.checksum(t[0].expand(4, 10))
    assert kernel.checksum_tensor(t.view(2, 3, 10)) == reference.checksum(t)
    assert kernel.checksum_tensor(t[0, 0]) == reference.checksum(t[0, 0])
    assert kernel.checksum_tensor(t.T) == reference.checksum(t.T)
    assert kernel.checksum_tensor(t[:, ::3]) == reference.checksum(t[:, ::3])
    with refused("kernel.view", about="[2, 3, 5]"):
        kernel.checksum_tensor(t.view(2, 3, 10)[:, :, ::2])


def test_every_changed_byte_is_detected() -> None:
    data = random_bits((37,), torch.uint8, 0)
    for position in range(len(data)):
        values = set()
        for value in range(256):
            data[position] = value
            values.add(kernel.checksum_tensor(data, threads=1))
        assert len(values) == 256, position  # each value is told from all others


@pytest.mark.parametrize("isa", kernel.isas())
def test_every_flipped_bit_is_detected(isa: str) -> None:
    data = random_bits((149,), torch.uint8, 0)  # all of a vector loop and its remainder
    original = kernel.checksum_tensor(data, isa=isa)
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert kernel.checksum_tensor(data, isa=isa, threads=1) != original, (position, bit)
            data[position] ^= 1 << bit


def test_random_damage_is_detected_in_a_large_tensor() -> None:
    data = random_bits((1_000_003,), torch.uint8, 0)
    original, rng = kernel.checksum_tensor(data), random.Random(0)
    for _ in range(100):
        position, change = rng.randrange(len(data)), rng.randrange(1, 256)
        data[position] ^= change
        assert kernel.checksum_tensor(data) != original
        data[position] ^= change
    assert kernel.checksum_tensor(data) == original


def test_exchanged_words_are_detected() -> None:
    words = torch.arange(48, dtype=torch.int32)
    original = kernel.checksum_tensor(words)
    for i in range(48):
        for j in range(i):
            swapped = words.clone()
            swapped[[i, j]] = words[[j, i]]
            assert kernel.checksum_tensor(swapped) != original, (i, j)


def test_multipliers_are_odd_and_all_different() -> None:
    for start in (0, 2**31 - 2**16, 2**32 - 2**16):  # around the places where they could repeat
        values = reference.multipliers(start + np.arange(2**17))
        assert (values % 2 == 1).all()
        assert len(np.unique(values)) == len(values)


def test_evenly_spaced_changes_do_not_cancel() -> None:
    """A multiplier affine in the position would miss these: +d, -2d, +d, and exchanged rows of equal sum."""
    for step in range(1, 100):
        words = torch.zeros(1 + 2 * step, dtype=torch.int32)
        zeros = kernel.checksum_tensor(words)
        words[0], words[step], words[2 * step] = 5, -10, 5
        assert kernel.checksum_tensor(words) != zeros, step
    rows = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=torch.int32)
    assert kernel.checksum_tensor(rows) != kernel.checksum_tensor(rows.flip(0))


def test_zeros_of_different_sizes_differ() -> None:
    seen = {kernel.checksum_tensor(torch.zeros(n, dtype=torch.uint8)) for n in range(200)}
    assert len(seen) == 200 and 0 not in seen
