"""What the kernels cannot do is refused in one sentence, before anything is written."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.errors import SlimxError
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.cpu import OP, PIECE, RULE
from tests.unit.reshard.kernel_stand import Tensor, plan


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
        ({"src_step": 0}, "source elements that overlap"),
        ({"item": 0, "out": 0}, "0 bytes"),
        ({"op": 8}, "op 8.*|does not exist"),
        ({"out": 2}, "does not exist for its element sizes"),
        ({"op": OP.COPY_CHECKED}, "does not exist for its element sizes"),
        ({"rule": RULE.IEEE}, "rule that its op does not know"),
        ({"block_rows": 1, "block_cols": 1}, "blocks its op cannot use"),
        ({"scale_tensor": 0}, "scales outside the 2 sums"),
    ],
)
def test_a_wrong_piece_is_refused_by_name_before_anything_is_written(change: dict[str, int], message: str) -> None:
    source = torch.ones(4, 8, dtype=torch.uint8)
    record = kernel.rectangle(source, tensor=1, pos=0, pos_ld=8, dst=0)
    pieces = np.array([record, record], PIECE)
    for field, value in change.items():
        pieces[1][field] = value
    bucket, sums = torch.zeros(100, dtype=torch.uint8), np.zeros(2, dtype=np.uint64)
    with pytest.raises(SlimxError, match=f"piece 1 of 2 .*{message}"):
        kernel.pack(pieces, bucket, sums)
    assert not bucket.any() and not sums.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_cols": 0}, "blocks its op cannot use"),
        ({"op": OP.QUANTISE_MXFP8, "rule": RULE.MXFP8}, "blocks other than 1 x 32"),
        ({"rule": RULE.MXFP8}, "rule that its op does not know"),
        ({"rule": RULE.NONE}, "rule that its op does not know"),
        ({"rule": RULE.TRITON, "item": 4, "src_step": 4}, "defined for bf16"),
        ({"scale_tensor": 2}, "scales outside the 2 sums"),
        ({"scale_tensor": -1}, "scales outside the 2 sums"),
        ({"scale": 200 - 12}, "ends outside the bucket of 200 bytes"),
        ({"scale": 2**64 - 4}, "ends outside"),
        ({"scale_ld": 4}, "rows that overlap in the bucket"),
        ({"scale_pos_ld": 4}, "rows of scales longer"),
        ({"scale": 130}, "not aligned"),
        ({"src_ld": 17}, "not aligned"),
    ],
)
def test_a_wrong_quantising_piece_is_refused(change: dict[str, int], message: str) -> None:
    source = torch.ones(4, 8, dtype=torch.bfloat16)
    pieces = plan(
        [Tensor(OP.QUANTISE_FP8, source, torch.uint8, RULE.IEEE, (2, 4))], random.Random(0), whole=True
    ).pieces
    kernel.pack(pieces, torch.zeros(200, dtype=torch.uint8), np.zeros(2, np.uint64))
    for field, value in change.items():
        pieces[0][field] = value
    bucket, sums = torch.zeros(200, dtype=torch.uint8), np.zeros(2, dtype=np.uint64)
    with pytest.raises(SlimxError, match=message):
        kernel.pack(pieces, bucket, sums)
    assert not bucket.any() and not sums.any()


def test_dequantising_needs_an_address_of_scales() -> None:
    codes = torch.ones(4, 8, dtype=torch.uint8)
    t = Tensor(OP.DEQUANTISE_FP8, codes, torch.bfloat16, block=(2, 4), scales=torch.ones(2, 2))
    pieces = plan([t], random.Random(0), whole=True).pieces
    pieces["scale"] = 0
    with pytest.raises(SlimxError, match="no address of its scales"):
        kernel.pack(pieces, torch.zeros(300, dtype=torch.uint8), np.zeros(1, np.uint64))


def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name() -> None:
    tensors = [Tensor(OP.COPY_CHECKED, torch.ones(2, 3, dtype=torch.bfloat16), torch.bfloat16) for _ in range(3)]
    tensors[1].source[1, 2] = torch.nan
    made = plan(tensors, random.Random(0))
    bucket, names = torch.zeros(made.nbytes, dtype=torch.uint8), ["norm", "router", "bias"]
    with pytest.raises(SlimxError, match=r"^router holds a value .*\(1 such tensors\)"):
        kernel.pack(made.pieces, bucket, made.sums(), names=names)
    with pytest.raises(SlimxError, match="^tensor 1 holds"):
        kernel.pack(made.pieces, bucket, made.sums())
    flags = np.zeros(3, np.uint32)
    kernel.pack(made.pieces, bucket, made.sums(), flags)  # for the caller to pass on
    assert flags.tolist() == [0, kernel.NONFINITE, 0]


def test_the_rule_triton_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.ones(4, 8, dtype=torch.bfloat16)
    made = plan([Tensor(OP.QUANTISE_FP8, source, torch.uint8, RULE.TRITON, (2, 4))], random.Random(0), whole=True)
    bucket = torch.zeros(made.nbytes, dtype=torch.uint8)
    for content, message in [
        (None, "needs the table"),
        (np.ones((5, 2)), r"float64 \(5, 2\), no table"),
        (np.ones((0x7F80, 2), np.float32), "does not hold amax / 448"),
    ]:
        path = tmp_path / f"{message[:4]}.npy"
        monkeypatch.setattr(kernel, "TRITON_SCALES", path)
        if content is not None:
            np.save(path, content)
        with pytest.raises(SlimxError, match=f"{message}.*make gpu.*or choose the rule ieee"):
            kernel.pack(made.pieces, bucket, made.sums())
    assert not bucket.any()


def test_a_piece_may_end_with_the_bucket() -> None:
    source = torch.ones(4, 8, dtype=torch.uint8)
    pieces = np.array([kernel.rectangle(source, tensor=0, pos=0, pos_ld=8, dst=68)], PIECE)
    bucket = torch.zeros(100, dtype=torch.uint8)
    kernel.pack(pieces, bucket, np.zeros(1, dtype=np.uint64))
    assert bucket[68:].all()
    empty = np.zeros(0, PIECE)
    kernel.pack(empty, bucket, np.zeros(0, dtype=np.uint64))


def test_wrong_arguments_are_refused() -> None:
    source, sums = torch.ones(8, dtype=torch.uint8), np.zeros(1, dtype=np.uint64)
    pieces = np.array([kernel.rectangle(source, tensor=0, pos=0, pos_ld=8)], PIECE)
    bucket = torch.zeros(8, dtype=torch.uint8)
    for wrong, message in [
        (lambda: kernel.pack(pieces, bucket.float(), sums), "bucket is torch.float32"),
        (lambda: kernel.pack(pieces, bucket[::2], sums), "contiguous"),
        (lambda: kernel.pack(pieces, bucket.to("meta"), sums), "meta"),
        (lambda: kernel.pack(pieces.view(np.uint8), bucket, sums), "kernel.PIECE"),
        (lambda: kernel.pack(pieces, bucket, sums.astype(np.int64)), "sums are int64"),
        (lambda: kernel.pack(pieces, bucket, sums, np.zeros(2, np.uint32)), "one for each sum"),
        (lambda: kernel.pack(pieces, bucket, sums, np.zeros(1, np.int32)), "flags are int32"),
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
