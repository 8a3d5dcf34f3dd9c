"""Plans and findings of the doctor as values: `slimx.plan` and `slimx.doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slimx.config.load import Overrides
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.extras.doctor.machine import findings
from slimx.extras.planner.planning import run_plan
from slimx.extras.planner.record import PlanReport
from slimx.extras.scripting.functions import Hook, with_hooks
from slimx.extras.scripting.rows import Rows
from slimx.extras.scripting.training import configured


@dataclass(frozen=True, slots=True, repr=False)
class RunPlan:
    """Plan of a run. It is shown as the text that `slimx plan` prints."""

    text: str
    violations: tuple[str, ...]
    """Reasons why the run cannot start as planned; empty if it can."""
    report: PlanReport
    """The plan's figures, as `slimx plan --json` prints them."""

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def plan(
    source: str | Path | Mapping[str, object] | Config,
    overrides: Overrides = (),
    *,
    suggest: bool = False,
    predict: bool = False,
) -> RunPlan:
    """Describes a run before it starts, from its configuration and the model's config.json alone: layout, memory,
    batches.

    `source`, `overrides`: as for `slimx.load_config`. `suggest`: also search layouts that fit. `predict`: also predict
    the seconds of a publication. Raises SlimxError for an invalid configuration; a run that does not fit is in
    `violations` instead."""
    output = run_plan(configured(source, overrides), suggest=suggest, predict=predict)
    return RunPlan("\n".join([*output.lines, *output.violations]), output.violations, output.report)


def doctor(
    source: str | Path | Mapping[str, object] | Config | None = None,
    overrides: Overrides = (),
    *,
    generate: Hook | None = None,
    reward: Hook | None = None,
    keep: Hook | None = None,
) -> Rows:
    """Examines this machine, and with `source` also the run: checks its configuration, prompts and model, and tries its
    hooks on one prompt with scripted engines.

    `source`, `overrides`, `generate`, `reward`, `keep`: as for `slimx.train`. Returns rows of section, name, text,
    problem (what is wrong, and the remedy; None if nothing is) and needed (True if the problem prevents a run)."""
    rows = Rows()
    for section, found in findings():
        row = {"section": section, "name": found.name, "text": found.text, "problem": found.problem}
        rows.append({**row, "needed": found.problem is not None and found.needed})
    if source is None:
        return rows
    try:
        config = with_hooks(configured(source, overrides), generate=generate, reward=reward, keep=keep)
        rows += _examined(config)
    except SlimxError as error:
        rows.append(_row("configuration", "refused", str(error)))
    return rows


def _examined(config: Config) -> Rows:
    """Returns the findings about a run. Raises SlimxError if the run cannot start."""
    from slimx.extras.doctor.hooks.doctor import examine_hooks  # these import torch
    from slimx.extras.scripting.alone import alone
    from slimx.orchestration.start.prepare import check_run

    prepared = check_run(config)
    rows = Rows([_row("prompts", f"{len(prepared.prompts)}", None)])
    if config.rollout.replay:
        return rows
    with alone(signals=False):
        tried = examine_hooks(config)
    rows.append(_row("hooks", "\n".join(tried.lines), None))
    rows += [_row("hooks", note.code, str(note), needed=False) for note in tried.notes]
    rows += [_row("hooks", problem.code, str(problem)) for problem in tried.problems]
    return rows


def _row(name: str, text: str, problem: str | None, *, needed: bool = True) -> dict[str, object]:
    return {
        "section": "Run",
        "name": name,
        "text": text,
        "problem": problem,
        "needed": needed and problem is not None,
    }
