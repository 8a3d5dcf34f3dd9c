"""Exact mode refuses a model of SGLang with any part whose rounding is not the contract's."""

from __future__ import annotations

from tests.warm.sglang import run_with_sglang

UNCOVERED = """
from types import SimpleNamespace
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.topk import TopK, TopKConfig
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from slimx.extras.exact.adapters.sglang.coverage import uncovered

def made(kind, **fields):
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    vars(module).update(fields)
    return module

plain = made(TopK, topk_config=TopKConfig(2))
grouped = made(TopK, topk_config=TopKConfig(2, use_grouped_topk=True, correction_bias=torch.zeros(4)))
turns, pairs = (made(RotaryEmbedding, is_neox_style=neox) for neox in (True, False))
latent = made(type("DeepseekV2AttentionMLA", (torch.nn.Module,), {}), use_dsa=False)
latent.rotary_emb = pairs
parts = {"norm": RMSNorm(4), "act": torch.nn.ReLU(), "a": plain, "b": grouped, "c": turns, "d": latent}
model = torch.nn.ModuleDict(parts)
assert not list(uncovered(model)), list(uncovered(model))
model["hf"], model["gate"] = RMSNorm(4, cast_x_before_out_mul=True), torch.nn.Linear(4, 4)
model["other"] = made(TopK, topk_config=TopKConfig(2, use_grouped_topk=True))
model["pairs"] = made(RotaryEmbedding, is_neox_style=False)
model["fused"] = made(torch.nn.Module, use_fused_qk_norm_rope=True)
method = made(UnquantizedFusedMoEMethod, runner=SimpleNamespace(runner_backend=MoeRunnerBackend.TRITON))
method.w13_swiglu_interleaved = True
model["experts"] = made(FusedMoE, quant_method=method)
model["sent"] = made(type("DeepEPMoE", (FusedMoE,), {}))
latent.use_dsa = True
print(*uncovered(model), sep="|")
"""


def test_a_model_with_other_arithmetic_is_refused_by_the_server() -> None:
    done = run_with_sglang("-c", UNCOVERED)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[-1].split("|")] == [
        ["d", "(DeepseekV2AttentionMLA)"],
        ["hf", "(RMSNorm)"],
        ["gate", "(Linear)"],
        ["other", "(TopK)"],
        ["pairs", "(RotaryEmbedding)"],
        ["fused", "(Module)"],
        ["experts", "(FusedMoE)"],
        ["sent", "(DeepEPMoE)"],
    ]
