"""Training with routed experts rounded to INT4: straight-through gradients, fp32 weights unrounded, any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimx.runtime.ports import free_port
from tests.integration.exact_runs import assert_none, gaps
from tests.integration.rank_processes import run_ranks
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"world_size": 1},
    "TP2xETP2": {"world_size": 2, "tensor": 2, "expert_tensor": 2},
}
QAT = {"qat": "int4"}
CASES: list[dict[str, Any]] = [
    {"trainer": QAT},
    {"trainer": QAT | {"world_size": 2, "expert": 2}},
    {"trainer": QAT | {"world_size": 2, "tensor": 2}},
]


def test_gradients_pass_and_the_layout_changes_no_rounded_weight(tiny_model: Path, tmp_path: Path) -> None:
    begun = {}
    for name, layout in LAYOUTS.items():
        out = tmp_path / name
        out.mkdir()
        address = f"tcp://127.0.0.1:{free_port()}"
        job = {"model": str(tiny_model), "layout": layout, "kinds": [], "out": str(out), "init_method": address}
        (out / "job.json").write_text(json.dumps(job))
        run_ranks("tests.integration.qat_rank", out, layout["world_size"])
        for rank in range(layout["world_size"]):
            said = json.loads((out / f"{rank}.json").read_text())
            assert [what for what, true in said.items() if true is False] == []
            assert sum(true is True for true in said.values()) == 12, said
        begun[name] = load_file(out / "begun.safetensors")
    single, other = begun.values()
    assert single.keys() == other.keys()
    assert all(torch.equal(single[name], other[name]) for name in single)


def test_log_probs_are_equal_to_the_last_bit_between_layouts(tiny_model: Path, tmp_path: Path) -> None:
    completions = [
        {"prompt": [3, 5, 7], "tokens": [(k * n) % 127 + 1 for k in range(1, 20)], "temperature": 1.0}
        for n in (3, 5, 11, 17)
    ]
    group = {"model": str(tiny_model), "dtype": "bfloat16", "completions": completions}
    # The first case makes the log-probs of the others, and the last shows that rounding is seen.
    (found,) = gaps(tmp_path, [group | {"cases": [*CASES, {"trainer": {}}]}])
    assert_none([group | {"cases": CASES[1:]}], [found[1:-1]])
    assert found[-1]["gap/max"] > 1e-3


@pytest.mark.slow("a whole run; the layouts have the trainer's part")
def test_engines_serve_the_rounded_weights_without_any_gap(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact", "dtype": "bfloat16"},
        trainer={"world_size": 2, "expert": 2, "qat": "int4", "optimizer": {"lr": 1e-3}},
        schedule={"steps": 3},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert (row["gap/tokens"] > 0, row["gap/max"], row["publish/engines_verified"]) == (True, 0.0, 1)
    run.assert_nothing_left()
