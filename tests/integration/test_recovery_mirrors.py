"""Lost trainers begin from mirrors of their state in memory; where those are lost, too, from the newest checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.runs import completed_steps
from tests.integration.struck import Moment, Struck, config_of
from tests.integration.victims import matching

pytestmark = [pytest.mark.integration, pytest.mark.slow("whole runs of 12 steps"), pytest.mark.timeout(3600)]

STEPS = 12
EVERY = 2
STORES = matching("ray::MirrorStore")
MIRRORED = "recovery/mirrored_step"


def test_a_lost_rank_continues_from_memory_or_from_the_checkpoint(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    """The second recovery trains every step from the initial weights: that all have the metrics which the run had
    recorded, else it would end, shows that those which followed the mirrors were what they would have been."""
    sections = {
        "recovery": {"trainers": 5, "mirror_every": EVERY},
        "checkpoint": {"every": 100},
    }
    run = Struck(config_of(tmp_path / "run", tiny_model, task_of_sums, count=STEPS, replaced=5, **sections))
    run.process.until(lambda: any(MIRRORED in row for row in run.metrics().values()))
    run.strike(Moment("train", 1, signal.SIGKILL))
    run.goes_on(0, completed_steps(run.directory))
    last = run.metrics()[max(run.metrics())]
    assert last["recovery/from_mirrors"] == 1 and last[MIRRORED] >= EVERY
    assert last["recovery/trained_again"] <= EVERY

    (store,) = STORES(run.process)
    store.kill()
    done, before = completed_steps(run.directory), last["recovery/trained_again"]
    run.strike(Moment("train", 0, signal.SIGKILL))
    run.goes_on(1, completed_steps(run.directory))
    assert run.process.wait(3000) == 0, run.process.text()
    run.process.assert_nothing_left()
    last = run.metrics()[STEPS]
    assert last["recovery/from_mirrors"] == 1 and last["recovery/trained_again"] - before >= done
    assert last[MIRRORED] > done, "another store was started"
    print([f"{one['seconds']:.1f} s down" for one in run.recoveries()], run.process.text())
