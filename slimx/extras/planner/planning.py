"""`slimx plan`: produces the report as text or JSON, with predictions and suggestions if requested."""

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
from slimx.extras.planner.plan.policy_sums import refusals, sum_over_policies
from slimx.extras.planner.plan.publication import CompiledPublication, predictions
from slimx.extras.planner.plan.report import Planned, plan_report
from slimx.extras.planner.plan.suggest import nearest_layout, suggest_layouts
from slimx.extras.planner.plan.suggest_engines import suggest_engines
from slimx.extras.planner.plan.text import describe, describe_predictions, describe_suggestions, describe_together
from slimx.extras.planner.record import PlanReport, Predicted
from slimx.extras.planner.rules.machine import unused_warnings
from slimx.extras.vision.prompts.check import RunImages
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.numerics.mode import mode_of
from slimx.orchestration.start.prompts import first_prompt, run_tokenizer
from slimx.preflight.hardware import machine_of
from slimx.trainer.device.backends import choose_backends, installed


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """Lines for standard output, the violations, with which the exit code is 2, and the report that they describe."""

    lines: list[str]
    violations: tuple[str, ...]
    report: PlanReport


def run_plan(config: Config, *, predict: bool = False, suggest: bool = False, as_json: bool = False) -> PlanOutput:
    """Plans the run that `config` describes, and returns the output.

    `predict`: also predict the duration of a publication, after testing the link model on this machine for about 3 s.
    `suggest`: also search for layouts that fit `cluster.gpu`; the nearest one is always reported if the run does not
    fit. `as_json`: output one JSON object instead of text."""
    reports: dict[str, PlanReport] = {}
    first = 0
    for name, policy_config in config.by_policy.items():
        reports[name] = _planned(policy_config, config.policies, first, predict=predict, suggest=suggest)
        placement = reports[name].rank_map
        if placement is not None:
            first += placement.gpus
    sums = None
    if len(reports) > 1:
        sums = sum_over_policies([*reports.values()])
    report = reports.pop(ACTOR)
    prompt, prompt_problems = _first_prompt(config)
    violations = [*report.violations, *prompt_problems]
    for name, policy_report in reports.items():
        violations += [f"policies.{name}: {sentence}" for sentence in policy_report.violations]
    warnings = report.warnings
    if sums is not None:
        violations += [f"all policies together: {problem}" for problem in refusals(sums, machine_of(config.cluster))]
        if report.device == "cuda":
            warnings += tuple(unused_warnings(config.served, config.cluster, sums))
    update = {"violations": tuple(violations), "warnings": warnings}
    report = report.model_copy(update={"policies": reports, "together": sums, **update})
    if as_json:
        return PlanOutput([report.model_dump_json(indent=1, by_alias=True)], report.violations, report)
    lines = [*_lines(report, prompt)]
    for name, policy_report in reports.items():
        actor = config.policies[name].engines_of
        parts = "separate trainers and engines"
        if actor is not None:
            parts = f"separate trainers, engines of {actor}"
        lines += ["", f"policy      {name}: {parts}", *_lines(policy_report, [])]
    if sums is not None:
        lines += ["", *describe_together(sums)]
    return PlanOutput(lines, report.violations, report)


def _planned(config: Config, policies: Mapping[str, Policy], first: int, *, predict: bool, suggest: bool) -> PlanReport:
    """Returns the report of one policy. `policies`: all policies of the run. `first`: index of the policy's first
    GPU."""
    planned = plan_report(config, policies, first=first)
    report = planned.report
    kernels = _kernels(config, planned.spec, report.device)
    report = report.model_copy(update={"kernels": kernels, **_suggestions(config, planned, suggest=suggest)})
    if predict and planned.compiled is not None and report.trainer is not None:
        predicted = _predicted(planned.compiled, config, report, report.trainer)
        report = report.model_copy(update={"predicted": predicted})
    return report


def _lines(report: PlanReport, prompt: list[str]) -> list[str]:
    lines = []
    if report.complete:
        lines += describe(report)
    lines += [f"warning     {sentence}" for sentence in report.warnings]
    lines += prompt
    if report.predicted is not None:
        lines += describe_predictions(
            report.predicted, on_gpus=report.publication is not None and report.publication.on_gpus
        )
    return [*lines, *describe_suggestions(report)]


def _first_prompt(config: Config) -> tuple[list[str], list[str]]:
    """Returns two lists of lines: the first prompt as the model receives it, and violations.

    The first list is empty if no local file contains the prompt. A missing or broken tokenizer is not a violation,
    because a plan needs neither prompts nor a tokenizer; the first list then says why the prompt is not shown."""
    rollout = config.rollout
    path = rollout.prompts or rollout.sources[0].path
    local = not rollout.replay and not path.startswith(HUB) and (Path(path).exists() or bool(matching(Path(path))))
    if not local and not rollout.template:
        return [], []
    try:
        images = None if config.trainer.vision is None else RunImages(config, keep=False)
        prompt = first_prompt(config, images) if local else None
        tokenizer = run_tokenizer(config)
        if prompt is None:
            return [], []
        model = None if images is None else images.model
        return [
            "prompt      the first one, as the model receives it",
            *rendered_lines(prompt, tokenizer, model, path),
        ], []
    except SlimxError as error:
        if error.code in ("tokenizer.missing", "tokenizer.broken", "setup.missing"):
            return [f"prompt      not shown: {error}"] if local else [], []
        return [], [str(error)]


def _kernels(config: Config, spec: ModelSpec, device: str) -> tuple[str, ...]:
    """Returns sentences about the kernels that trainers would choose with the packages of this environment, and the
    reasons why they would not choose others."""
    try:
        return choose_backends(
            config.trainer,
            device=device,
            packages=installed(),
            replaced=mode_of(config).replaces_layers,
            layer_kind=spec.layer_kind,
            experts=spec.experts,
        ).reasons
    except SlimxError as error:  # not a violation, because the machines that the plan is for may have the package
        return (str(error),)


def _suggestions(config: Config, planned: Planned, *, suggest: bool) -> dict[str, Any]:
    spec, machine, device = planned.spec, planned.machine, planned.report.device
    if suggest:
        suggestions, searched = suggest_layouts(config, spec, machine, device)
        engines = suggest_engines(config, spec, machine)
        return {"suggestions": suggestions, "searched": searched, "suggested_engines": engines}
    fields: dict[str, Any] = {}
    if machine.gpu is not None and device == "cuda":
        if planned.report.refits:
            fields["nearest"], fields["searched"] = nearest_layout(config, spec, machine, device)
        if not all(engine.fits for engine in planned.report.engine_memory):
            fields["suggested_engines"] = suggest_engines(config, spec, machine)
    return fields


def _predicted(compiled: CompiledPublication, config: Config, report: PlanReport, sizes: Sizes) -> Predicted:
    from slimx.extras.planner.links.rehearsal import rehearse  # imports torch

    trial = rehearse()
    shown = None
    if trial.holds:
        # Engines of another policy load the weights of that policy, which the plan of that policy counts.
        loaded = max((record.weights for record in report.engine_memory), default=0)
        shown = predictions(compiled, config.publish, sizes, report.engines, loaded)
    return Predicted(model_off_here=trial.off, shown=trial.holds, publications=shown)
