"""Rules about fp8, INT4 and MXFP4, in training and in publications."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import Engines
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Cluster, Numerics
from slimx.config.sections.trainer import Trainer
from slimx.rules.unproven import found_in, other_architectures, sections_in

if TYPE_CHECKING:
    from slimx.layout.maps import Rect, Shape
    from slimx.layout.ranks import Sizes
    from slimx.layout.table import Row
    from slimx.models.families import ModelSpec

UNPROVEN = {
    "trainer.fp8": (
        "numerics.mode",
        "trainer.lora",
        "trainer.qat",
        "trainer.optimizer.kind",
        "trainer.optimizer.offload_fraction",
        "trainer.optimizer.moments_dtype",
        "trainer.grad_reduce_in_fp32",
        "trainer.overlap_param_gather",
        "trainer.freeze",
        "trainer.moe.dispatcher",
        "trainer.megatron.mtp_num_layers",
        "algorithm.teacher",
        "algorithm.loss=bradley_terry",
        "critic",
    ),
    "trainer.qat": (
        "trainer.lora",
        "publish.quantise=ieee",
        "publish.quantise=te",
        "publish.quantise=triton",
        "publish.quantise=ue8m0",
        "algorithm.teacher",
        "critic",
    ),
    "publish.quantise=int4": ("rollout.engines.sglang.speculative_algorithm (layers of multi-token prediction)",),
}
"""As `slimx.rules.unproven.UNPROVEN`."""
ARCHITECTURES = {"trainer.fp8": ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")}
"""As `slimx.rules.unproven.other_architectures`."""
ON = {"blockwise": ("h100", "h200"), "mxfp8": ("gb300",)}
"""GPUs (`cluster.gpu`) whose tensor cores take the blocks of a recipe as they are. Blackwell computes 128-wide blocks
as MXFP8, for which their scales would have to be powers of two."""
LEAST = 16
"""Divisor of rows and columns of a matrix that tensor cores multiply in fp8 (Transformer Engine's
`assert_dim_for_fp8_exec`, and cuBLAS)."""


@rule("unproven", "run", facts=sections_in(UNPROVEN))
def unproven(**sections: Any) -> Problems:
    yield from found_in(UNPROVEN, sections)


@rule("unproven.architecture", "model.path")
def unproven_architecture(trainer: Trainer, spec: ModelSpec) -> Problems:
    yield from other_architectures(ARCHITECTURES, {"trainer": trainer}, spec)


@rule("fp8.dtype", "numerics.dtype")
def from_bf16(trainer: Trainer, numerics: Numerics) -> Problems:
    if trainer.fp8 is not None and numerics.dtype != "bfloat16":
        yield f"trainer.fp8={trainer.fp8} rounds bf16 tensors, as publications do; set it to bfloat16"


@rule("fp8.gpu", "trainer.fp8")
def on_this_gpu(trainer: Trainer, cluster: Cluster) -> Problems:
    if trainer.fp8 is not None and cluster.gpu not in (None, *ON[trainer.fp8]):
        other = next(name for name, gpus in ON.items() if cluster.gpu in gpus)
        yield f"it is not for cluster.gpu={cluster.gpu}; set it to {other}"


@rule("fp8.quantise", "publish.quantise")
def one_rule(trainer: Trainer, publish: Publish) -> Problems:
    """Engine and trainer round weights by one rule, or engines get them unrounded."""
    if trainer.fp8 is None or publish.quantise is None or (trainer.fp8, publish.quantise) == ("blockwise", "te"):
        return
    remedy = "set it to te" if trainer.fp8 == "blockwise" else "leave it out"
    yield (
        f"trainer.fp8={trainer.fp8} rounds weights otherwise, and engines would compute with other weights than the "
        f"trainer; {remedy}"
    )


@rule("fp8.blocks", "trainer.fp8")
def whole_blocks(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Problems:
    """Blocks of a rank's matrix are those of the checkpoint's tensors, from which publications make theirs."""
    if trainer.fp8 is None or spec.family.ARCHITECTURE not in ARCHITECTURES["trainer.fp8"]:
        return
    from slimx.extras.low_precision.recipes import RECIPES

    width, cut = RECIPES[trainer.fp8].width, trainer.fp8 == "blockwise"
    blocks = f"trainer.fp8={trainer.fp8} has blocks of {width} rows and columns"
    for row in spec.table.rows:
        if not row.quantised:
            continue
        split = "trainer.expert_tensor" if row.per_expert else "trainer.tensor"
        ways = sizes.expert_tensor if row.per_expert else sizes.tensor
        name = row.name.removesuffix(".weight").split(".")[-1]
        if not _whole(row, 1, width, cut=cut):
            yield f"{blocks}, and {name} of {spec.path} is made of pieces that they do not divide; leave it out"
            return
        if row.axis is not None and not _whole(row, ways, width, cut=cut):
            yield split, f"{blocks}, and {split}={ways} would cut {name} of {spec.path} inside one; set it lower"
            return


def _whole(row: Row, ways: int, width: int, *, cut: bool) -> bool:
    from slimx.layout.parts import matrix

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
        and (size % width == 0 or (cut and size % LEAST == 0 and (at + size, here + size) == (whole, end)))
        for at, here, size, whole, end in axes
    )


@rule("qat.dtype", "numerics.dtype")
def keeps_unrounded_weights(trainer: Trainer, numerics: Numerics) -> Problems:
    """Only a model in bf16 has fp32 weights of its optimizer in addition to those that it computes with."""
    if trainer.qat is not None and numerics.dtype != "bfloat16":
        yield (
            f"trainer.qat={trainer.qat} rounds the weights of the model, and the optimizer has no others; set it to "
            "bfloat16, or leave trainer.qat out"
        )


@rule("qat.experts", "trainer.qat")
def has_experts(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Problems:
    from slimx.extras.low_precision.int4 import rounds

    for key, value in (("trainer.qat", trainer.qat), ("publish.quantise", publish.quantise)):
        if value == "int4" and not any(map(rounds, spec.table.rows)):
            yield (
                key,
                f"it rounds routed experts whose matrices the checkpoint stores one by one, and {spec.path} has none; "
                "leave it out",
            )


@rule("qat.groups", "trainer.qat")
def whole_groups(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Problems:
    """A group of columns lies on one rank: its scale is that of the whole matrix's group."""
    if trainer.qat is None:
        return
    from slimx.extras.low_precision.int4 import GROUP, rounds

    for row in filter(rounds, spec.table.rows):
        source, (_, cols) = row.sources[0]
        name = source.split(".")[-2]
        if cols % GROUP:
            yield f"groups have {GROUP} columns, and {name} of the experts of {spec.path} has {cols}; leave it out"
            return
        if row.axis == 1 and cols % (GROUP * sizes.expert_tensor):
            yield (
                "trainer.expert_tensor",
                f"trainer.qat={trainer.qat} rounds groups of {GROUP} columns, which {sizes.expert_tensor} ranks would "
                f"cut in the {cols} of {name}; set it to 1, with trainer.expert of 2 or more",
            )
            return


