"""What `slimx plan` prints: the report as text or JSON, with predictions where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.config.schema import Config
from slimx.preflight.link_model import Traffic
from slimx.preflight.plan_record import Predicted
from slimx.preflight.plan_report import plan_report, predictions
from slimx.preflight.plan_text import describe, describe_predictions


@dataclass(frozen=True, slots=True)
class Said:
    """Lines for standard output, and the sentences that make the exit code 2."""

    lines: list[str]
    violations: tuple[str, ...]


def run_plan(config: Config, *, predict: bool = False, as_json: bool = False) -> Said:
    """Plan the run of `config`; `predict`: also how long a publication takes, after a test here of 3 seconds."""
    planned = plan_report(config)
    report = planned.report
    if predict and planned.traffic is not None:
        report = report.model_copy(update={"predicted": _predicted(planned.traffic)})
    if as_json:
        return Said([report.model_dump_json(indent=1)], report.violations)
    if report.rank_map is None or (report.engines and report.publication is None):
        return Said([], report.violations)
    lines = describe(report)
    lines += [f"warning     {sentence}" for sentence in report.warnings]
    if report.predicted is not None:
        lines += describe_predictions(report.predicted)
    return Said(lines, report.violations)


def _predicted(traffic: Traffic) -> Predicted:
    from slimx.preflight.rehearsal import rehearse  # imports torch

    trial = rehearse()
    shown = predictions(traffic) if trial.holds else None
    return Predicted(model_off_here=trial.off, shown=trial.holds, publications=shown)
