"""Family GLM-5, 5.1 and 5.2: DeepSeek-V3.2 under another architecture name, except that the indexer's rotary embedding
rotates adjacent pairs, as attention's does."""

from __future__ import annotations

from typing import Any

from slimx.errors import SlimxError
from slimx.extras.families import deepseek_v3, deepseek_v3_engine
from slimx.extras.families.deepseek_v3 import gpt_arguments as gpt_arguments
from slimx.extras.families.prediction import mtp_layers as mtp_layers
from slimx.extras.sparse import deepseek_v32
from slimx.extras.sparse.deepseek_v32 import NO_CPU_ENGINE as NO_CPU_ENGINE
from slimx.extras.sparse.deepseek_v32 import UNTRAINED as UNTRAINED
from slimx.extras.sparse.deepseek_v32 import weight_table as weight_table
from slimx.extras.sparse.layers import layer_kind as layer_kind
from slimx.layout.maps import Concat
from slimx.layout.table import Row, Table
from slimx.models.fields import HfConfig
from slimx.models.rows import Layer

ARCHITECTURE = "GlmMoeDsaForCausalLM"


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of megatron-core's MLATransformerConfig that define the model; fields for parallelism and
    dtype are not included."""
    return deepseek_v32.transformer_config(hf, interleaved=True)


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    if not hf.get("indexer_rope_interleave", True):
        return "indexer_rope_interleave false"
    return deepseek_v32.unsupported_sparse(hf) or deepseek_v3.unsupported(hf)


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model on CUDA
    (`sglang.srt.models.glm4_moe`). SGLang fuses two projections of an indexer whose rotary embedding rotates adjacent
    pairs. `fused_shared_experts`: True if SGLang stores the shared expert after the routed ones in the same parameters.
    Raises SlimxError if config.json lacks the field from which SGLang determines the indexer's rotation."""
    if hf.get("indexer_rope_interleave") is not True:
        raise SlimxError(
            f"config.json of this {ARCHITECTURE} lacks indexer_rope_interleave=true, so SGLang 0.5.23 would serve a "
            "different model; set indexer_rope_interleave to true, as in the published config.json",
            code="model.served_field",
            about="indexer_rope_interleave",
        )

    def indexer(layer: Layer) -> tuple[Row, ...]:
        with_indexer = deepseek_v32.with_indexers(hf, layer)
        heads = hf["index_n_heads"]
        head = hf["index_head_dim"]
        hidden = hf["hidden_size"]
        sources = [("self_attn.indexer.wk", (head, hidden)), ("self_attn.indexer.weights_proj", (heads, hidden))]
        fused = with_indexer.row("self_attn.indexer.wk_weights_proj.weight", sources, map=Concat(), dtype="bfloat16")
        return *deepseek_v32.engine_indexer(hf, with_indexer), fused

    return deepseek_v3_engine.engine_table(hf, fused_shared_experts=fused_shared_experts, more_attention=indexer)
