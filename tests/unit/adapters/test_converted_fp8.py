"""SGLang's own reading of a directory in fp8: which layers it expects codes and scales of, and how it shapes them."""

from __future__ import annotations

import json
from pathlib import Path

from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from tests.checkpoint_stand import QWEN3_MOE, tensors_of, write_checkpoint
from tests.warm.sglang import run_with_sglang

ASK = """
import json, sys
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
found = Fp8Config.from_config(json.load(open(sys.argv[1] + "/config.json"))["quantization_config"])
fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
said = {name: is_layer_skipped(name, found.ignored_layers, fused_mapping=fused) for name in sys.argv[2:]}
print(json.dumps([found.weight_block_size, found.activation_scheme, found.is_checkpoint_fp8_serialized, said]))
"""
LAYER = "model.layers.1."
IN_FP8 = {
    LAYER + "self_attn.qkv_proj": True,
    LAYER + "self_attn.o_proj": True,
    LAYER + "mlp.experts": True,
    LAYER + "mlp.gate": False,
    "lm_head": False,
}


def test_sglang_expects_fp8_where_it_is_and_only_there(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 128, "num_experts": 2, "num_hidden_layers": 2}
    source = write_checkpoint(tmp_path / "source", QWEN3_MOE | wide)
    convert(run.hf_to_fp8(source), tmp_path / "fp8", threads=1, verify=False)
    result = run_with_sglang("-c", ASK, str(tmp_path / "fp8"), *IN_FP8)
    assert result.returncode == 0, result.stderr[-2000:]
    block, activation, serialized, skipped = json.loads(result.stdout.splitlines()[-1])
    assert (block, activation, serialized) == ([128, 128], "dynamic", True)
    assert skipped == {name: not quantized for name, quantized in IN_FP8.items()}
    scales = {name for name in tensors_of(tmp_path / "fp8") if name.endswith("_scale_inv")}
    assert {name.split("model.layers.1.")[1] for name in scales if LAYER in name} >= {
        "self_attn.q_proj.weight_scale_inv",
        "self_attn.o_proj.weight_scale_inv",
        "mlp.experts.1.down_proj.weight_scale_inv",
    }
    assert not [name for name in scales if "gate.weight" in name or "lm_head" in name]
