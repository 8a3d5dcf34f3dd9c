"""`slimx eval`: evaluates a checkpoint on the held-out prompts of a configuration, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from slimx.cluster.connection import device_of
from slimx.cluster.starting import Starting
from slimx.config.schema import Config
from slimx.config.sections.eval import Eval
from slimx.errors import counted
from slimx.extras.evaluation.checks import EVALUATIONS
from slimx.extras.generation.serving import serving
from slimx.json_types import Json
from slimx.models.families import configured_model
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.lifetime.lifetime import Alarm, EndingStack, run_with_ray
from slimx.orchestration.start.prepare import Sources, check_sources
from slimx.orchestration.step.evaluation import answer_all, eval_metrics

LOGGED = "eval_hook/"
"""Prefix that marks the names of metrics that hooks log during an evaluation."""
MEAN = "/mean"
"""Suffix that marks the names of metrics that are means."""


def run_evaluation(config: Config, note: Callable[[str], None]) -> Json:
    """Evaluates the checkpoint of `config` once, appends the result to RUN/eval/results.jsonl, and returns it:
    {checkpoint, prompts: number of prompts by prompt set, metrics, ...}.

    `config`: a configuration with engines and without trainers (slimx.extras.generation.checks). `note`: receives
    lines of text about the progress. Raises SlimxError if the evaluation fails, and Interrupted after a signal."""
    device = device_of(config)
    sources = check_sources(config, configured_model(config), device)
    directory = Path(config.run.dir) / EVALUATIONS
    result: Json = {}
    starting = Starting.of(config, trainers=False)
    note(starting.line)
    work = partial(_session, config, sources, directory, starting, note, result)
    run_with_ray(config, device, work, trainers=False)
    results = JsonlFile(directory / "results.jsonl", resume_step=0)
    results.write(result)
    results.close()
    return result


async def _session(
    config: Config,
    sources: Sources,
    directory: Path,
    starting: Starting,
    note: Callable[[str], None],
    result: Json,
    alarm: Alarm,
) -> None:
    async with EndingStack(alarm) as stack:
        service = await stack.enter_async_context(serving(config, sources, directory, note))
        note(starting.ready)
        result |= await evaluate_once(service)


async def evaluate_once(service: EngineService) -> Json:
    """Evaluates on the held-out prompts with the running engines of `service`, and returns the result: {checkpoint,
    time, sets: settings by prompt set, prompts, metrics}."""
    config = service.config
    prompts = service.sources.eval_prompts
    maker = service.make_maker()
    try:
        outcomes = await service.watched(answer_all(maker, prompts))
    finally:
        maker.close()
    group = config.served.policy[0]
    return {
        "checkpoint": group.model or config.model.path,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "sets": {name: _settings(config, options) for name, options in config.eval.sets.items()},
        "prompts": {name: len(rows) for name, rows in prompts.items()},
        "metrics": eval_metrics(config.eval, prompts, outcomes),
    }


def _settings(config: Config, options: Eval) -> Json:
    """Returns the settings with which the answers of a prompt set were sampled."""
    return {
        "samples": options.samples,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_new_tokens": options.max_new_tokens or config.rollout.sampling.max_new_tokens,
    }


def table(result: Json) -> Iterator[str]:
    """Yields the lines of the table that shows `result`: one row per prompt set, one row for all sets together if there
    are several, and one line per metric that hooks logged."""
    metrics = result["metrics"]
    columns = []
    for key in metrics:
        if key.count("/") == 1 and key != "eval/failed":
            columns.append(key.removeprefix("eval/"))
    settings = result["sets"]
    sampled = {(used["samples"], used["temperature"]) for used in settings.values()}
    if len(sampled) == 1:
        ((samples, temperature),) = sampled
        yield (
            f"{result['checkpoint']}: {counted(samples, 'answer')} per prompt (accuracy is avg@{samples}), temperature "
            f"{temperature:g}"
        )
    else:
        yield f"{result['checkpoint']}:"
        for name, used in settings.items():
            yield (
                f"{name}: {counted(used['samples'], 'answer')} per prompt (accuracy is avg@{used['samples']}), "
                f"temperature {used['temperature']:g}"
            )
    yield f"{'set':<20}{'prompts':>8}" + "".join(f"{name:>10}" for name in columns)
    rows = {}
    for name, count in result["prompts"].items():
        if name:
            rows[f"eval/{name}/"] = (name, count)
    rows["eval/"] = ("all", sum(result["prompts"].values()))
    for prefix, (name, count) in rows.items():
        cells = ""
        for column in columns:
            value = metrics.get(prefix + column)
            cells += f"{'-':>10}" if value is None else f"{value:>10.3f}"
        yield f"{name:<20}{count:>8}{cells}"
    for key, value in metrics.items():
        if key.startswith(LOGGED) and key.endswith(MEAN):
            yield f"{key.removeprefix(LOGGED).removesuffix(MEAN)} {value:.3f} (mean of the values logged by hooks)"
    failed = metrics["eval/failed"]
    if failed:
        yield f"{counted(int(failed), 'prompt')} failed, counted as reward 0"
