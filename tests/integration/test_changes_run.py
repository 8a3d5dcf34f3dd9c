"""A run whose publications bring only what has changed loses an engine and goes on with equal weights everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.victims import matching

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]
EVERY_FULL = 5


def test_an_engine_that_is_lost_comes_back_to_whole_weights_while_the_other_gets_changes(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact", "dtype": "bfloat16"},
        trainer={"optimizer": {"lr": 1e-6}},
        rollout={"engines": [{"name": "actor", "count": 2, "max_total_tokens": 4096}]},
        schedule={"steps": 1000},
        publish={"transport": "nixl", "delta": {"every_full": EVERY_FULL}},
    )
    run, out = TrainProcess(config), tmp_path / "run"
    run.until(lambda: completed_steps(out) >= 3)
    before = completed_steps(out)
    matching("sglang::scheduler")(run)[0].kill()

    def both_are_back() -> bool:
        rows = steps(out)
        lost = [step for step, row in rows.items() if row["publish/engines_verified"] == 1]
        return bool(lost) and max(rows) >= max(lost) + EVERY_FULL + 2 and max(lost) > before - 1

    run.until(both_are_back)
    run.kill()
    rows = steps(out)
    assert all(row["gap/max"] == 0.0 and row["gap/tokens"] > 0 for row in rows.values())
    engines = [row["publish/engines_verified"] for row in rows.values()]
    assert set(engines) == {1.0, 2.0} and engines[-1] == 2.0
    # Of the bytes of all weights to the engines that took part; the initial weights were the first publication.
    shares = {
        step: row["publish/wire_mib"] / (row["publish/mib"] * row["publish/engines_verified"])
        for step, row in rows.items()
    }
    assert min(shares.values()) < 0.2
    back = engines.index(2.0, engines.index(1.0)) + 1
    assert 0.5 < shares[back] < 1.1, "the engine that came back got all, the other one what had changed"
