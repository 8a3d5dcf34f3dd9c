"""Whether a model and a machine can run with `numerics.mode: exact`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimx.config.schema import Config
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
IN_BLOCKS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Those that were shown with weights in blocks of fp8, too."""


def check_exact(config: Config, spec: ModelSpec, device: str) -> None:
    """Raises SlimxError for what exact mode does not cover, on a GPU also where its kernels are not built; nothing in
    fast mode."""
    if not config.exact:
        return
    if config.served_rule is not None and device != "cpu":
        raise SlimxError(
            f"numerics.mode is exact, and publish.quantise={config.served_rule} is computed there on the CPU only; set "
            "publish.quantise=null or numerics.mode=fast"
        )
    if device == "cuda":
        from slimx.numerics.exact import kernel_cuda  # imports torch, which a plan does without

        kernel_cuda.load(kernel_cuda.LIBRARY)  # torch's own operations would take minutes for a token
    covered = FAMILIES if device == "cpu" else ON_GPUS
    if spec.family.ARCHITECTURE not in covered:
        raise SlimxError(
            f"numerics.mode is exact, which covers {' and '.join(covered)} on {device}; {spec.path} is a "
            f"{spec.family.ARCHITECTURE}: set numerics.mode=fast"
        )
    if config.critic is not None:
        raise SlimxError("numerics.mode is exact, and a critic has no engine to agree with; set numerics.mode=fast")
    leaves = config.leaves
    for name, width in _row_parallel_widths(spec.transformer).items():
        if width % leaves:
            raise SlimxError(
                f"numerics.leaves {leaves} does not divide the {width} inputs of {name} of {spec.path}; use fewer, and "
                "smaller tensor parallel sizes"
            )
    if config.served_rule is not None:
        if spec.family.ARCHITECTURE not in IN_BLOCKS:
            raise SlimxError(
                f"numerics.mode is exact, and publish.quantise covers {' and '.join(IN_BLOCKS)}; {spec.path} is a "
                f"{spec.family.ARCHITECTURE}: set publish.quantise=null"
            )
        _check_blocks(config, Quantisation(config.served_rule))


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


def _check_blocks(config: Config, quantisation: Quantisation) -> None:
    """Whether engines hold weights in the blocks that a publication brings."""
    # They import torch, which a plan does without.
    from slimx.models.files.block_fp8 import block_of
    from slimx.reshard.kernels import cpu as kernel

    if quantisation.rule == "triton":
        kernel.triton_scales(kernel.TRITON_SCALES)  # raises without the table that only a GPU can make
    for group in config.rollout.policy_engines:
        if group.model is None:  # somebody else's server, whose tensors are compared before anything is sent
            continue
        try:
            found = block_of(Path(group.model))
        except SlimxError:
            found = None
        if found != quantisation.block:
            high, wide = quantisation.block
            raise SlimxError(
                f"publish.quantise makes fp8 blocks of {high} x {wide}, and {group.model}, the model of "
                f"rollout.engines group {group.name}, has {'none' if found is None else f'{found[0]} x {found[1]}'}; "
                "make it with slimx convert hf-to-fp8"
            )