@rule("publish.int4", "publish.quantise")
def takes_codes(publish: Publish, numerics: Numerics, rollout: Rollout) -> Problems:
    """Engines hold codes row by row, as checkpoints do, with one of SGLang's kernels alone."""
    if publish.quantise != "int4":
        return
    codes = "publish.quantise=int4"
    if numerics.dtype != "bfloat16":
        yield "numerics.dtype", f"{codes} has bf16 scales; set it to bfloat16"
    if publish.encoding == "hf":
        yield "publish.encoding", f"{codes} writes codes where engines hold them; set it to local or auto"
    for group in rollout.policy_engines:
        if group.sglang.get("moe_runner_backend") != "triton":
            yield (
                "rollout.engines.sglang.moe_runner_backend",
                f"other kernels of {group.where} may rearrange codes, so that none could be written or proven by "
                f"{codes}; set it to triton",
            )
        if group.sglang.get("enforce_shared_experts_fusion"):
            yield (
                "rollout.engines.sglang.enforce_shared_experts_fusion",
                f"{codes} rounds routed experts alone, and {group.where} would hold the shared one among them; leave "
                "it out",
            )
        if group.model is None and not group.urls:
            yield (
                "rollout.engines.model",
                f"{codes}, and {group.where} serves model.path itself: set its model to the directory that `slimx "
                "convert hf-to-int4` makes of it",
            )


