"""The training loop.

    PromptSource --Prompt--> generate hook <--HTTP--> SGLang servers (behind sglang-router)
                                  |  Trajectory (tokens, mask, log-probs, weight-version spans, routed experts)
                                  v
                            reward hook --> Group   (kept in the order of the prompts until a step trains on it)
                                  |
                                  |  (some algorithms: log-probs, a critic's values -> advantages)
                                  v  TrainBatch per update: rows, balanced over DP, one object per DP rank
                            trainers: packing -> log-probs -> loss -> backward -> optimizer, once per update
                                  |
                                  v  weight version v + 1
                            Publisher: gather -> stage -> verify -> commit

The same loop runs every schedule. `schedule.max_staleness` is the number of batches of groups that are generated in
addition to the batch that the loop waits for. With 0, the engines idle while the trainers train (synchronous). With 1,
they generate the next batch in the meantime (one step off). With more, they are several batches ahead, and weights are
published in the middle of rollouts (fully asynchronous). `run.rollouts.next_batch` guarantees that the staleness of a
trajectory does not exceed this number when it is trained on (slimx/rollout/flow/manager.py, docs/flow.md). With
`rollout.partial`, `next_batch` interrupts unfinished rollouts when it returns, and the next call resumes them. A run
without engines (supervised fine-tuning) runs the same loop and publishes nothing.

A run may train several policies (section `policies`): a rollout may call all of these policies, each trajectory belongs
to the policy that sampled it, and every policy has its trainers and its publisher. All policies take their steps at the
same time and have the same version number.

The loop does not handle the loss of an engine: the other engines continue, the lost one restarts in the background, and
the publication after the next step lets it serve again (slimx/engines/fleet/membership.py). If no engine is left, the
step and `run.publish` wait until one has restarted.

A run that is asked to save and stop (SIGUSR1) does so while the loop waits for a batch. A step whose training has begun
is finished first; the generation of a batch is interrupted, and everything sampled so far is saved.
"""

from __future__ import annotations

import time

from slimx.orchestration.run import Run
from slimx.orchestration.step.evaluation import evaluate
from slimx.orchestration.step.measure import measure_gap, sample_metrics
from slimx.orchestration.step.reference import refresh_reference
from slimx.orchestration.step.train import train_step


async def train(run: Run) -> None:
    """Trains from step `run.step` to `schedule.steps`, with evaluations, checkpoints and exports when they are due."""
    config = run.config
    steps = config.schedule.steps
    await run.publish()
    if run.step == 0:
        run.records.start(await evaluate(run), run.version)
    else:
        await run.evaluation_engines.begin(run, resumed=True)
    while run.step < steps:
        began = time.perf_counter()
        batch = await run.next_batch()
        with run.phase("prepare"):
            rows = run.updates(batch.groups)
            metrics = sample_metrics(run, batch)
        async with run.training():
            metrics |= await train_step(run, batch.groups, rows)
        run.step += 1
        metrics |= await run.publish()
        metrics |= await measure_gap(run, batch.groups, metrics)
        if run.due(config.eval.every or 0) or run.step == steps:
            metrics |= await evaluate(run)
        await run.record(metrics, batch.groups, rows, began)
        await refresh_reference(run)
        await run.recovery.after_step(run.step, run.phase)
        if run.checkpoints.due(run.step):
            await run.save()
        if run.due(config.checkpoint.export_every):
            await run.export(f"hf-{run.step:06d}")
    await run.save()
    if config.checkpoint.export_hf:
        await run.export("hf")
    await run.finish_save()
