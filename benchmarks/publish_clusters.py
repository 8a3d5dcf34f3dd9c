"""Publications of large models on clusters, as the link model predicts them from compiled plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from slimx.errors import SlimxError
from slimx.extras.direct.dealing import spread_of
from slimx.extras.families import deepseek_v3
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.extras.planner.links.model import Traffic, direct_traffic, gb300_nvlink, h100_infiniband, predict
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import qwen3_moe
from slimx.reshard.plan.copy_plan import Plan, compile_plan

QWEN3_235B: dict[str, Any] = {
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
BUCKET_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A publication to predict."""

    name: str
    family: ModuleType
    hf: dict[str, Any]
    trainer: Sizes
    engine: EngineSizes
    engines: int
    fp8: bool = False

    def plan(self) -> Plan:
        """Returns the plan for one engine."""
        return compile_plan(
            MegatronLayout(self.family.weight_table(self.hf), self.trainer).parts(),
            EngineLayout(self.family.engine_table(self.hf), self.engine).parts(),
            precision=Precision("bfloat16", "bfloat16", quantization("ieee") if self.fp8 else None),
            bucket_bytes=BUCKET_BYTES,
            ranks=self.engine.world,
        )

    def traffic(self) -> Traffic:
        plan = self.plan()
        dealt = spread_of(plan, [1] * self.engines, staggered=True).deal(plan)
        return direct_traffic(dealt, sources=self.trainer.world)


TRAINER_32 = Sizes(tensor=4, data=8, expert=32)
TRAINER_256 = Sizes(tensor=8, data=32, expert=128)
CASES = (
    Case(
        "Qwen3-235B bf16, 32 trainer GPUs to 1 engine of 32 (TP 32, EP 32, 8 attention copies)",
        qwen3_moe,
        QWEN3_235B,
        TRAINER_32,
        EngineSizes(tensor=32, expert=32, attention_data=8),
        1,
    ),
    Case(
        "Qwen3-235B bf16, 32 trainer GPUs to 4 engines of 8 (TP 8, EP 8, 2 attention copies)",
        qwen3_moe,
        QWEN3_235B,
        TRAINER_32,
        EngineSizes(tensor=8, expert=8, attention_data=2),
        4,
    ),
    Case(
        "Kimi-K2 1T fp8, 256 trainer GPUs to 8 engines of 16 (TP 16, EP 16, 2 attention copies)",
        deepseek_v3,
        KIMI_K2,
        TRAINER_256,
        EngineSizes(tensor=16, expert=16, attention_data=2),
        8,
        fp8=True,
    ),
    Case(
        "Kimi-K2 1T bf16, 256 trainer GPUs to 1 engine of 128 (TP 128, EP 128, 16 attention copies)",
        deepseek_v3,
        KIMI_K2,
        TRAINER_256,
        EngineSizes(tensor=128, expert=128, attention_data=16),
        1,
    ),
)


def predicted(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Returns each publication on links and its prediction, for each case on each cluster."""
    rows = []
    for case in cases:
        traffic = case.traffic()
        received = int(traffic.received.sum(axis=0).max())
        sent = int(traffic.sent.sum(axis=0).max())
        for links in (h100_infiniband(), gb300_nvlink()):
            try:
                stages = predict(traffic, links)
            except SlimxError:
                rows.append((f"{case.name}; {links.name}", f"does not fit {links.domain} GPUs"))
                continue
            rows.append(
                (
                    f"{case.name}; {links.name}",
                    f"{stages.total:.2f} s (busiest ranks send {sent / 1e9:.1f}, receive {received / 1e9:.1f} GB: "
                    f"transfer {stages.transfer:.2f}, {traffic.buckets} buckets' calls {stages.control:.2f})",
                )
            )
    return rows
