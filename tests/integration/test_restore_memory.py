"""Saving and restoring a trainer needs no memory of the GPU beside its state; moments of the host never visit it."""

from __future__ import annotations

import json

import pytest

from tests.integration.rank_processes import run_programs

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Bytes on a pretended GPU, by `restore_rank`, with an Adam that loads as Transformer Engine's does."""
    out = tmp_path_factory.mktemp("restore")
    command = ["-m", "tests.integration.restore_rank", str(out)]
    run_programs([command], [out / "output.txt"], role="rank_on_pretended_gpu")
    return json.loads((out / "bytes.json").read_text())


def test_a_restore_brings_moments_to_the_host_without_the_gpu(found):
    assert found["moments"] == 4 * found["weights"], "fp32, two of them, of a bf16 model"
    assert found["restored"] <= found["weights"] // 16, "joined projections are read in place, too"
    assert found["on_device"] == 0


def test_a_state_that_is_loaded_brings_moments_to_the_host_without_the_gpu(found):
    assert found["loaded"] == 0


def test_a_save_gathers_nothing_on_the_gpu(found):
    assert found["saved"] <= found["weights"] // 16
