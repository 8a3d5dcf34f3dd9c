"""`slimx doctor --gap`: computes the log-probs of one batch with engines and trainers, and shows the gap between them
and where they first differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.batch import make_rows
from slimx.data.records import Trajectory
from slimx.errors import counted
from slimx.extras.doctor.row_digests import first_difference
from slimx.observability.live.safe_text import visible
from slimx.orchestration.run import Run
from slimx.orchestration.session import run_session

FOLDER = "gap"
"""Subdirectory of the run's directory in which the measurement writes its files, so that those of the run do not
change."""


def run_gap(config: Config, console: Console, *, layers: bool) -> bool:
    """Starts trainers and engines as a run would, samples the batch of one step, compares its log-probs and prints the
    figures. Returns True if the log-probs of both sides are bitwise equal.

    `layers`: also find the first part of the model whose results differ. Raises the same errors as a run."""
    section = config.run.model_copy(update={"dir": str(Path(config.run.dir) / FOLDER), "resume": "auto"})
    # The experts of all tokens in the batch are compared.
    rollouts = config.track.rollouts.model_copy(update={"routes": True})
    track = config.track.model_copy(update={"rollouts": rollouts})
    figures: dict[str, float] = {}

    def say(text: str) -> None:
        console.print(visible(text), highlight=False, markup=False, soft_wrap=True)

    run_session(
        config.model_copy(update={"run": section, "track": track}), console, partial(_measure, figures, say, layers)
    )
    return figures["gap/tokens"] > 0 and figures["gap/max"] == 0.0


async def _measure(figures: dict[str, float], say: Callable[[str], None], layers: bool, run: Run) -> None:
    await run.publish()
    batch = await run.watched(run.rollouts.next_batch())
    groups = run.policies[ACTOR].select(batch.groups)
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
    weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in trajectories]
    rows = make_rows(trajectories, [0.0] * len(trajectories), weights)
    async with run.trainers_turn(publish=False):
        actor = run.policies[ACTOR]
        figures |= await actor.trainers.measure_gap(actor.packer(rows), version=run.version)
    for line in describe(figures):
        say(line)
    if layers:
        say(await _first_difference(run, max(trajectories, key=lambda trajectory: len(trajectory.token_ids))))


def describe(figures: dict[str, float]) -> list[str]:
    """Returns sentences about the gap metrics of a batch (`slimx.trainer.step.metrics`): the size of the gap, and the
    part of it that is explained by tokens that trainer and engine route to different experts."""
    tokens = int(figures["gap/tokens"])
    above = int(figures["gap/tokens_above_1e-5"])
    if not tokens:
        return ["no token was sampled with the current weights: there is nothing to compare"]
    lines = [
        f"gap of {counted(tokens, 'token')} between trainers and engines: mean {figures['gap/mean']:.2g}, "
        f"largest {figures['gap/max']:.2g}",
        f"above 1e-5: {counted(above, 'token')} ({above / tokens:.1%})",
    ]
    if above:
        explained = int(figures["gap/tokens_other_routes"])
        lines[1] += f", of which {explained:,} ({explained / above:.1%}) are at or after tokens with other experts"
    lines.append(f"tokens that trainers and engines route to different experts: {int(figures['routes/differing']):,}")
    return lines


async def _first_difference(run: Run, trajectory: Trajectory) -> str:
    """Returns a sentence that names the first part of the model whose results differ between engine and trainer for the
    tokens of one rollout."""
    await run.publish()  # flushes the KV cache, so that the engine computes every token
    actor = run.policies[ACTOR]
    assert actor.engines is not None and actor.client is not None
    engines = actor.engines.engines
    await asyncio.gather(*(engine.perform("request_ranks", None, "begin_trace") for engine in engines))
    await actor.client.score(trajectory.token_ids.tolist(), images=trajectory.images)  # on one engine
    answers = await asyncio.gather(*(engine.perform("request_ranks", None, "end_trace") for engine in engines))
    traces = [ranks[0] for ranks in answers]
    served = max(traces, key=lambda trace: sum(map(len, trace.values())))
    count = len(trajectory.token_ids) - 1
    copies = [trajectory] * actor.sizes.data  # a pass needs one micro-batch per data-parallel rank
    batch = actor.packer(make_rows(copies, [0.0] * len(copies), [np.ones(count, np.float32)] * len(copies)))
    async with run.trainers_turn(publish=False):
        trainers = actor.trainers
        shards = await trainers.sharded(trainers.folded(batch.shards))
        traces = await trainers.call("trace.scores", "the trace of a pass", per_rank=shards)
    trained: dict[str, list[str]] = {}
    for trace in reversed(traces):
        for point, digests in trace.items():
            trained[point] = digests[:count]  # without padding
    difference = first_difference(served, trained)
    if difference is None:
        return "the residual stream is equal in every layer, so any difference arises after the last norm"
    part, tokens = difference
    return f"the first difference is after {part}: {tokens} of {counted(count, 'token')}"
