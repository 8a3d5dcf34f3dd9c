"""Runs of other kinds have their trainers replaced, too: transports, adapters, references, replayed routes, and
generation that runs ahead."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import completed_steps
from tests.integration.struck import Moment, Struck, config_of, ended_as, undisturbed
from tools.soak.accounts import Ledger

pytestmark = [pytest.mark.integration, pytest.mark.slow("whole runs of every kind"), pytest.mark.timeout(3600)]

STRIKES = [
    Moment("train", 1, signal.SIGKILL),
    Moment("publish", 0, signal.SIGKILL),
    Moment("publish", 1, signal.SIGKILL),
    Moment("generate", 0, signal.SIGKILL),
]
WRITES = Moment("write", 0, signal.SIGKILL)
STEPS = 16
FEW = 9
"""Steps for half of the strikes."""
KINDS: dict[str, dict[str, Any]] = {
    "nixl, a reference that follows, replayed routes": {
        "publish": {"transport": "nixl"},
        "algorithm": {"reference": True, "kl_coef": 0.1, "reference_refresh": 2},
        "trainer": {"moe": {"routing_replay": "R3"}},
    },
    "disk, adapters": {
        "publish": {"transport": "disk"},
        "trainer": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}},
    },
    "nixl with changes, frozen embeddings": {
        "publish": {"transport": "nixl", "delta": {"every_full": 5}},
        "trainer": {"freeze": ["*word_embeddings*"]},
    },
}
AHEAD = {
    "schedule": {"max_staleness": 2},
    "publish": {"transport": "nixl"},
    "rollout": {"concurrency": 8, "max_rollouts": 64},
    "track": {"rollouts": {"keep": 0}},
}


def sections(kind: dict[str, Any]) -> dict[str, Any]:
    """Returns the sections of `kind` over those of `config_of`."""
    return kind | {"trainer": {"watch_deadline": 10} | kind.get("trainer", {})}


def struck(config: Path, moments: Sequence[Moment] = STRIKES, ahead: int | None = 2) -> Struck:
    run = Struck(config, ahead=ahead)
    for moment in moments:
        before, seen = run.recovered(), completed_steps(run.directory)
        run.strike(moment)
        run.goes_on(before, seen)
        print(f"{moment}: {run.recoveries()[-1]['seconds']:.1f} s down", flush=True)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_struck_runs_of_other_kinds_have_the_metrics_of_those_left_alone(
    kind: str, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    if "nixl" in kind:
        pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")
    options = sections(KINDS[kind])
    moments = [*STRIKES, WRITES] if "disk" in kind else STRIKES
    run = struck(config_of(tmp_path / "struck", tiny_model, task_of_sums, count=STEPS, replaced=20, **options), moments)
    alone = config_of(tmp_path / "alone", tiny_model, task_of_sums, count=STEPS, replaced=20, **options)
    ended_as(run, undisturbed(alone))


def test_while_generation_runs_ahead_no_group_is_lost_or_trained_twice(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    """Steps that are trained again must have the metrics that were recorded, else the run would end."""
    config = config_of(tmp_path / "struck", tiny_model, task_of_sums, count=FEW, replaced=20, **sections(AHEAD))
    run = struck(config, STRIKES[:2], ahead=None)
    assert run.process.wait(3000) == 0, run.process.text()
    run.process.assert_nothing_left()
    account = Ledger(run.directory).account()
    assert account is not None and account.problems == [] and account.step == FEW
    assert account.trained == 4 * FEW, account
    assert max(row["staleness/max"] for row in run.metrics().values()) >= 1, "engines generated ahead"