@rule("publish.triton_dtype", "publish.quantise")
def rounded_from(publish: Publish, numerics: Numerics) -> Problems:
    if publish.quantise == "triton" and numerics.dtype == "float32":
        yield "it is defined for bfloat16 weights, and numerics.dtype is float32; set that to bfloat16, or this to ieee"


@rule("publish.quantise_on_cpu", "publish.quantise")
def has_kernels(publish: Publish, numerics: Numerics, rollout: Rollout, device: str, sizes: Sizes) -> Problems:
    """Asked where there are trainers, which publish."""
    if publish.quantise is not None and device == "cpu" and not numerics.exact and rollout.policy_engines:
        yield f"publish.quantise={publish.quantise}, but on the CPU SGLang " + (
            "computes with fp8 blocks in exact mode only; leave it out, or set numerics.mode=exact"
            if publish.in_fp8
            else "has no kernels for INT4; leave it out: with trainer.qat=int4 engines get the values of the codes"
        )


@rule("publish.mxfp4", "model.path")
def starts_in_plain_values(rollout: Rollout, spec: ModelSpec) -> Problems:
    method = (spec.hf.get("quantization_config") or {}).get("quant_method")
    if rollout.policy_engines and method == "mxfp4":
        yield (
            f"{spec.path} is in MXFP4, and engines started from it keep their experts so; make a bf16 directory of it "
            "with slimx convert (hf-to-megatron, then megatron-to-hf) and give that in model.path"
        )


@rule("engines.fp8_model", "rollout.engines.model")
def starts_in_fp8(rollout: Rollout, publish: Publish, spec: ModelSpec) -> Problems:
    """Engines that start from bf16 weights have no place for fp8 ones. A copy that is made later is not looked at."""
    for group, directory, quantisation in _origins(rollout, spec) if publish.in_fp8 else ():
        if not quantisation:
            yield (
                f"{group.where} starts from {directory}, which is not in fp8, as publish.quantise={publish.quantise} "
                "is; write a copy with `slimx convert hf-to-fp8` and name it"
            )


@rule("engines.int4_model", "rollout.engines.model")
def starts_in_what_is_published(rollout: Rollout, publish: Publish, spec: ModelSpec) -> Problems:
    """Engines that start from INT4 have places for codes alone, and others have none. A copy that is made later is not
    looked at."""
    published = publish.quantise == "int4"
    for group, directory, quantisation in _origins(rollout, spec):
        starts = quantisation.get("quant_method") == "compressed-tensors"
        if starts and not published:
            yield (
                f"{group.where} starts from {directory}, which is in INT4, and publish.quantise is not; set that to "
                "int4, or write a bf16 copy (`slimx convert hf-to-megatron`, then `megatron-to-hf`) and name it"
            )
        if published and not starts:
            yield (
                f"{group.where} starts from {directory}, which is not in INT4, as publish.quantise=int4 is; write a "
                "copy with `slimx convert hf-to-int4` and name it"
            )


def _origins(rollout: Rollout, spec: ModelSpec) -> Iterator[tuple[Engines, Path, dict[str, Any]]]:
    """Groups of the policy's engines, the directory that each starts from, if it is there already, and its
    quantization_config. Raises SlimxError for a config.json with a value that no model has."""
    from slimx.models.schema import read_fields

    for group in rollout.policy_engines:
        file = Path(group.model or spec.path) / "config.json"
        if file.is_file():
            hf = read_fields(file, spec.family.UNCHECKED_FIELDS)
            yield group, file.parent, hf.get("quantization_config") or {}
