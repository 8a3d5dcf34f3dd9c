"""Rules about a model and a machine that run with `numerics.mode: exact`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimx.config.rule import rule
from slimx.config.rules.exact import MODE, tree_leaves
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Numerics
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.models.families import ModelSpec
from slimx.reshard.plan.precision import Quantisation

FAMILIES = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures whose log-probs were shown to be equal to the last bit (docs/support.md)."""
ON_GPUS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Those whose path through SGLang on CUDA was read: every kernel of its own that it would take is turned off."""
IN_BLOCKS = ("DeepseekV3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Those that were shown with weights in blocks of fp8, too."""


@rule("exact.quantise_device", about="publish.quantise")
def rounds_here(numerics: Numerics, publish: Publish, local_device: str) -> Iterator[str]:
    if numerics.exact and publish.quantise is not None and local_device != "cpu":
        yield (
            f"{MODE}, and publish.quantise={publish.quantise} is computed there on the CPU only; set "
            "publish.quantise=null or numerics.mode=fast"
        )


@rule("exact.architecture", about="model.path")
def covers_model(numerics: Numerics, spec: ModelSpec) -> Iterator[str]:
    if numerics.exact and spec.family.ARCHITECTURE not in FAMILIES:
        yield _uncovered(spec, FAMILIES, "cpu")


@rule("exact.architecture_cuda", about="model.path")
def covers_model_here(numerics: Numerics, spec: ModelSpec, local_device: str) -> Iterator[str]:
    if numerics.exact and local_device == "cuda" and spec.family.ARCHITECTURE in {*FAMILIES} - {*ON_GPUS}:
        yield _uncovered(spec, ON_GPUS, "cuda")


def _uncovered(spec: ModelSpec, covered: tuple[str, ...], device: str) -> str:
    return (
        f"{MODE}, which covers {' and '.join(covered)} on {device}; {spec.path} is a {spec.family.ARCHITECTURE}: set "
        "numerics.mode=fast"
    )


@rule("exact.leaves_width", about="numerics.leaves")
def cuts_evenly(numerics: Numerics, trainer: Trainer, rollout: Rollout, spec: ModelSpec) -> Iterator[str]:
    if not numerics.exact:
        return
    leaves = tree_leaves(numerics, trainer, rollout)
    for name, width in _row_parallel_widths(spec.transformer).items():
        if width % leaves:
            yield (
                f"numerics.leaves {leaves} does not divide the {width} inputs of {name} of {spec.path}; use fewer, and "
                "smaller tensor parallel sizes"
            )


@rule("exact.quantise_architecture", about="publish.quantise")
def rounds_model(numerics: Numerics, publish: Publish, spec: ModelSpec) -> Iterator[str]:
    if numerics.exact and publish.quantise is not None and spec.family.ARCHITECTURE not in IN_BLOCKS:
        yield (
            f"{MODE}, and publish.quantise covers {' and '.join(IN_BLOCKS)}; {spec.path} is a "
            f"{spec.family.ARCHITECTURE}: set publish.quantise=null"
        )


@rule("exact.blocks", about="publish.quantise")
def serves_blocks(numerics: Numerics, publish: Publish, rollout: Rollout, spec: ModelSpec) -> Iterator[str]:
    if not numerics.exact or publish.quantise is None:
        return
    # They import torch, which a plan does without.
    from slimx.models.files.block_fp8 import block_of
    from slimx.reshard.kernels import cpu as kernel

    quantisation = Quantisation(publish.quantise)
    if quantisation.rule == "triton":
        kernel.triton_scales(kernel.TRITON_SCALES)  # raises without the table that only a GPU can make
    for group in rollout.policy_engines:
        if group.model is None:  # somebody else's server, whose tensors are compared before anything is sent
            continue
        try:
            found = block_of(Path(group.model))
        except SlimxError:
            found = None
        if found != quantisation.block:
            high, wide = quantisation.block
            yield (
                f"publish.quantise makes fp8 blocks of {high} x {wide}, and {group.model}, the model of {group.where}, "
                f"has {'none' if found is None else f'{found[0]} x {found[1]}'}; make it with slimx convert hf-to-fp8"
            )


def _row_parallel_widths(fields: dict[str, Any]) -> dict[str, int]:
    """Elements that the row-parallel products of a model sum over, by what they are of."""
    experts = fields.get("moe_ffn_hidden_size")
    dense = not experts or 0 in fields.get("moe_layer_freq", ())
    widths = {
        # Of latent attention, heads of values have a width of their own.
        "the attention's output projection": fields["num_attention_heads"]
        * (fields.get("v_head_dim") or fields["kv_channels"]),
        "the down projection": fields["ffn_hidden_size"] if dense else None,
        "the experts' down projection": experts,
        "the shared experts' down projection": fields.get("moe_shared_expert_intermediate_size"),
    }
    return {name: width for name, width in widths.items() if width}
