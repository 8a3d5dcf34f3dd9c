"""Whether a model and a machine can run with `numerics.mode: exact`."""

from __future__ import annotations

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.models.families import ModelSpec

FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures whose log-probs were shown to be equal to the last bit (docs/support.md)."""


def check_exact(config: Config, spec: ModelSpec, device: str) -> None:
    """Raises SlimxError for what exact mode does not cover; nothing in fast mode."""
    if not config.exact:
        return
    if device != "cpu":
        raise SlimxError(
            "numerics.mode is exact, which is proven on the CPU only, and this machine has a GPU; set "
            "numerics.mode=fast, or cluster.device=cpu"
        )
    if spec.family.ARCHITECTURE not in FAMILIES:
        raise SlimxError(
            f"numerics.mode is exact, which covers {' and '.join(FAMILIES)}; {spec.path} is a "
            f"{spec.family.ARCHITECTURE}: set numerics.mode=fast"
        )
    if config.critic is not None:
        raise SlimxError("numerics.mode is exact, and a critic has no engine to agree with; set numerics.mode=fast")
    fields, leaves = spec.transformer, config.leaves
    widths = {
        "the attention's output projection": fields["num_attention_heads"] * fields["kv_channels"],
        "the down projection": fields.get("moe_ffn_hidden_size") or fields["ffn_hidden_size"],
    }
    for name, width in widths.items():
        if width % leaves:
            raise SlimxError(
                f"numerics.leaves {leaves} does not divide the {width} inputs of {name} of {spec.path}; use fewer, and "
                "smaller tensor parallel sizes"
            )
