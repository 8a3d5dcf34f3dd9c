"""Rules about training in fp8 that need to know the model."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.trainer import Trainer
from slimx.layout.maps import Rect, Shape
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Row
from slimx.models.families import ModelSpec
from slimx.reshard.plan.precision import RECIPES

FAMILIES = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures whose fp8 layers were held against publications (docs/support.md): all of their linear layers but
embedding, router and output layer are quantised, and none has a bias."""
LEAST = 16
"""Divisor of rows and columns of a matrix that tensor cores multiply in fp8 (Transformer Engine's
`assert_dim_for_fp8_exec`, and cuBLAS)."""


@rule("fp8.architecture", about="model.path")
def covers_model(trainer: Trainer, spec: ModelSpec) -> Iterator[Told]:
    if trainer.fp8 is None:
        return
    if spec.family.ARCHITECTURE not in FAMILIES:
        yield (
            f"trainer.fp8 covers {' and '.join(FAMILIES)}; {spec.path} is a {spec.family.ARCHITECTURE}: leave "
            "trainer.fp8 out"
        )
    elif spec.table.mtp_layers:
        key = "trainer.megatron.mtp_num_layers"
        yield key, f"{key} was never proven with trainer.fp8; leave out one of the two"


@rule("fp8.blocks", about="trainer.fp8")
def whole_blocks(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Iterator[Told]:
    """Blocks of a rank's matrix are those of the checkpoint's tensors, from which publications make theirs."""
    if trainer.fp8 is None or spec.family.ARCHITECTURE not in FAMILIES:
        return
    width, cut = RECIPES[trainer.fp8].width, trainer.fp8 == "blockwise"
    for row in spec.table.rows:
        if not row.quantised:
            continue
        ways = _ways(row, sizes)
        split = "trainer.expert_tensor" if row.per_expert else "trainer.tensor"
        name = row.name.removesuffix(".weight").split(".")[-1]
        if not _whole(row, 1, width, cut=cut):
            yield (
                f"trainer.fp8={trainer.fp8} has blocks of {width} rows and columns, and {name} of {spec.path} is made "
                "of pieces that they do not divide; leave trainer.fp8 out"
            )
        elif not _whole(row, ways, width, cut=cut):
            yield (
                split,
                f"trainer.fp8={trainer.fp8} has blocks of {width} rows and columns, and {split}={ways} would cut "
                f"{name} of {spec.path} inside one; set {split} lower",
            )
        else:
            continue
        return


def _ways(row: Row, sizes: Sizes) -> int:
    if row.axis is None:
        return 1
    return sizes.expert_tensor if row.per_expert else sizes.tensor


def _whole(row: Row, ways: int, width: int, *, cut: bool) -> bool:
    shapes = [matrix(shape) for _, shape in row.sources]
    local, rects = row.map.local(shapes, row.axis, 0, ways)
    return all(_aligned(rect, shapes[rect.source], local, width, cut=cut) for rect in rects)


def _aligned(rect: Rect, source: Shape, local: Shape, width: int, *, cut: bool) -> bool:
    """Returns True if blocks of the rectangle are blocks of both tensors. `cut`: also of those that a block does not
    divide, where both end."""
    axes = zip(
        (rect.row, rect.col), (rect.local_row, rect.local_col), (rect.rows, rect.cols), source, local, strict=True
    )
    return rect.step == 1 and all(
        at % width == here % width == 0
        and (size % width == 0 or (cut and size % LEAST == 0 and (at + size, here + size) == (whole, own)))
        for at, here, size, whole, own in axes
    )
