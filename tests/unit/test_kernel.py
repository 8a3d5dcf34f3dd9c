"""The reshard kernels hold to their reference, and their checksum to its promises."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.errors import SlimxError
from slimx.reshard import kernel, reference

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32]  # 1, 2 and 4 bytes
DESTINATION = 64  # byte offset of the first tensor in a bucket


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits: NaN payloads and all."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    rows = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return rows.view(dtype)


def split(rng: random.Random, rows: int, cols: int) -> list[tuple[slice, slice]]:
    """Random rectangles that cover [rows, cols], shuffled."""
    parts, todo = [], [(0, rows, 0, cols)]
    while todo:
        r0, r1, c0, c1 = todo.pop()
        if (r1 - r0) * (c1 - c0) <= 1 or rng.random() < 0.25:
            parts.append((slice(r0, r1), slice(c0, c1)))
        elif (rng.random() < 0.5 and r1 - r0 > 1) or c1 - c0 == 1:
            cut = rng.randrange(r0 + 1, r1)
            todo += [(r0, cut, c0, c1), (cut, r1, c0, c1)]
        else:
            cut = rng.randrange(c0 + 1, c1)
            todo += [(r0, r1, c0, cut), (r0, r1, cut, c1)]
    rng.shuffle(parts)
    return parts


def strided(part: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values as a view into a larger, misaligned buffer."""
    rows, cols = part.shape
    ld, start = cols + rng.randrange(5), rng.randrange(5)
    memory = torch.zeros(start + rows * ld, dtype=part.dtype)
    view = memory.as_strided((rows, cols), (ld, 1), start)
    view.copy_(part)
    return view


def plan(tensors: list[torch.Tensor], rng: random.Random) -> tuple[np.ndarray, list[torch.Tensor], list[int], int]:
    """Shuffled pieces of all tensors from strided sources, the sources, each tensor's offset, and the bucket's size."""
    records, sources, offsets, end = [], [], [], DESTINATION
    for t, whole in enumerate(tensors):
        size = whole.element_size()
        offsets.append(end)
        for rows, cols in split(rng, *whole.shape):
            view = strided(whole[rows, cols], rng)
            pos = (rows.start * whole.shape[1] + cols.start) * size
            record = kernel.rectangle(view, tensor=t, pos=pos, pos_ld=whole.shape[1] * size, dst=end + pos)
            records.append(record)
            sources.append(view)
        end += whole.numel() * size + rng.randrange(3) * size  # the next tensor may start at any element
    rng.shuffle(records)
    return np.array(records, dtype=kernel.PIECE), sources, offsets, end + 64


