"""Trajectories through buffer, filter, advantages and packing: how many a second, and in how much memory.

Two things take turns, A B B A A B ..., in one process, each on batches of 10,000 trajectories:

    A  slimx: RolloutManager with its tickets and hooks (an engine that answers at once), dynamic sampling, GRPO, rows,
       balanced packing for 8 data-parallel ranks
    B  the same in plain Python without slimx (benchmarks/rollout_plain.py): lists, torch, first fit

Both start from the same answers in the form of SGLang's JSON, drop the same groups and must come to the same advantages
and as many packed tokens. The peak of resident memory is measured in a process of its own for each side."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rollout_plain import PlainPath
from rollout_stand import GROUP_SIZE, RANKS, Answers, make_config, make_prompts, prompt_number

from slimx.algorithms.advantages.estimate import all_advantages
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.packing import pack
from slimx.data.prompts.read import PromptSource
from slimx.errors import SlimxError
from slimx.orchestration.batches import make_update_rows
from slimx.orchestration.lifetime.garbage import frozen_heap
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.policy import PolicyClient

PER_STEP = 625
"""Groups of a step: 10,000 trajectories."""


class InOrder(PromptSource):
    """The prompts in file order, so that both sides take the same ones."""

    def _start_epoch(self, epoch: int) -> None:
        super()._start_epoch(epoch)
        self._order = np.arange(len(self._prompts))


class Instant:
    """An engine that answers at once, with the records that slimx's client makes from SGLang's JSON."""

    def __init__(self, answers: Answers):
        self.answers = answers
        self.requests: Counter[int] = Counter()
        """Number of requests by prompt."""

    async def generate(self, request: GenerationRequest) -> Completion:
        number = prompt_number(request.token_ids)
        index = self.requests[number] % GROUP_SIZE
        self.requests[number] += 1
        await asyncio.sleep(0)
        sampled = self.answers.meta(number, index)["output_token_logprobs"]
        return Completion(
            token_ids=np.array([entry[1] for entry in sampled], np.int32),
            logprobs=np.array([entry[0] for entry in sampled], np.float32),
            versions=[(0, len(sampled), 0)],
            finish_reason="stop",
            routed_experts=None,
            cached_tokens=0,
            seconds=0.0,
        )


class SlimxPath:
    """slimx's parts, called as the loop calls them."""

    def __init__(self, config: Config, answers: Answers):
        self.config = config
        hooks, tokenizer = load_hooks(config), load_tokenizer(config.model.path)
        self.maker = GroupMaker(config, hooks, {ACTOR: PolicyClient(Instant(answers), tokenizer)})
        self.manager = RolloutManager(config, InOrder(make_prompts(answers), 1), self.maker)
        self.seconds: dict[str, float] = {"buffer": 0.0, "rows": 0.0, "pack": 0.0}

    async def step(self) -> Any:
        """Returns the packed batch of one step."""
        began = time.perf_counter()
        batch = await self.manager.next_batch()
        buffered = time.perf_counter()
        (rows,) = make_update_rows(self.config, batch.groups, partial(all_advantages, self.config.algorithm))
        rowed = time.perf_counter()
        packed = pack(rows, data_size=RANKS, max_tokens=self.config.trainer.max_tokens_per_microbatch)
        for name, spent in zip(
            self.seconds, (buffered - began, rowed - buffered, time.perf_counter() - rowed), strict=True
        ):
            self.seconds[name] += spent
        return packed


async def compare(config: Config, answers: Answers, steps: int) -> dict[str, Any]:
    """Returns the seconds of each side by step, measured alternately after one step of each that is not counted."""
    slimx = SlimxPath(config, answers)
    per_step = config.rollout.prompts_per_step
    plain = PlainPath(answers, make_prompts(answers), per_step=per_step, size=GROUP_SIZE)
    seconds: dict[str, list[float]] = {"slimx": [], "plain": []}
    limit = config.trainer.max_tokens_per_microbatch
    tokens = 0
    try:
        with frozen_heap():  # as the session does
            for number in range(steps + 1):
                found = {}
                for side in ("slimx", "plain") if number % 2 else ("plain", "slimx"):
                    began = time.perf_counter()
                    found[side] = await (slimx.step() if side == "slimx" else plain.step(RANKS, limit))
                    if number:
                        seconds[side].append(time.perf_counter() - began)
                    else:
                        slimx.seconds = dict.fromkeys(slimx.seconds, 0.0)
                tokens += _check(found["slimx"], found["plain"])
    finally:
        await slimx.manager.stop()
    return {"seconds": seconds, "parts": slimx.seconds, "tokens": tokens}


