"""Exact mode refuses a model of megatron-core with any part whose rounding is not the contract's."""

from __future__ import annotations

import os
import subprocess
import sys

SPECS = """
from types import SimpleNamespace
from slimx.trainer.process import install_adapters
install_adapters(plain=True)
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from slimx.extras.exact.adapters.megatron import layers as megatron_exact
from slimx.extras.exact.adapters.megatron.router import ExactRouter
from slimx.extras.exact.adapters.megatron.rotary import rotary_of
from slimx.adapters.megatron import attention as megatron_attention
from slimx.errors import SlimxError
from slimx.extras.exact.operations import Rotary
from slimx.trainer.moe import router

def refusal(kind=ExactRouter, latent=False, **parts):
    options = {"num_experts": 4, "moe_grouped_gemm": True, "multi_latent_attention": latent, "qk_layernorm": True}
    layer = get_gpt_layer_with_transformer_engine_spec(**options)
    block = SimpleNamespace(layer_specs=[layer])
    megatron_attention.install_latent(block)
    router.install(block, kind)
    vars(layer.submodules.self_attention.submodules).update(parts)
    try:
        megatron_exact.install(block, leaves=1, rotary=Rotary(8, 1e4))
    except SlimxError as error:
        return f"{error.code} {error.about}"

assert refusal() is refusal(latent=True) is None
print(refusal(q_layernorm=ModuleSpec(torch.nn.LayerNorm)))
print(refusal(linear_proj=torch.nn.Linear))
print(refusal(router.PolicyRouter))
try:
    rotary_of(None, {"position_embedding_type": "mrope"})
except SlimxError as error:
    print(error.code, error.about)
"""


def test_an_unreplaced_part_of_a_layer_is_named() -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", SPECS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    named = [f"exact.module {part}" for part in ("LayerNorm", "Linear", "PolicyRouter")]
    assert done.stdout.splitlines()[-4:] == [*named, "exact.rotary mrope"]
