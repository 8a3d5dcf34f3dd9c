"""Configuration rules for fp8, INT4 and MXFP4, in training and in publications."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.engines import Engines, ServedEngines
from slimx.config.sections.general import Cluster, Numerics
from slimx.config.sections.publish import Publish
from slimx.config.sections.trainer import Trainer
from slimx.rules.unproven import other_architectures, sections_in, table_problems

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
        "publish.quantize=ieee",
        "publish.quantize=te",
        "publish.quantize=triton",
        "publish.quantize=ue8m0",
        "algorithm.teacher",
        "critic",
    ),
    "publish.quantize=int4": ("rollout.engines.sglang.speculative_algorithm (with multi-token prediction layers)",),
}
"""Feature -> configuration keys that have not been tested with the feature, in the format of
`slimx.rules.unproven.UNPROVEN`."""
ARCHITECTURES = {"trainer.fp8": ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")}
"""Feature -> the only model architectures with which the feature has been tested
(`slimx.rules.unproven.other_architectures`)."""
ON = {"blockwise": ("h100", "h200"), "mxfp8": ("gb300",)}
"""Recipe (value of `trainer.fp8`) -> values of `cluster.gpu` for the GPUs whose tensor cores support the recipe's
blocks. Blackwell GPUs compute 128-wide blocks as MXFP8, which would require power-of-two scales."""
LEAST = 16
"""Required divisor of the rows and columns of matrices that tensor cores multiply in fp8 (Transformer Engine's
`assert_dim_for_fp8_exec`, and cuBLAS)."""


@rule("unproven", "run", facts=sections_in(UNPROVEN))
def unproven(**sections: Any) -> Problems:
    yield from table_problems(UNPROVEN, sections)


@rule("unproven.architecture", "model.path")
def unproven_architecture(trainer: Trainer, spec: ModelSpec) -> Problems:
    yield from other_architectures(ARCHITECTURES, {"trainer": trainer}, spec)


@rule("fp8.dtype", "numerics.dtype")
def from_bf16(trainer: Trainer, numerics: Numerics) -> Problems:
    if trainer.fp8 is not None and numerics.dtype != "bfloat16":
        yield (
            f"trainer.fp8={trainer.fp8} rounds only bf16 tensors, but numerics.dtype is {numerics.dtype}; set "
            "numerics.dtype=bfloat16"
        )


@rule("fp8.gpu", "trainer.fp8")
def on_this_gpu(trainer: Trainer, cluster: Cluster) -> Problems:
    if trainer.fp8 is not None and cluster.gpu not in (None, *ON[trainer.fp8]):
        other = next(name for name, gpus in ON.items() if cluster.gpu in gpus)
        yield f"trainer.fp8={trainer.fp8} is not supported on cluster.gpu={cluster.gpu}; set trainer.fp8={other}"


@rule("fp8.quantize", "publish.quantize")
def one_rule(trainer: Trainer, publish: Publish) -> Problems:
    """Checks that engines and trainer round weights by the same rule, unless engines receive unrounded weights."""
    if trainer.fp8 is None or publish.quantize is None or (trainer.fp8, publish.quantize) == ("blockwise", "te"):
        return
    remedy = "set publish.quantize=te" if trainer.fp8 == "blockwise" else "remove publish.quantize"
    yield (
        f"trainer.fp8={trainer.fp8} and publish.quantize={publish.quantize} round weights differently, so trainer and "
        f"engines would compute with different weights; {remedy}"
    )


@rule("fp8.blocks", "trainer.fp8")
def whole_blocks(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Problems:
    """Checks that the fp8 blocks of a rank's matrices are also blocks of the checkpoint's tensors, because publications
    quantize the latter."""
    if trainer.fp8 is None or spec.family.ARCHITECTURE not in ARCHITECTURES["trainer.fp8"]:
        return
    from slimx.extras.low_precision.recipes import RECIPES

    width = RECIPES[trainer.fp8].width
    cut = trainer.fp8 == "blockwise"
    blocks = f"trainer.fp8={trainer.fp8} has blocks of {width} rows and columns"
    for row in spec.table.rows:
        if not row.quantized:
            continue
        key = "trainer.expert_tensor" if row.per_expert else "trainer.tensor"
        ways = sizes.expert_tensor if row.per_expert else sizes.tensor
        name = row.name.removesuffix(".weight").split(".")[-1]
        if not _splits_evenly(row, 1, width, cut=cut):
            yield f"{blocks}, but {name} in {spec.path} cannot be divided into such blocks; remove trainer.fp8"
            return
        if row.axis is not None and not _splits_evenly(row, ways, width, cut=cut):
            yield key, f"{blocks}, and {key}={ways} would split a block of {name} in {spec.path}; set {key} lower"
            return


def _splits_evenly(row: Row, ways: int, width: int, *, cut: bool) -> bool:
    from slimx.layout.parts import matrix

    shapes = [matrix(shape) for _, shape in row.sources]
    local, rects = row.map.local(shapes, row.axis, 0, ways)
    return all(_aligned(rect, shapes[rect.source], local, width, cut=cut) for rect in rects)


def _aligned(rect: Rect, source: Shape, local: Shape, width: int, *, cut: bool) -> bool:
    """Returns True if `rect` consists of whole blocks, `width` rows by `width` columns, both of the checkpoint's tensor
    of shape `source` and of the rank's tensor of shape `local`. `cut`: True to allow a smaller last block where both
    tensors end."""
    if rect.step != 1:
        return False
    rows = rect.row, rect.local_row, rect.rows, source[0], local[0]
    cols = rect.col, rect.local_col, rect.cols, source[1], local[1]
    for start, local_start, size, end, local_end in (rows, cols):
        if start % width or local_start % width:
            return False
        at_end = start + size == end and local_start + size == local_end
        if size % width and not (cut and size % LEAST == 0 and at_end):
            return False
    return True


@rule("qat.dtype", "numerics.dtype")
def keeps_unrounded_weights(trainer: Trainer, numerics: Numerics) -> Problems:
    """Refuses `trainer.qat` unless `numerics.dtype` is bfloat16, because the optimizer keeps separate fp32 main weights
    only for bf16 weights."""
    if trainer.qat is not None and numerics.dtype != "bfloat16":
        yield (
            f"trainer.qat={trainer.qat} rounds the model's weights, but with numerics.dtype={numerics.dtype} the "
            "optimizer has no unrounded copies of the weights; set numerics.dtype=bfloat16, or remove trainer.qat"
        )


@rule("qat.experts", "trainer.qat")
def has_experts(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Problems:
    from slimx.extras.low_precision.int4 import rounds

    for key, value in (("trainer.qat", trainer.qat), ("publish.quantize", publish.quantize)):
        if value == "int4" and not any(map(rounds, spec.table.rows)):
            yield (
                key,
                f"{key}=int4 rounds routed experts whose matrices are separate tensors in the checkpoint, but "
                f"{spec.path} has none; remove {key}",
            )


@rule("qat.groups", "trainer.qat")
def whole_groups(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Problems:
    """Checks that each group of columns that share an INT4 scale is on one rank, so that the group gets the same scale
    as in the whole matrix."""
    if trainer.qat is None:
        return
    from slimx.extras.low_precision.int4 import GROUP, rounds

    for row in filter(rounds, spec.table.rows):
        source, (_, cols) = row.sources[0]
        name = source.split(".")[-2]
        if cols % GROUP:
            yield (
                f"trainer.qat={trainer.qat} rounds groups of {GROUP} columns, but {name} in the experts of "
                f"{spec.path} has {cols} columns, which is not a multiple of {GROUP}; remove trainer.qat"
            )
            return
        if row.axis == 1 and cols % (GROUP * sizes.expert_tensor):
            yield (
                "trainer.expert_tensor",
                f"trainer.qat={trainer.qat} rounds groups of {GROUP} columns, but "
                f"trainer.expert_tensor={sizes.expert_tensor} would split a group in the {cols} columns of {name}; "
                "set trainer.expert_tensor=1, and trainer.expert to 2 or more",
            )
            return


@rule("publish.int4", "publish.quantize")
def takes_codes(publish: Publish, numerics: Numerics, served: ServedEngines) -> Problems:
    """Refuses settings with which engines cannot receive INT4 codes, such as expert kernels that rearrange them.
    Engines must store codes in row order, as checkpoints do; among SGLang's kernels, only Triton's uses this order."""
    if publish.quantize != "int4":
        return
    codes = "publish.quantize=int4"
    if numerics.dtype != "bfloat16":
        yield (
            "numerics.dtype",
            f"{codes} has bf16 scales, but numerics.dtype is {numerics.dtype}; set numerics.dtype=bfloat16",
        )
    if publish.encoding == "hf":
        yield (
            "publish.encoding",
            f"{codes} needs the engines' own layout, but publish.encoding is hf; set publish.encoding to local or auto",
        )
    for group in served.policy:
        if group.sglang.get("moe_runner_backend") != "triton":
            yield (
                f"{group.key}.sglang.moe_runner_backend",
                f"expert kernels other than Triton's may rearrange codes in {group.where}, which {codes} could "
                f"neither write nor verify; set {group.key}.sglang.moe_runner_backend=triton",
            )
        if group.sglang.get("enforce_shared_experts_fusion"):
            yield (
                f"{group.key}.sglang.enforce_shared_experts_fusion",
                f"{codes} quantizes only routed experts, but {group.where} would store the shared expert among them; "
                f"remove {group.key}.sglang.enforce_shared_experts_fusion",
            )
        if group.model is None and not group.urls:
            yield (
                f"{group.key}.model",
                f"{codes}, but {group.where} serves model.path, which is not quantized; set the group's model to the "
                "output directory of `slimx convert hf-to-int4`",
            )


@rule("publish.fp8", "publish.quantize")
def has_matrices(publish: Publish, spec: ModelSpec) -> Problems:
    if publish.in_fp8 and not any(row.quantized for row in spec.table.rows):
        yield (
            f"publish.quantize={publish.quantize} quantizes linear layers, but slimx does not quantize those of "
            f"{spec.family.ARCHITECTURE} to fp8; remove publish.quantize"
        )


@rule("publish.triton_dtype", "publish.quantize")
def rounded_from(publish: Publish, numerics: Numerics) -> Problems:
    if publish.quantize == "triton" and numerics.dtype == "float32":
        yield (
            "publish.quantize=triton needs bf16 weights, but numerics.dtype is float32; set numerics.dtype=bfloat16 "
            "or publish.quantize=ieee"
        )


@rule("publish.quantize_on_cpu", "publish.quantize")
def has_kernels(publish: Publish, numerics: Numerics, served: ServedEngines, device: str, sizes: Sizes) -> Problems:
    """Refuses quantized publications for which SGLang has no kernels on the CPU. `sizes`: restricts the rule to
    configurations with trainers, because without trainers nothing is published."""
    if publish.quantize is None or device != "cpu" or numerics.exact or not served.policy:
        return
    if publish.in_fp8:
        problem = "supports fp8 blocks only in slimx's exact mode; remove publish.quantize, or set numerics.mode=exact"
    else:
        problem = "has no INT4 kernels; remove publish.quantize, and set trainer.qat=int4 to round weights to INT4"
    yield f"publish.quantize is {publish.quantize}, but on the CPU SGLang {problem}"


@rule("publish.mxfp4", "model.path")
def starts_in_plain_values(served: ServedEngines, spec: ModelSpec) -> Problems:
    method = (spec.hf.get("quantization_config") or {}).get("quant_method")
    if served.policy and method == "mxfp4":
        yield (
            f"engines that start from the MXFP4 checkpoint {spec.path} would store experts in MXFP4, but slimx does "
            "not publish MXFP4 weights; convert the checkpoint to bf16 (`slimx convert hf-to-megatron`, then `slimx "
            "convert megatron-to-hf`), and set model.path to the output directory"
        )


@rule("engines.fp8_model", "rollout.engines.model")
def starts_in_fp8(served: ServedEngines, publish: Publish, spec: ModelSpec) -> Problems:
    """Refuses engines that start from bf16 weights but receive fp8 publications, because the engines' parameters cannot
    store fp8. Model directories that do not exist yet are not checked."""
    if not publish.in_fp8:
        return
    for group, directory, quantization in _origins(served, spec):
        if not quantization:
            yield (
                f"{group.key}.model",
                f"{group.where} starts from {directory}, which is not an fp8 checkpoint, but publish.quantize is "
                f"{publish.quantize}; convert the checkpoint with `slimx convert hf-to-fp8`, and set the group's model "
                "to the output directory",
            )


@rule("engines.int4_model", "rollout.engines.model")
def starts_in_what_is_published(served: ServedEngines, publish: Publish, spec: ModelSpec) -> Problems:
    """Refuses engines that start from INT4 weights but receive unquantized or fp8 publications, or the reverse, because
    the parameters' layouts differ. Model directories that do not exist yet are not checked."""
    published = publish.quantize == "int4"
    for group, directory, quantization in _origins(served, spec):
        starts = quantization.get("quant_method") == "compressed-tensors"
        if starts and not published:
            yield (
                f"{group.key}.model",
                f"{group.where} starts from {directory}, an INT4 checkpoint, but publish.quantize is not int4; set "
                "publish.quantize=int4, or convert the checkpoint to bf16 (`slimx convert hf-to-megatron`, then `slimx "
                "convert megatron-to-hf`) and set the group's model to the output directory",
            )
        if published and not starts:
            yield (
                f"{group.key}.model",
                f"{group.where} starts from {directory}, which is not an INT4 checkpoint, but publish.quantize is "
                "int4; convert the checkpoint with `slimx convert hf-to-int4`, and set the group's model to the output "
                "directory",
            )


def _origins(served: ServedEngines, spec: ModelSpec) -> Iterator[tuple[Engines, Path, dict[str, Any]]]:
    """Yields each group of engines that serve the policy, with the directory from which the engines load their initial
    weights and that directory's quantization_config. Groups whose directory has no config.json are skipped. Raises
    SlimxError for a config.json with an invalid value."""
    from slimx.models.schema import read_fields

    for group in served.policy:
        file = Path(group.model or spec.path) / "config.json"
        if file.is_file():
            hf = read_fields(file, spec.family.UNCHECKED_FIELDS)
            yield group, file.parent, hf.get("quantization_config") or {}