def _check(batch: Any, plain: tuple[Any, Any]) -> int:
    """Returns the positions of the step. Raises unless both sides computed the same."""
    shards, advantages = plain
    length = sum(len(part["tokens"]) for shard in shards for part in shard)
    if length != batch.tokens + len(advantages):  # a row predicts one token less than it has
        raise SlimxError(f"the plain path packed {length} tokens, slimx {batch.tokens + len(advantages)}")
    mine = sorted(
        float(part.advantages[start])
        for shard in batch.shards
        for part in shard
        for start in np.cumsum([0, *part.lengths])[: len(part.rows)]
    )
    np.testing.assert_allclose(mine, sorted(advantages.tolist()), atol=1e-5)
    return batch.tokens


def peak(side: str, directory: str, per_step: int, mean: int, steps: int, out: Any) -> None:
    """Puts into `out` the peak growth of resident memory in MiB while `side` made `steps` batches."""
    made, config = Answers(4 * per_step, mean), make_config(Path(directory), per_step, mean)

    async def run() -> None:
        if side == "slimx":
            path = SlimxPath(config, made)
            with frozen_heap():  # what it collects later counts as memory here
                for _ in range(steps):
                    await path.step()
            await path.manager.stop()
        else:
            plain = PlainPath(made, make_prompts(made), per_step=per_step, size=GROUP_SIZE)
            for _ in range(steps):
                await plain.step(RANKS, config.trainer.max_tokens_per_microbatch)

    with suppress(OSError):  # a container may forbid it: then the peak of the imports counts too
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _memory("VmRSS")
    asyncio.run(run())
    out.put(_memory("VmHWM") - before)


def _memory(field: str) -> float:
    """Returns a memory field of this process in MiB, by the kernel's name. `ru_maxrss` would include the parent's
    peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def measure(trajectories: int, mean: int, per_step: int = PER_STEP) -> dict[str, Any]:
    """Returns all figures of this benchmark. `mean`: mean length of an answer in tokens; `per_step`: groups of a
    batch."""
    batch = per_step * GROUP_SIZE
    steps = max(1, trajectories // batch)
    with tempfile.TemporaryDirectory(prefix="slimx-benchmark-") as directory:
        config = make_config(Path(directory), per_step, mean)
        found = asyncio.run(compare(config, Answers(4 * per_step, mean), steps))
        context, found["peak"] = multiprocessing.get_context("forkserver"), {}
        context.set_forkserver_preload(["transformers.models.auto.tokenization_auto", "slimx.orchestration.batches"])
        for side in ("slimx", "plain"):
            out = context.SimpleQueue()
            process = context.Process(target=peak, args=(side, directory, per_step, mean, min(steps, 3), out))
            process.start()
            process.join()
            if process.exitcode:
                raise SlimxError(f"the process that measures {side}'s memory ended with status {process.exitcode}")
            found["peak"][side] = out.get()
    return found | {"trajectories": steps * batch, "batch": batch}


def describe(found: dict[str, Any]) -> str:
    """Returns a row for each side, and the ratio with its spread."""
    slimx, plain = (np.array(found["seconds"][side]) for side in ("slimx", "plain"))
    lines = [f"{'side':<8}{'trajectories/s':>16}{'tokens/s':>14}{'peak MiB':>10}"]
    for name, seconds in (("slimx", slimx), ("plain", plain)):
        rate = found["batch"] / np.median(seconds)
        tokens = found["tokens"] / (len(slimx) + 1) / np.median(seconds)
        lines.append(f"{name:<8}{rate:>16,.0f}{tokens:>14,.0f}{found['peak'][name]:>10,.0f}")
    ratios = plain / slimx
    low, high = np.percentile(ratios, [25, 75])
    parts = ", ".join(f"{name} {spent / sum(found['parts'].values()):.0%}" for name, spent in found["parts"].items())
    lines += [
        f"slimx / plain: {np.median(ratios):.2f} of its rate, the median of {len(ratios)} pairs of "
        f"{found['batch']:,} trajectories; quartiles {low:.2f} to {high:.2f}",
        f"of slimx's time: {parts}",
    ]
    return "\n".join(lines)
