"""`slimx plan`: the report as text or JSON, with predictions where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR, Policy
from slimx.errors import SlimxError
from slimx.extras.datasets.command import rendered_lines
from slimx.extras.datasets.files.directories import matching
from slimx.extras.datasets.files.hub import HUB
from slimx.extras.planner.plan.report import Planned, plan_report, predictions
from slimx.extras.planner.plan.suggest import nearest_layout, suggest_layouts
from slimx.extras.planner.plan.suggest_engines import suggest_engines
from slimx.extras.planner.plan.text import describe, describe_predictions, describe_suggestions, describe_together
from slimx.extras.planner.plan.together import refusals, together
from slimx.extras.planner.record import PlanReport, Predicted
from slimx.extras.planner.rules.machine import unused_warnings
from slimx.models.families import ModelSpec
from slimx.numerics.mode import mode_of
from slimx.orchestration.start.prompts import first_prompt, run_tokenizer
from slimx.preflight.hardware import machine_of
from slimx.trainer.device.backends import choose_backends, installed


@dataclass(frozen=True, slots=True)
class Said:
    """Lines for standard output, and the sentences that make the exit code 2."""

    lines: list[str]
    violations: tuple[str, ...]


def run_plan(config: Config, *, predict: bool = False, suggest: bool = False, as_json: bool = False) -> Said:
    """Plan the run of `config`. `predict`: also how long a publication takes, after a test here of 3 seconds;
    `suggest`: also layouts that fit `cluster.gpu`, of which the nearest is told anyway where the run does not."""
    reports: dict[str, PlanReport] = {}
    first = 0
    for name, own in config.by_policy.items():
        reports[name] = _planned(own, config.policies, first, predict=predict, suggest=suggest)
        first += reports[name].rank_map.gpus if reports[name].rank_map is not None else 0
    sums = together([*reports.values()]) if len(reports) > 1 else None
    report = reports.pop(ACTOR)
    prompt, wrong = _first_prompt(config)
    further = [f"policies.{name}: {sentence}" for name, each in reports.items() for sentence in each.violations]
    warnings = report.warnings
    if sums is not None:
        further += [f"all policies together: {problem}" for problem in refusals(sums, machine_of(config.cluster))]
        warnings += tuple(unused_warnings(config.rollout, config.cluster, sums)) if report.device == "cuda" else ()
    update = {"violations": (*report.violations, *wrong, *further), "warnings": warnings}
    report = report.model_copy(update={"policies": reports, "together": sums, **update})
    if as_json:
        return Said([report.model_dump_json(indent=1)], report.violations)
    lines = [*_lines(report, prompt)]
    for name, each in reports.items():
        of = config.policies[name].engines_of
        whose = "trainers and engines of its own" if of is None else f"trainers of its own, engines of {of}"
        lines += ["", f"policy      {name}: {whose}", *_lines(each, [])]
    if sums is not None:
        lines += ["", *describe_together(sums)]
    return Said(lines, report.violations)


def _planned(config: Config, policies: Mapping[str, Policy], first: int, *, predict: bool, suggest: bool) -> PlanReport:
    """The report of one policy of a run that trains `policies`, from GPU `first` on."""
    planned = plan_report(config, policies, first=first)
    report = planned.report
    kernels = _kernels(config, planned.spec, report.device)
    report = report.model_copy(update={"kernels": kernels, **_suggestions(config, planned, suggest=suggest)})
    if predict and planned.published is not None:
        report = report.model_copy(update={"predicted": _predicted(planned)})
    return report


def _lines(report: PlanReport, prompt: list[str]) -> list[str]:
    lines = describe(report) if report.complete else []
    lines += [f"warning     {sentence}" for sentence in report.warnings]
    lines += prompt
    if report.predicted is not None:
        lines += describe_predictions(report.predicted)
    return [*lines, *describe_suggestions(report)]


def _first_prompt(config: Config) -> tuple[list[str], list[str]]:
    """The first prompt as the model is given it, where a local file has it, and what would refuse the run. A plan needs
    neither prompts nor a tokenizer: without a tokenizer, it says why the prompt is not shown."""
    rollout = config.rollout
    path = rollout.prompts or rollout.sources[0].path
    there = not (rollout.replay or path.startswith(HUB)) and (Path(path).exists() or bool(matching(Path(path))))
    if not there and not rollout.template:
        return [], []
    try:
        prompt = first_prompt(config) if there else None
        tokenizer = run_tokenizer(config)
        if prompt is None:
            return [], []
        return ["prompt      the first one, as the model is given it", *rendered_lines(prompt, tokenizer)], []
    except SlimxError as error:
        if error.code in ("tokenizer.missing", "tokenizer.broken"):
            return [f"prompt      not shown: {error}"] if there else [], []
        return [], [str(error)]


def _kernels(config: Config, spec: ModelSpec, device: str) -> tuple[str, ...]:
    """The trainers' kernels where trainers have the packages of this environment, and why others are not taken."""
    try:
        return choose_backends(
            config.trainer,
            device=device,
            packages=installed(),
            replaced=mode_of(config).replaces_layers,
            layer_kind=spec.layer_kind,
            experts=spec.experts,
        ).reasons
    except SlimxError as error:  # no violation: the plan may be for machines that have the package
        return (str(error),)


def _suggestions(config: Config, planned: Planned, *, suggest: bool) -> dict[str, Any]:
    spec, machine, device = planned.spec, planned.machine, planned.report.device
    if suggest:
        suggestions, searched = suggest_layouts(config, spec, machine, device)
        engines = suggest_engines(config, spec, machine)
        return {"suggestions": suggestions, "searched": searched, "suggested_engines": engines}
    out: dict[str, Any] = {}
    if machine.gpu is not None and device == "cuda":
        if planned.report.refits:
            out["nearest"], out["searched"] = nearest_layout(config, spec, machine, device)
        if not all(engine.fits for engine in planned.report.engine_memory):
            out["suggested_engines"] = suggest_engines(config, spec, machine)
    return out


def _predicted(planned: Planned) -> Predicted:
    from slimx.extras.planner.links.rehearsal import rehearse  # imports torch

    trial = rehearse()
    shown = predictions(planned) if trial.holds else None
    return Predicted(model_off_here=trial.off, shown=trial.holds, publications=shown)
