"""Writes docs/metrics.md from the table of metrics.

    python -m tools.docs.make_metrics

A unit test compares the page with slimx/observability/tracking/names.py.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

from slimx.observability.tracking.names import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

This page is made from `slimx/observability/tracking/names.py` by `python -m tools.docs.make_metrics`.

Every step is one line of `RUN/metrics.jsonl` and one step in each tracker that section `track` names, under the same
names. A number that is not finite is null in the file, and `nonfinite` says which it was. A part in braces stands for
any text. Algorithms that you write add names of their own.

## Your own

A hook logs a number with `ctx.log(name, value)`, once per name, or adds to one with `ctx.add(name, value)`, in generate
and in reward, also if the reward runs in a process:

```python
async def generate(ctx, prompt):
    ...
    ctx.log("search/hits", len(found))
    return draft.finish()
```

The step then has `hook/search/hits/mean`, `/min`, `/max` and `/count`. They cover one value for each rollout
(generate), trajectory (reward) or group (reward with `reward.scope: group`) that logged it and is used in training;
values from held-out prompts appear under `eval_hook`. A value that is NaN or infinite stays out of the mean and is
counted under `/nonfinite`.

A name that slimx uses, a name logged twice for one trajectory, and a value that is not numeric are refused: the rollout
fails, and its group is counted and named in `dropped.jsonl`. Logged numbers are part of the trajectory, so checkpoints,
saved rollouts and replays keep them.

`slimx.extras.agents.multi_turn` and `slimx.extras.agents.agent` log `tool_calls` in this way: in an environment, the
sum of `Step.tool_calls`.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for section, metrics in groupby(sorted(METRICS, key=_place), key=lambda metric: metric.section):
        parts.append(f"\n## {section}\n\n| metric | meaning |\n| --- | --- |\n")
        parts += [f"| `{metric.name}` | {metric.meaning.replace('|', chr(92) + '|')} |\n" for metric in metrics]
    return "".join(parts)


_SECTIONS = list(dict.fromkeys(metric.section for metric in METRICS))


def _place(metric: Metric) -> int:
    return _SECTIONS.index(metric.section)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page())
