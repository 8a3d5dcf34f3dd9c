"""SGLang reads the INT4 checkpoints that `slimx convert hf-to-int4` writes: its layers hold the codes and scales that
were written, on every rank. What it makes of them for its kernels decides whether they could be published."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slimx.convert import run
from tests.checkpoint_stand import write_checkpoint
from tests.unit.convert.convert_stand import WIDE, go
from tests.unit.sglang_process import SGLang

pytestmark = pytest.mark.costly
HF = WIDE | {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
MARLIN, TRITON = "CompressedTensorsWNA16MoE", "CompressedTensorsWNA16TritonMoE"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, sglang: SGLang) -> list[dict[str, Any]]:
    """Collect what engines of two ranks hold on the second: with SGLang's own choice of kernels, and with Triton's."""
    place = tmp_path_factory.mktemp("int4")
    packed = go(run.hf_to_int4(write_checkpoint(place / "bf16", HF)), place / "int4")
    asked = [
        {"path": str(packed), "rank": 1, "world": 2, "arguments": arguments}
        for arguments in ({}, {"moe_runner_backend": "triton"})
    ]
    ran = sglang.run("-m", "tests.unit.adapters.int4_engines", stdin=json.dumps(asked))
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def test_an_engine_that_starts_from_int4_loads_the_very_codes(engines):
    assert [engine["schemes"] for engine in engines] == [[MARLIN], [TRITON]]
    for engine in engines:
        assert engine["layers"] == HF["num_hidden_layers"] and engine["wrong"] == []


def test_marlin_arranges_the_codes_anew_and_triton_keeps_them(engines):
    """The rule engines.int4_model refuses to publish to either: only Triton's could be read back as codes."""
    marlin, triton = engines
    assert triton["kept"] and all(triton["kept"])
    assert marlin["kept"] == []
