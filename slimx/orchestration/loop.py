"""The training loop.

    PromptSource --Prompt--> generate hook <--HTTP--> SGLang servers (behind sglang-router)
                                  |  Trajectory (tokens, mask, log-probs, weight-version spans, routed experts)
                                  v
                            reward hook --> Group   (kept in ticket order until its step trains it)
                                  |
                                  |  (some algorithms: log-probs, a critic's values -> advantages)
                                  v  TrainBatch per update: packed, balanced over DP, one object per DP rank
                            trainers: log-probs -> loss -> backward -> optimizer, once per update
                                  |
                                  v  weight version v + 1
                            Publisher: gather -> stage -> verify -> commit

One loop serves every schedule. `schedule.max_staleness` says how many batches of groups may be in flight beyond the one
that is waited for: with 0 the engines rest while the trainers train (synchronous), with 1 they generate the next batch
meanwhile (one step off), with more they run several batches ahead, and a publication falls into the middle of rollouts
(fully asynchronous). `run.rollouts.next_batch` keeps the promise that no trajectory is older when it is trained
(slimx/rollout/flow/manager.py, docs/flow.md). With `rollout.partial` it interrupts what is unfinished when it returns,
and goes on with it when it is called again. A run without engines (supervised fine-tuning) goes round the same loop and
publishes nothing.

A run may train several policies (section `policies`): a rollout speaks to all of them, each trajectory belongs to the
one that sampled it, and trainers and publisher stand there once for each. They step together: the version is that of
all.

An engine that is lost does not show here: the others go on, it is started again in the background, and the publication
after the next step brings it back (slimx/engines/fleet/membership.py). If none is left, `run.watched` and `run.publish`
wait for one.

A run that is asked to leave (SIGUSR1) does so where the loop waits for a batch: a step that has begun to train is
finished, one that is still generated is interrupted, and all that was sampled is kept.
"""

from __future__ import annotations

import time

from slimx.config.sections.policies import ACTOR
from slimx.orchestration.batches import batch_metrics
from slimx.orchestration.run import Run
from slimx.orchestration.step.advantages import estimate_advantages
from slimx.orchestration.step.evaluation import evaluate
from slimx.orchestration.step.measure import batch_counts, check_gap, probe_gap, sample_metrics
from slimx.orchestration.step.pairs import train_pairs
from slimx.orchestration.step.reference import refresh_reference
from slimx.orchestration.step.train import train_step


async def train(run: Run) -> None:
    """Run the loop from `run.step` to `schedule.steps`."""
    schedule, config = run.config.schedule, run.config
    await run.publish()
    if run.step == 0:
        run.records.start(await evaluate(run), run.version)
    while run.step < schedule.steps:
        began, run.current = time.perf_counter(), run.step + 1
        with run.phase("generate"):
            batch = await run.watched(run.unless_leaving(run.rollouts.next_batch()))
        if batch is None:
            await run.leave()
        run.records.keep(run.current, run.version, batch)
        with run.phase("prepare"):
            rows = run.updates(batch.groups)
            metrics = batch_counts(batch)
            for policy in run.policies.values():
                metrics |= policy.named(sample_metrics(policy, batch.groups, run.version))
        if schedule.colocate:
            with run.phase("sleep"):
                await run.engines.sleep()
                await run.trainers.reload()
        if config.algorithm.needs_whole_step:
            with run.phase("values"):
                metrics |= await run.watched(estimate_advantages(run, batch.groups, rows[ACTOR]))
        with run.phase("prepare"):
            updates = run.packed(rows)
            for policy in run.policies.values():
                metrics |= policy.named(batch_metrics(updates[policy.name]))
        with run.phase("train"):
            if config.algorithm.scores:
                metrics |= await run.watched(train_pairs(run, batch.groups, rows[ACTOR]), training=True)
            else:
                metrics |= await run.watched(train_step(run, batch.groups, rows, updates), training=True)
        run.step += 1
        if schedule.colocate:
            with run.phase("wake"):
                await run.trainers.offload(weights=False)
                await run.engines.wake()
        metrics |= await run.publish()
        if run.engines is not None and not metrics["gap/tokens"]:
            with run.phase("probe"):
                metrics |= await run.watched(probe_gap(run, batch.groups))
        if run.engines is not None:
            check_gap(config, metrics, run.step)
        if run.due(config.eval.every or 0) or run.step == schedule.steps:
            metrics |= await evaluate(run)
        await run.records.kept()
        seconds = time.perf_counter() - began
        tokens = sum(update.tokens for several in updates.values() for update in several)
        metrics["perf/tokens_per_second"] = tokens / seconds
        run.record(metrics | await run.trainer_metrics(), batch.groups, seconds)
        run.checkpoints.check()
        if run.due(config.algorithm.reference_refresh):
            await refresh_reference(run)
        await run.mirror()
        if run.checkpoints.due(run.step):
            await run.save()
        if run.due(config.checkpoint.export_every):
            await run.export(f"hf-{run.step:06d}")
    await run.save()
    if config.checkpoint.export_hf:
        await run.export("hf")
    await run.finish_save()
