"""Common part of Qwen3.5's language models, dense or with experts, saved without the vision tower. Their checkpoints
group the rows of a delta net's input projections by kind (queries, keys, values, gates)."""

from __future__ import annotations

from slimx.extras.recurrent.families import delta_net
from slimx.layout.table import Table
from slimx.models import decoder
from slimx.models.fields import HfConfig


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    for key in ("mrope_section", "mrope_interleaved"):
        decoder.rotary(hf)[1].get(key)  # read and ignored, because text uses only one of the axes of image positions
    return delta_net.unsupported(hf)


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because multi-token prediction layers are not trained."""
    return delta_net.weight_table(hf, delta_net.by_kind, delta_net.prediction_tensors(hf))


def engine_table(hf: HfConfig, architecture: str, *, fused_shared_experts: bool) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.qwen3_5_text`). `architecture`: the model's architecture, for errors.

    Raises SlimxError if SGLang would build a different model from config.json `hf`.
    """
    delta_net.check_served(hf, architecture, fused_shared_experts=fused_shared_experts)
    factor = hf.get("partial_rotary_factor", 0.25)
    expected = decoder.rotary_fraction(hf, default=0.25)
    if factor != expected:
        raise delta_net.unserved(
            architecture,
            "partial_rotary_factor",
            f"is {expected} in rope_parameters, but SGLang 0.5.23 reads {factor} from the top level of config.json; "
            f"set partial_rotary_factor to {expected} at the top level",
        )
    rotary = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if "mrope_section" in rotary and not (rotary.get("rope_type") or rotary.get("type")):
        raise delta_net.unserved(
            architecture,
            "rope_type",
            "is missing next to mrope_section in config.json, so SGLang 0.5.23 would use image positions for text; set "
            "rope_type to default",
        )
    tied = bool(hf.get("tie_word_embeddings"))
    return delta_net.engine_table(hf, delta_net.merged, embedding="undivided", tied=tied)
