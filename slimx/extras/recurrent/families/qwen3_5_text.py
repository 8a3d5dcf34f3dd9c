"""The part that Qwen3.5's language models share, dense or with experts, saved without the vision tower: hybrid decoders
whose delta nets store their input projections kind by kind."""

from __future__ import annotations

from slimx.extras.recurrent.families import delta_net
from slimx.layout.table import Table
from slimx.models import decoder
from slimx.models.fields import Fields


def unsupported(hf: Fields) -> str | None:
    """Name the part of config.json `hf` that cannot be built; None if all can."""
    for key in ("mrope_section", "mrope_interleaved"):
        decoder.rotary(hf)[1].get(key)  # read, since text has one of the axes that images part the rotation between
    return delta_net.unsupported(hf)


def weight_table(hf: Fields, mtp: int = 0) -> Table:
    """The trainer's layout of every checkpoint tensor."""
    return delta_net.weight_table(hf, delta_net.by_kind, delta_net.prediction_tensors(hf))


def engine_table(hf: Fields, architecture: str, *, fused_shared_experts: bool) -> Table:
    """SGLang 0.5.23's layout of every checkpoint tensor (`sglang.srt.models.qwen3_5_text`).

    Raises SlimxError for what SGLang would build otherwise."""
    delta_net.check_served(hf, architecture, fused_shared_experts=fused_shared_experts)
    share = hf.get("partial_rotary_factor", 0.25)
    if share != (wanted := decoder.rotary_share(hf, default=0.25)):
        raise delta_net.unserved(
            architecture,
            "partial_rotary_factor",
            f"is {wanted} in rope_parameters, and SGLang 0.5.23 reads the one beside it, {share}; write the same there",
        )
    rotary = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if "mrope_section" in rotary and not (rotary.get("rope_type") or rotary.get("type")):
        raise delta_net.unserved(
            architecture,
            "rope_type",
            "is missing beside mrope_section, and SGLang 0.5.23 would give plain positions those of images; set it to "
            "default",
        )
    tied = bool(hf.get("tie_word_embeddings"))
    return delta_net.engine_table(hf, delta_net.merged, embedding="undivided", tied=tied)