def random_tensors(seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    matrix, wide, tall = (rng.randint(1, 40), rng.randint(1, 60)), (3, rng.randint(200, 500)), (rng.randint(1, 9), 1)
    shapes = [(1, 1), matrix, wide, (0, 5), tall]
    return [random_tensor(shape, rng.choice(DTYPES), seed * 10 + k) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize("seed", range(12))
def test_pack_equals_the_reference_on_random_plans(seed: int) -> None:
    tensors = random_tensors(seed)
    pieces, sources, offsets, nbytes = plan(tensors, random.Random(seed))
    start = kernel.seeds([t.numel() * t.element_size() for t in tensors])

    expected, expected_sums = torch.full((nbytes,), 7, dtype=torch.uint8), start.copy()
    reference.pack(pieces, expected, expected_sums)
    for isa in kernel.isas():
        for threads in (1, 3):
            bucket, sums = torch.full((nbytes,), 7, dtype=torch.uint8), start.copy()
            kernel.pack(pieces, bucket, sums, isa=isa, threads=threads)
            assert torch.equal(bucket, expected), (isa, threads)  # also that nothing else was written
            assert sums.tolist() == expected_sums.tolist(), (isa, threads)

    for t, offset, total in zip(tensors, offsets, sums.tolist(), strict=True):
        data = reference.tensor_bytes(t)
        assert np.array_equal(bucket.numpy()[offset : offset + len(data)], data)
        assert total == reference.checksum(t) == kernel.checksum_tensor(t)
    assert sources  # alive until here


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_pieces_are_cut_into_tiles_without_a_trace(dtype: torch.dtype) -> None:
    wide = random_tensor((3, 300_001), dtype, 1)  # rows longer than a tile, at every alignment
    tall = random_tensor((1_503, 401), dtype, 2)  # more rows than fit a tile
    for t in (wide, tall):
        data, size, expected = reference.tensor_bytes(t), t.element_size(), reference.checksum(t)
        view = strided(t, random.Random(3))
        pieces = np.array([kernel.rectangle(view, tensor=0, pos=0, pos_ld=t.shape[1] * size, dst=size)], kernel.PIECE)
        for isa in kernel.isas():
            bucket, sums = torch.zeros(len(data) + 2 * size, dtype=torch.uint8), kernel.seeds([len(data)])
            kernel.pack(pieces, bucket, sums, isa=isa, threads=3)
            assert np.array_equal(bucket.numpy()[size:-size], data), isa
            assert int(sums[0]) == expected, isa
            assert kernel.checksum_tensor(view, isa=isa) == expected, isa


def test_checksum_is_the_same_for_every_order_and_split() -> None:
    t = random_tensor((37, 53), torch.bfloat16, 0)
    for seed in range(20):
        pieces, sources, _, _ = plan([t], random.Random(seed))
        sums = kernel.seeds([t.numel() * 2])
        kernel.checksum_rects(pieces, sums)
        assert int(sums[0]) == reference.checksum(t)
        assert sources


def test_checksums_of_parts_held_by_different_ranks_add_up() -> None:
    t = random_tensor((16, 33), torch.bfloat16, 0)  # odd columns: ranks share words
    whole = kernel.seeds([t.numel() * 2])
    for columns in t.split(11, dim=1):
        held = columns.contiguous()
        start = columns.data_ptr() - t.data_ptr()
        mine = np.zeros(1, dtype=np.uint64)
        kernel.checksum_rects(np.array([kernel.rectangle(held, tensor=0, pos=start, pos_ld=66)], kernel.PIECE), mine)
        whole += mine
    assert int(whole[0]) == reference.checksum(t)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 5, 63, 64, 65, 1027])
def test_checksum_is_that_of_zero_padded_words(nbytes: int) -> None:
    t = random_tensor((nbytes,), torch.uint8, nbytes)
    assert kernel.checksum_tensor(t) == reference.checksum(t)
    share = reference.share(reference.tensor_bytes(t), 0)
    assert (reference.seed(nbytes) + share) & reference.MASK == reference.checksum(t)


def test_checksum_takes_a_tensor_in_any_storable_layout() -> None:
    t = random_tensor((6, 10), torch.bfloat16, 0)
    assert kernel.checksum_tensor(t[:, 3:8]) == reference.checksum(t[:, 3:8])
    assert kernel.checksum_tensor(t[::2]) == reference.checksum(t[::2])
    assert kernel.checksum_tensor(t[0].expand(4, 10)) == reference.checksum(t[0].expand(4, 10))
    assert kernel.checksum_tensor(t.view(2, 3, 10)) == reference.checksum(t)
    assert kernel.checksum_tensor(t[0, 0]) == reference.checksum(t[0, 0])
    with pytest.raises(SlimxError, match="no rectangle"):
        kernel.checksum_tensor(t.T)


def test_every_changed_byte_is_detected() -> None:
    data = random_tensor((37,), torch.uint8, 0)
    for position in range(len(data)):
        values = set()
        for value in range(256):
            data[position] = value
            values.add(kernel.checksum_tensor(data, threads=1))
        assert len(values) == 256, position  # each value is told from all others


@pytest.mark.parametrize("isa", kernel.isas())
def test_every_flipped_bit_is_detected(isa: str) -> None:
    data = random_tensor((149,), torch.uint8, 0)  # all of a vector loop and its remainder
    original = kernel.checksum_tensor(data, isa=isa)
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert kernel.checksum_tensor(data, isa=isa, threads=1) != original, (position, bit)
            data[position] ^= 1 << bit


