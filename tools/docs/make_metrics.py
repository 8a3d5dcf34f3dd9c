"""Writes docs/metrics.md from the table of metrics and from the report's table of good values.

    python -m tools.docs.make_metrics

A unit test compares the page with slimx/observability/tracking/names.py and slimx/extras/report/meanings.py.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

from slimx.extras.report.meanings import GOOD, Good
from slimx.observability.tracking.names import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

`python -m tools.docs.make_metrics` generates this page from `slimx/observability/tracking/names.py` and
`slimx/extras/report/meanings.py`. The report and `slimx watch` show the same texts with every card and chart.

Every training step is one line of `RUN/metrics.jsonl`, and one step in each tracker that section `track` names; metrics
have the same names in all of them. A value that is not finite is null under `metrics` in the file, and `nonfinite` in
the same line contains it as text. A part of a name in braces stands for any text. Algorithms that you write add metrics
with names that you choose.

## Your own

Generate and reward hooks can log numbers, also if the reward runs in a separate process: `ctx.log(name, value)` logs a
number, once per name, and `ctx.add(name, value)` adds to a number that starts at 0.

```python
async def generate(ctx, prompt):
    ...
    ctx.log("search/hits", len(found))
    return draft.finish()
```

The step then has the metrics `hook/search/hits/mean`, `/min`, `/max` and `/count`. They are computed from one value for
each rollout (generate hook), trajectory (reward hook) or group (reward hook with `reward.scope: group`) that logged the
number and is used in training; values from held-out prompts appear under `eval_hook`. Values that are NaN or infinite
are left out of the mean and counted under `/nonfinite`.

A name that slimx uses, a second `ctx.log` of a name for one trajectory, and a value that is not numeric are errors: the
rollout fails, and its group is counted as dropped and listed in `dropped.jsonl`. Logged numbers are part of the
trajectory, so checkpoints, saved rollouts and replays contain them.

`slimx.extras.agents.multi_turn` and `slimx.extras.agents.agent` log the number `tool_calls` in this way; with an
environment, it is the sum of `Step.tool_calls`.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for section, metrics in groupby(sorted(METRICS, key=_place), key=lambda metric: metric.section):
        parts.append(f"\n## {section}\n\n| metric | meaning | good |\n| --- | --- | --- |\n")
        for metric in metrics:
            good = GOOD.get(metric.name, Good("")).text
            parts.append(f"| `{metric.name}` | {metric.meaning.replace('|', chr(92) + '|')} | {good} |\n")
    return "".join(parts)


_SECTIONS = list(dict.fromkeys(metric.section for metric in METRICS))


def _place(metric: Metric) -> int:
    return _SECTIONS.index(metric.section)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page())
