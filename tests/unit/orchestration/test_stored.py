"""Weights that no trainer has read are read before servers answer with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slimx.config.sections.engines import Engines
from slimx.orchestration.engines.serving import check_stored
from tests.refusals import refused

STORED = {
    "bf16": (torch.zeros(300, 7, dtype=torch.bfloat16), "nan"),
    "fp32": (torch.zeros(5, 3, 2), "-inf"),
    "fp8": (torch.full((4, 4), -448.0).to(torch.float8_e4m3fn), "nan"),
    "fp8 of gradients": (torch.full((4, 4), 57344.0).to(torch.float8_e5m2), "-inf"),
    "scalar": (torch.tensor(0.0), "inf"),
}


@pytest.mark.parametrize("kind", STORED)
async def test_weights_that_servers_load_are_checked_in_any_dtype(tmp_path: Path, kind: str):
    values, odd = STORED[kind][0].clone(), STORED[kind][1]
    groups = [Engines(name="judges", frozen=True, model=str(tmp_path)), Engines(name="actors")]
    plain = {"a": values, "codes": torch.full((3,), 255, dtype=torch.uint8)}
    save_file(plain, tmp_path / "model.safetensors")
    await check_stored(str(tmp_path / "without-safetensors"), groups)
    values.view(-1)[-1] = float(odd)
    save_file(plain | {"a": values}, tmp_path / "model.safetensors")
    with refused("checkpoint.finite", about="a"):
        await check_stored(str(tmp_path / "without-safetensors"), groups)
    elsewhere = [Engines(name="judges", frozen=True, urls=("http://127.0.0.1:1",))]
    await check_stored(str(tmp_path), elsewhere)
