"""Runs whose publications bring only what has changed lose an engine and go on with equal weights everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.victims import matching

pytestmark = [pytest.mark.integration, pytest.mark.slow("two whole runs"), pytest.mark.timeout(1800)]
EVERY_FULL = 5


def loses_an_engine(
    directory: Path, model: Path, task: Path, transport: str, back: Callable[[dict[int, dict[str, float]]], bool]
) -> tuple[dict[int, dict[str, float]], str]:
    """A run of two engines of which one is killed, until it is `back`, and some steps more; its metrics by step, and
    what it said."""
    config = write_config(
        directory,
        model,
        task / "train.jsonl",
        numerics={"mode": "exact", "dtype": "bfloat16"},
        trainer={"optimizer": {"lr": 1e-6}},
        rollout={"engines": [{"name": "actor", "count": 2, "max_total_tokens": 4096}]},
        schedule={"steps": 1000},
        publish={"transport": transport, "delta": {"every_full": EVERY_FULL}},
    )
    run, out = TrainProcess(config), directory / "run"
    run.until(lambda: completed_steps(out) >= 3)
    matching("sglang::scheduler")(run)[0].kill()
    known: list[int] = []

    def is_back() -> bool:
        rows = steps(out)
        if not known and back(rows):
            known.append(max(rows))
        return bool(known) and max(rows) >= known[0] + EVERY_FULL + 2

    run.until(is_back)
    run.kill()
    rows = steps(out)
    assert all(row["gap/max"] == 0.0 and row["gap/tokens"] > 0 for row in rows.values())
    assert rows[max(rows)]["publish/engines_verified"] == 2.0
    return rows, run.text()


def test_a_lost_engine_returns_to_whole_weights_the_other_gets_changes(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")

    def back(rows: dict[int, dict[str, float]]) -> bool:
        engines = [row["publish/engines_verified"] for row in rows.values()]
        return 1.0 in engines and engines[-1] == 2.0

    rows, _ = loses_an_engine(tmp_path, tiny_model, task_of_sums, "nixl", back)
    engines = [row["publish/engines_verified"] for row in rows.values()]
    assert set(engines) == {1.0, 2.0}
    # Of the bytes of all weights to the engines that took part; the initial weights were the first publication.
    shares = {
        step: row["publish/wire_mib"] / (row["publish/mib"] * row["publish/engines_verified"])
        for step, row in rows.items()
    }
    assert min(shares.values()) < 0.2
    returned = engines.index(2.0, engines.index(1.0)) + 1
    assert 0.5 < shares[returned] < 1.1, "the engine that came back got all, the other one what had changed"


def test_an_engine_that_is_lost_catches_up_from_files_of_changes(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    rows, text = loses_an_engine(
        tmp_path, tiny_model, task_of_sums, "disk", lambda rows: rows[max(rows)]["engines/restarted"] == 1.0
    )
    shares = [row["publish/wire_mib"] / row["publish/mib"] for row in rows.values()]
    assert min(shares) < 0.2 and max(shares) == pytest.approx(1.0, abs=0.01)
    assert sum(share > 0.9 for share in shares) < len(shares) / 2
    assert any("engine actor-" in line and "/version-" in line for line in text.splitlines()), "without the trainers"
    kept = sorted(path.name for path in (tmp_path / "run/publish").glob("version-??????"))
    assert 1 <= len(kept) <= EVERY_FULL
