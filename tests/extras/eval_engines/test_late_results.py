"""Results of evaluations during training reach a run's alerts as they are in its files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from slimx.extras.alerts.curves.watch import Curves
from slimx.extras.alerts.finding import Finding
from slimx.extras.alerts.receiver import Alerts
from tests.extras.eval_engines.test_concurrent import evaluating
from tests.unit.orchestration.run_stand import lines


async def test_every_result_reaches_the_alerts_as_it_is_in_the_file(tmp_path):
    seen: list[dict[str, float]] = []

    class Seen(Curves):
        def look(self, metrics: Mapping[str, float]) -> Iterator[tuple[bool, Finding]]:
            seen.append(dict(metrics))
            return iter(())

    stand = evaluating(tmp_path, schedule__steps=3)
    alerts = Alerts("r", tmp_path, print, factor=10, at_least=1e9, curves=lambda: Seen(1))
    stand.run.records.events = alerts
    alerts.look({"phase": "start", "number": 0, "since": time.time()})
    await stand.train()
    alerts.close()
    assert seen == [line["metrics"] for line in lines(tmp_path / "metrics.jsonl")]
    assert sum("eval/accuracy" in metrics for metrics in seen) == 4
