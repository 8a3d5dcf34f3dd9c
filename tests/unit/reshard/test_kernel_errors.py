"""What the kernels cannot do is refused in one sentence, before anything is written."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE
from tests.refusals import refused
from tests.unit.reshard.kernel_stand import Tensor, plan


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dst": 93}, "kernel.outside"),
        ({"dst": 2**64 - 8}, "kernel.outside"),
        ({"rows": 20}, "kernel.outside"),
        ({"rows": 2**62 + 1, "dst_ld": 8, "pos_ld": 8}, "kernel.outside"),  # the product wraps round to 8
        ({"cols": 2**62, "rows": 1}, "kernel.outside"),
        ({"dst_ld": 7}, "kernel.overlap"),
        ({"pos_ld": 7}, "kernel.rows"),
        ({"rows": -1}, "kernel.extent"),
        ({"tensor": 2}, "kernel.sum"),
        ({"tensor": -1}, "kernel.sum"),
        ({"src": 0}, "kernel.source"),
        ({"reserved": 1}, "kernel.reserved"),
        ({"src_step": 0}, "kernel.source_overlap"),
        ({"item": 0, "out": 0}, "kernel.item"),
        ({"op": 9}, "kernel.form"),
        ({"out": 2}, "kernel.form"),
        ({"op": OP.COPY_CHECKED}, "kernel.form"),
        ({"rule": RULE.IEEE}, "kernel.rule"),
        ({"block_rows": 1, "block_cols": 1}, "kernel.blocks"),
        ({"scale_tensor": 0}, "kernel.scale_sum"),
    ],
)
def test_a_wrong_piece_is_refused_by_name_before_anything_is_written(change: dict[str, int], code: str) -> None:
    source = torch.ones(4, 8, dtype=torch.uint8)
    record = kernel.rectangle(source, tensor=1, pos=0, pos_ld=8, dst=0)
    pieces = np.array([record, record], PIECE)
    for field, value in change.items():
        pieces[1][field] = value
    bucket, sums = torch.zeros(100, dtype=torch.uint8), np.zeros(2, dtype=np.uint64)
    with refused(code, about="1"):
        kernel.pack(pieces, bucket, sums)
    assert not bucket.any() and not sums.any()


INT4 = {"op": OP.QUANTIZE_INT4, "rule": RULE.INT4, "block_rows": 1, "block_cols": 32}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"block_cols": 0}, "kernel.blocks"),
        ({"op": OP.QUANTIZE_MXFP8, "rule": RULE.MXFP8}, "kernel.mxfp8_blocks"),
        ({"op": OP.QUANTIZE_INT4, "rule": RULE.INT4}, "kernel.int4_blocks"),
        (INT4, "kernel.int4_groups"),
        (INT4 | {"cols": 64, "src_ld": 128}, "kernel.rows"),
        ({"rule": RULE.MXFP8}, "kernel.rule"),
        ({"rule": RULE.NONE}, "kernel.rule"),
        ({"rule": RULE.TRITON, "item": 4, "src_step": 4}, "kernel.triton_item"),
        ({"scale_tensor": 2}, "kernel.scale_sum"),
        ({"scale_tensor": -1}, "kernel.scale_sum"),
        ({"scale": 200 - 12}, "kernel.outside"),
        ({"scale": 2**64 - 4}, "kernel.outside"),
        ({"scale_ld": 4}, "kernel.overlap"),
        ({"scale_pos_ld": 4}, "kernel.scale_rows"),
        ({"scale": 130}, "kernel.alignment"),
        ({"src_ld": 17}, "kernel.alignment"),
    ],
)
def test_a_wrong_quantizing_piece_is_refused(change: dict[str, int], code: str) -> None:
    source = torch.ones(4, 8, dtype=torch.bfloat16)
    pieces = plan(
        [Tensor(OP.QUANTIZE_FP8, source, torch.uint8, RULE.IEEE, (2, 4))], random.Random(0), whole=True
    ).pieces
    kernel.pack(pieces, torch.zeros(200, dtype=torch.uint8), np.zeros(2, np.uint64))
    for field, value in change.items():
        pieces[0][field] = value
    bucket, sums = torch.zeros(200, dtype=torch.uint8), np.zeros(2, dtype=np.uint64)
    with refused(code, about="0"):
        kernel.pack(pieces, bucket, sums)
    assert not bucket.any() and not sums.any()


def test_dequantizing_needs_an_address_of_scales() -> None:
    codes = torch.ones(4, 8, dtype=torch.uint8)
    t = Tensor(OP.DEQUANTIZE_FP8, codes, torch.bfloat16, block=(2, 4), scales=torch.ones(2, 2))
    pieces = plan([t], random.Random(0), whole=True).pieces
    pieces["scale"] = 0
    with refused("kernel.scale_source", about="0"):
        kernel.pack(pieces, torch.zeros(300, dtype=torch.uint8), np.zeros(1, np.uint64))


def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name() -> None:
    tensors = [Tensor(OP.COPY_CHECKED, torch.ones(2, 3, dtype=torch.bfloat16), torch.bfloat16) for _ in range(3)]
    tensors[1].source[1, 2] = torch.nan
    made = plan(tensors, random.Random(0))
    bucket, names = torch.zeros(made.nbytes, dtype=torch.uint8), ["norm", "router", "bias"]
    with refused("kernel.nonfinite", about="router"):
        kernel.pack(made.pieces, bucket, made.sums(), names=names)
    with refused("kernel.nonfinite", about="tensor 1"):
        kernel.pack(made.pieces, bucket, made.sums())
    flags = np.zeros(3, np.uint32)
    kernel.pack(made.pieces, bucket, made.sums(), flags)  # for the caller to pass on
    assert flags.tolist() == [0, kernel.NONFINITE, 0]


def test_the_rule_triton_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.ones(4, 8, dtype=torch.bfloat16)
    made = plan([Tensor(OP.QUANTIZE_FP8, source, torch.uint8, RULE.TRITON, (2, 4))], random.Random(0), whole=True)
    bucket = torch.zeros(made.nbytes, dtype=torch.uint8)
    for number, (content, code) in enumerate(
        [
            (None, "kernel.no_table"),
            (np.ones((5, 2)), "kernel.table_form"),
            (np.ones((0x7F80, 2), np.float32), "kernel.table"),
        ]
    ):
        path = tmp_path / f"{number}.npy"
        monkeypatch.setattr(kernel, "TRITON_SCALES", path)
        if content is not None:
            np.save(path, content)
        with refused(code, about=str(path)):
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
    for wrong, code, about in [
        (lambda: kernel.pack(pieces, bucket.float(), sums), "kernel.bucket", "bucket"),
        (lambda: kernel.pack(pieces, bucket[::2], sums), "kernel.bucket", "bucket"),
        (lambda: kernel.pack(pieces, bucket.to("meta"), sums), "kernel.bucket", "bucket"),
        (lambda: kernel.pack(pieces.view(np.uint8), bucket, sums), "kernel.pieces", "pieces"),
        (lambda: kernel.pack(pieces, bucket, sums.astype(np.int64)), "kernel.sums", "sums"),
        (lambda: kernel.pack(pieces, bucket, sums, np.zeros(2, np.uint32)), "kernel.flags", "flags"),
        (lambda: kernel.pack(pieces, bucket, sums, np.zeros(1, np.int32)), "kernel.flags", "flags"),
        (lambda: kernel.pack(pieces, bucket, sums, isa="neon"), "kernel.isa", "neon"),
        (lambda: kernel.pack(pieces, bucket, sums, threads=0), "kernel.threads", "0"),
        (lambda: kernel.checksum_tensor(bucket.to("meta")), "kernel.view", "[8]"),
    ]:
        with refused(code, about=about):
            wrong()
    assert not bucket.any() and not sums.any()


def test_a_missing_broken_or_stale_library_says_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    other = Path(np._core._multiarray_umath.__file__)  # loads, but is not ours
    for path, code in ((tmp_path / "gone.so", "missing"), (broken, "broken"), (other, "stale")):
        with refused(f"library.{code}", about=str(path)):
            kernel.load(path)
