"""`slimx doctor --gap`: one batch through engines and trainers, their gap, and where it begins."""

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
from slimx.extras.doctor.row_digests import first_difference
from slimx.observability.live.safe_text import visible
from slimx.orchestration.run import Run
from slimx.orchestration.session import run_session

FOLDER = "gap"
"""Folder of a run's directory: what is measured does not touch the run."""


def run_gap(config: Config, console: Console, *, layers: bool) -> bool:
    """Start trainers and engines as a run would, sample one step's batch and compare its log-probs.

    `layers`: also say which part of the model is the first that differs. Prints the figures; returns whether the two
    sides agree to the last bit. Raises what a run would raise."""
    own = config.run.model_copy(update={"dir": str(Path(config.run.dir) / FOLDER), "resume": "auto"})
    # A batch of one step: the experts of all of its tokens are compared.
    kept = config.track.rollouts.model_copy(update={"routes": True})
    track = config.track.model_copy(update={"rollouts": kept})
    figures: dict[str, float] = {}

    def say(text: str) -> None:
        console.print(visible(text), highlight=False, markup=False, soft_wrap=True)

    run_session(
        config.model_copy(update={"run": own, "track": track}), console, partial(_measure, figures, say, layers)
    )
    return figures["gap/tokens"] > 0 and figures["gap/max"] == 0.0


async def _measure(figures: dict[str, float], say: Callable[[str], None], layers: bool, run: Run) -> None:
    await run.publish()
    batch = await run.watched(run.rollouts.next_batch())
    groups = run.policies[ACTOR].select(batch.groups)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    weights = [(t.versions()[1:] >= 0).astype(np.float32) for t in trajectories]
    rows = make_rows(trajectories, [0.0] * len(trajectories), weights)
    async with run.trainers_turn(publish=False):
        actor = run.policies[ACTOR]
        figures |= await actor.trainers.measure_gap(actor.packer(rows), version=run.version)
    for line in describe(figures):
        say(line)
    if layers:
        say(await _first(run, max(trajectories, key=lambda each: len(each.token_ids))))


def describe(figures: dict[str, float]) -> list[str]:
    """The gap metrics of a batch (`slimx.trainer.step.metrics`) in sentences: how large it is, and what routes
    explain."""
    tokens, above = int(figures["gap/tokens"]), int(figures["gap/tokens_above_1e-5"])
    if not tokens:
        return ["no token was sampled by the present weights: there is nothing to compare"]
    lines = [
        f"gap of {tokens:,} tokens between trainers and engines: mean {figures['gap/mean']:.2g}, "
        f"largest {figures['gap/max']:.2g}",
        f"above 1e-5: {above:,} tokens ({above / tokens:.1%})",
    ]
    if above:
        explained = int(figures["gap/tokens_other_routes"])
        lines[1] += f", of which {explained:,} ({explained / above:.1%}) have other experts at or before them"
    lines.append(f"tokens that the two sides send to other experts: {int(figures['routes/differing']):,}")
    return lines


async def _first(run: Run, trajectory: Trajectory) -> str:
    """The point at which the two sides part on the tokens of one rollout, in a sentence."""
    await run.publish()  # forgets the KV of these tokens, so that the engine computes them all
    actor = run.policies[ACTOR]
    engines = actor.engines.engines
    await asyncio.gather(*(engine.perform("ask", None, "begin_trace") for engine in engines))
    await actor.client.score(trajectory.token_ids)  # by one of them
    answers = await asyncio.gather(*(engine.perform("ask", None, "end_trace") for engine in engines))
    traces = [ranks[0] for ranks in answers]
    served = max(traces, key=lambda trace: sum(map(len, trace.values())))
    count = len(trajectory.token_ids) - 1
    copies = [trajectory] * actor.sizes.data  # a pass wants one for each data-parallel rank
    batch = actor.packer(make_rows(copies, [0.0] * len(copies), [np.ones(count, np.float32)] * len(copies)))
    async with run.trainers_turn(publish=False):
        trainers = actor.trainers
        each = await trainers.sharded(trainers.folded(batch.shards))
        traces = await trainers.call("trace.scores", "the trace of a pass", per_rank=each)
    whole = {point: rows for trace in reversed(traces) for point, rows in trace.items()}
    trained = {point: rows[:count] for point, rows in whole.items()}  # no padding
    found = first_difference(served, trained)
    if found is None:
        return "the residual stream is the same in every layer: what differs comes after the last norm, if anything"
    part, tokens = found
    return f"the first difference is after {part}: {tokens} of {count} tokens"
