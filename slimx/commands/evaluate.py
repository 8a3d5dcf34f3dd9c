"""`slimx eval`: the held-out prompts of a configuration, answered by a checkpoint; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from slimx.cluster.connection import device_of
from slimx.cluster.starting import Starting
from slimx.config.schema import Config
from slimx.models.families import configured_model
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.engines.serving import serving
from slimx.orchestration.lifetime.lifetime import Alarm, EndingStack, run_with_ray
from slimx.orchestration.start.prepare import Sources, check_sources
from slimx.orchestration.state.directory import EVALUATIONS
from slimx.orchestration.step.evaluation import answer_all, judge

LOGGED, MEAN = "eval_hook/", "/mean"
"""Around the name of a number that hooks log."""


def run_evaluation(config: Config, note: Callable[[str], None]) -> dict[str, Any]:
    """{checkpoint, prompts: by set, metrics} of one evaluation, also written into RUN/eval/results.jsonl. `config`: of
    engines without trainers (slimx.orchestration.start.early).

    Raises SlimxError, or Interrupted after a stop."""
    device = device_of(config)
    sources = check_sources(config, configured_model(config), device)
    directory = Path(config.run.dir) / EVALUATIONS
    found: dict[str, Any] = {}
    starting = Starting.of(config, trainers=False)
    note(starting.line)
    work = partial(_session, config, sources, directory, starting, note, found)
    run_with_ray(config, device, work, trainers=False)
    results = JsonlFile(directory / "results.jsonl", resume_step=0)
    results.write(found)
    results.close()
    return found


async def _session(
    config: Config,
    sources: Sources,
    directory: Path,
    starting: Starting,
    note: Callable[[str], None],
    found: dict[str, Any],
    alarm: Alarm,
) -> None:
    async with EndingStack(alarm) as stack:
        service = await stack.enter_async_context(serving(config, sources, directory, note))
        note(starting.ready)
        found |= await evaluate_once(service)


async def evaluate_once(service: EngineService) -> dict[str, Any]:
    """Answer the held-out prompts with started engines; their scores."""
    config, prompts, maker = service.config, service.sources.eval_prompts, service.make_maker()
    try:
        outcomes = await service.watched(answer_all(maker, prompts))
    finally:
        maker.close()
    group = config.rollout.policy_engines[0]
    return {
        "checkpoint": group.model or config.model.path,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "samples": config.eval.samples,
        "temperature": config.eval.temperature,
        "prompts": {name: len(several) for name, several in prompts.items()},
        "metrics": judge(config.eval, prompts, outcomes),
    }


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """A row for each set and one for all where there are several, then a line for each number that hooks logged."""
    metrics = found["metrics"]
    overall = [key.removeprefix("eval/") for key in metrics if key.count("/") == 1 and key != "eval/failed"]
    samples = found["samples"]
    yield (
        f"{found['checkpoint']}: {samples} answers per prompt (accuracy is avg@{samples}), temperature "
        f"{found['temperature']:g}"
    )
    yield f"{'set':<20}{'prompts':>8}" + "".join(f"{name:>10}" for name in overall)
    rows = {f"eval/{name}/": (name, count) for name, count in found["prompts"].items() if name}
    rows["eval/"] = ("all", sum(found["prompts"].values()))
    for prefix, (name, count) in rows.items():
        cells = "".join(
            f"{metrics[prefix + key]:>10.3f}" if prefix + key in metrics else f"{'-':>10}" for key in overall
        )
        yield f"{name:<20}{count:>8}{cells}"
    for key, value in metrics.items():
        if key.startswith(LOGGED) and key.endswith(MEAN):
            yield f"{key.removeprefix(LOGGED).removesuffix(MEAN)} {value:.3f}, the mean of what hooks logged"
    if failed := metrics["eval/failed"]:
        yield f"{failed:.0f} prompts failed, and count as 0"