def test_random_damage_is_detected_in_a_large_tensor() -> None:
    data = random_tensor((1_000_003,), torch.uint8, 0)
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
    """What a multiplier affine in the position would miss: +d, -2d, +d, and exchanged rows of equal sum."""
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": 93}, "ends outside the bucket of 100 bytes"),
        ({"dst": 2**64 - 8}, "ends outside"),
        ({"rows": 20}, "ends outside"),
        ({"rows": 2**62 + 1, "dst_ld": 8, "pos_ld": 8}, "ends outside"),  # the product wraps round to 8
        ({"cols": 2**62, "rows": 1}, "ends outside"),
        ({"dst_ld": 7}, "overlap"),
        ({"pos_ld": 7}, "longer than its tensor's"),
        ({"rows": -1}, "negative"),
        ({"tensor": 2}, "outside the 2 sums"),
        ({"tensor": -1}, "outside the 2 sums"),
        ({"src": 0}, "no source address"),
        ({"reserved": 1}, "reserved"),
    ],
)
def test_a_wrong_piece_is_refused_by_name_before_anything_is_written(change: dict[str, int], message: str) -> None:
    source = torch.ones(4, 8, dtype=torch.uint8)
    record = kernel.rectangle(source, tensor=1, pos=0, pos_ld=8, dst=0)
    pieces = np.array([record, record], kernel.PIECE)
    for field, value in change.items():
        pieces[1][field] = value
    bucket, sums = torch.zeros(100, dtype=torch.uint8), np.zeros(2, dtype=np.uint64)
    with pytest.raises(SlimxError, match=f"piece 1 of 2 .*{message}"):
        kernel.pack(pieces, bucket, sums)
    assert not bucket.any() and not sums.any()


def test_a_piece_may_end_with_the_bucket() -> None:
    source = torch.ones(4, 8, dtype=torch.uint8)
    pieces = np.array([kernel.rectangle(source, tensor=0, pos=0, pos_ld=8, dst=68)], kernel.PIECE)
    bucket = torch.zeros(100, dtype=torch.uint8)
    kernel.pack(pieces, bucket, np.zeros(1, dtype=np.uint64))
    assert bucket[68:].all()
    empty = np.zeros(0, kernel.PIECE)
    kernel.pack(empty, bucket, np.zeros(0, dtype=np.uint64))


def test_wrong_arguments_are_refused() -> None:
    source, sums = torch.ones(8, dtype=torch.uint8), np.zeros(1, dtype=np.uint64)
    pieces = np.array([kernel.rectangle(source, tensor=0, pos=0, pos_ld=8)], kernel.PIECE)
    bucket = torch.zeros(8, dtype=torch.uint8)
    for wrong, message in [
        (lambda: kernel.pack(pieces, bucket.float(), sums), "bucket is torch.float32"),
        (lambda: kernel.pack(pieces, bucket[::2], sums), "contiguous"),
        (lambda: kernel.pack(pieces, bucket.to("meta"), sums), "meta"),
        (lambda: kernel.pack(pieces.view(np.uint8), bucket, sums), "kernel.PIECE"),
        (lambda: kernel.pack(pieces, bucket, sums.astype(np.int64)), "sums are int64"),
        (lambda: kernel.pack(pieces, bucket, sums, isa="neon"), "'neon'"),
        (lambda: kernel.pack(pieces, bucket, sums, threads=0), "0 threads"),
        (lambda: kernel.checksum_tensor(bucket.to("meta")), "no rectangle of CPU memory"),
    ]:
        with pytest.raises(SlimxError, match=message):
            wrong()
    assert not bucket.any() and not sums.any()


def test_a_missing_broken_or_stale_library_says_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    other = Path(np._core._multiarray_umath.__file__)  # loads, but is not ours
    for path, message in [(tmp_path / "gone.so", "is missing"), (broken, "cannot be loaded"), (other, "is stale")]:
        with pytest.raises(SlimxError, match=f"{path.name} {message}.*make build"):
            kernel.load(path)
