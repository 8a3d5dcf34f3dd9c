"""Rules for fp8, INT4 and MXFP4, in training and in publications."""

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
    "publish.quantize=int4": ("rollout.engines.sglang.speculative_algorithm (layers of multi-token prediction)",),
}
"""As `slimx.rules.unproven.UNPROVEN`."""
ARCHITECTURES = {"trainer.fp8": ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")}
"""As `slimx.rules.unproven.other_architectures`."""
ON = {"blockwise": ("h100", "h200"), "mxfp8": ("gb300",)}
"""GPUs (`cluster.gpu`) whose tensor cores support the blocks of a recipe. Blackwell computes 128-wide blocks as MXFP8,
which would need scales that are powers of two."""
LEAST = 16
"""Required divisor of rows and columns of matrices that tensor cores multiply in fp8 (Transformer Engine's
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
        yield f"trainer.fp8={trainer.fp8} rounds bf16 tensors, as publications do; set it to bfloat16"


@rule("fp8.gpu", "trainer.fp8")
def on_this_gpu(trainer: Trainer, cluster: Cluster) -> Problems:
    if trainer.fp8 is not None and cluster.gpu not in (None, *ON[trainer.fp8]):
        other = next(name for name, gpus in ON.items() if cluster.gpu in gpus)
        yield f"it is not for cluster.gpu={cluster.gpu}; set it to {other}"


@rule("fp8.quantize", "publish.quantize")
def one_rule(trainer: Trainer, publish: Publish) -> Problems:
    """Checks that engine and trainer round weights by one rule, unless engines get unrounded weights."""
    if trainer.fp8 is None or publish.quantize is None or (trainer.fp8, publish.quantize) == ("blockwise", "te"):
        return
    remedy = "set it to te" if trainer.fp8 == "blockwise" else "leave it out"
    yield (
        f"trainer.fp8={trainer.fp8} rounds weights differently, so engines would not compute with the trainer's "
        f"weights; {remedy}"
    )


@rule("fp8.blocks", "trainer.fp8")
def whole_blocks(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Problems:
    """Checks that blocks of a rank's matrix are blocks of the checkpoint's tensors, from which publications make
    codes."""
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
            yield f"{blocks}, which do not divide the pieces of {name} of {spec.path}; leave it out"
            return
        if row.axis is not None and not _splits_evenly(row, ways, width, cut=cut):
            yield key, f"{blocks}, and {key}={ways} would split one in {name} of {spec.path}; set it lower"
            return


def _splits_evenly(row: Row, ways: int, width: int, *, cut: bool) -> bool:
    from slimx.layout.parts import matrix

    shapes = [matrix(shape) for _, shape in row.sources]
    local, rects = row.map.local(shapes, row.axis, 0, ways)
    return all(_aligned(rect, shapes[rect.source], local, width, cut=cut) for rect in rects)


def _aligned(rect: Rect, source: Shape, local: Shape, width: int, *, cut: bool) -> bool:
    """Returns True if blocks of the rectangle are blocks of both tensors. `cut`: also smaller last blocks, where both
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
    """Refuses other dtypes than bf16: only then the optimizer has separate fp32 weights."""
    if trainer.qat is not None and numerics.dtype != "bfloat16":
        yield (
            f"trainer.qat={trainer.qat} rounds the weights of the model, and the optimizer has no other weights; set "
            "it to bfloat16, or leave trainer.qat out"
        )


@rule("qat.experts", "trainer.qat")
def has_experts(trainer: Trainer, publish: Publish, spec: ModelSpec) -> Problems:
    from slimx.extras.low_precision.int4 import rounds

    for key, value in (("trainer.qat", trainer.qat), ("publish.quantize", publish.quantize)):
        if value == "int4" and not any(map(rounds, spec.table.rows)):
            yield (
                key,
                f"it rounds routed experts whose matrices are separate in the checkpoint, but {spec.path} has none; "
                "leave it out",
            )


@rule("qat.groups", "trainer.qat")
def whole_groups(trainer: Trainer, spec: ModelSpec, sizes: Sizes) -> Problems:
    """Checks that each group of columns is on one rank, so that its scale equals the one in the unsplit matrix."""
    if trainer.qat is None:
        return
    from slimx.extras.low_precision.int4 import GROUP, rounds

    for row in filter(rounds, spec.table.rows):
        source, (_, cols) = row.sources[0]
        name = source.split(".")[-2]
        if cols % GROUP:
            yield f"groups have {GROUP} columns, but {name} of the experts of {spec.path} has {cols}; leave it out"
            return
        if row.axis == 1 and cols % (GROUP * sizes.expert_tensor):
            yield (
                "trainer.expert_tensor",
                f"trainer.qat={trainer.qat} rounds groups of {GROUP} columns, which {sizes.expert_tensor} ranks would "
                f"split in the {cols} of {name}; set it to 1, with trainer.expert of 2 or more",
            )
            return


@rule("publish.int4", "publish.quantize")
def takes_codes(publish: Publish, numerics: Numerics, rollout: Rollout) -> Problems:
    """Refuses engines that rearrange codes: they must be in rows, as in checkpoints, which only one of SGLang's kernels
    supports."""
    if publish.quantize != "int4":
        return
    codes = "publish.quantize=int4"
    if numerics.dtype != "bfloat16":
        yield "numerics.dtype", f"{codes} has bf16 scales; set it to bfloat16"
    if publish.encoding == "hf":
        yield "publish.encoding", f"{codes} writes codes into engine memory; set it to local or auto"
    for group in rollout.policy_engines:
        if group.sglang.get("moe_runner_backend") != "triton":
            yield (
                "rollout.engines.sglang.moe_runner_backend",
                f"other kernels of {group.where} may rearrange codes, which {codes} could neither write nor verify; "
                "set it to triton",
            )
        if group.sglang.get("enforce_shared_experts_fusion"):
            yield (
                "rollout.engines.sglang.enforce_shared_experts_fusion",
                f"{codes} rounds routed experts only, but {group.where} would store the shared one among them; leave "
                "it out",
            )
        if group.model is None and not group.urls:
            yield (
                "rollout.engines.model",
                f"{codes}, but {group.where} serves model.path, which is not quantized: set its model to the output "
                "directory of `slimx convert hf-to-int4`",
            )


@rule("publish.triton_dtype", "publish.quantize")
def rounded_from(publish: Publish, numerics: Numerics) -> Problems:
    if publish.quantize == "triton" and numerics.dtype == "float32":
        yield "it requires bfloat16 weights, but numerics.dtype is float32; set that to bfloat16, or this to ieee"


@rule("publish.quantize_on_cpu", "publish.quantize")
def has_kernels(publish: Publish, numerics: Numerics, rollout: Rollout, device: str, sizes: Sizes) -> Problems:
    """Applies only to configurations with trainers: others publish nothing."""
    if publish.quantize is None or device != "cpu" or numerics.exact or not rollout.policy_engines:
        return
    if publish.in_fp8:
        problem = "supports fp8 blocks in exact mode only; leave it out, or set numerics.mode=exact"
    else:
        problem = "has no kernels for INT4; leave it out: with trainer.qat=int4 engines get the values of the codes"
    yield f"publish.quantize={publish.quantize}, but on the CPU SGLang {problem}"


@rule("publish.mxfp4", "model.path")
def starts_in_plain_values(rollout: Rollout, spec: ModelSpec) -> Problems:
    method = (spec.hf.get("quantization_config") or {}).get("quant_method")
    if rollout.policy_engines and method == "mxfp4":
        yield (
            f"{spec.path} is in MXFP4, and engines started from it keep their experts in MXFP4; convert it to bf16 "
            "with slimx convert (hf-to-megatron, then megatron-to-hf) and set model.path to the result"
        )


@rule("engines.fp8_model", "rollout.engines.model")
def starts_in_fp8(rollout: Rollout, publish: Publish, spec: ModelSpec) -> Problems:
    """Refuses engines that start from bf16 weights: they have no memory for fp8 ones. Directories that do not exist yet
    are not checked."""
    if not publish.in_fp8:
        return
    for group, directory, quantization in _origins(rollout, spec):
        if not quantization:
            yield (
                f"{group.where} starts from {directory}, which is not in fp8, but publish.quantize="
                f"{publish.quantize} is; convert it with `slimx convert hf-to-fp8` and name the result"
            )


@rule("engines.int4_model", "rollout.engines.model")
def starts_in_what_is_published(rollout: Rollout, publish: Publish, spec: ModelSpec) -> Problems:
    """Refuses engines that start in INT4 but get other weights, or the reverse: their memory layouts differ.
    Directories that do not exist yet are not checked."""
    published = publish.quantize == "int4"
    for group, directory, quantization in _origins(rollout, spec):
        starts = quantization.get("quant_method") == "compressed-tensors"
        if starts and not published:
            yield (
                f"{group.where} starts from {directory}, an INT4 checkpoint, but publish.quantize is not int4; "
                "set it to int4, or convert the checkpoint to bf16 (`slimx convert hf-to-megatron`, then "
                "`megatron-to-hf`) and name the result"
            )
        if published and not starts:
            yield (
                f"{group.where} starts from {directory}, which is not in INT4, but publish.quantize=int4 is; convert "
                "it with `slimx convert hf-to-int4` and name the result"
            )


def _origins(rollout: Rollout, spec: ModelSpec) -> Iterator[tuple[Engines, Path, dict[str, Any]]]:
    """Yields each group of the policy's engines whose initial directory has a config.json, with that directory and its
    quantization_config. Raises SlimxError for a config.json with an invalid value."""
    from slimx.models.schema import read_fields

    for group in rollout.policy_engines:
        file = Path(group.model or spec.path) / "config.json"
        if file.is_file():
            hf = read_fields(file, spec.family.UNCHECKED_FIELDS)
            yield group, file.parent, hf.get("quantization_config") or {}
