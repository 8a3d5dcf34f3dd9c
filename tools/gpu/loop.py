"""Trains, publishes and samples with a trainer and an SGLang server on one GPU: `make gpu-loop`.

    python -m tools.gpu.loop [--device cuda] [--out build/gpu-loop] [--seconds 270]

Needs no Ray: the rank's worker and the server are those of a run, and this process does what the driver does. Steps
come in the order of their value; one that fails does not end the others. With --device cpu the same steps run on the
CPU, but for those that only a GPU can take. Into the directory go loop.md (the table), and the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from tools.gpu.check import no_gpu
from tools.gpu.probes import PROBES
from tools.gpu.server_arguments import DETERMINISTIC, EAGER, EXACT, GRAPHS
from tools.steps import ROOT, Failed, LeftOut, Steps, run_command

GAP = {"cpu": 1e-5, "cuda": 0.05}
"""Largest accepted mean log-prob gap. In float32 it is near 0; in bfloat16 a mixture of experts has 0.006 on CPUs."""
GIB = 2**30
TABLE = "loop.md"
"""Name of the file with the outcomes of all steps."""
SERVER, TRAINER, PUBLISHED, SAMPLED = "server", "trainer", "publication", "sampling"
SLEEP, TRAINED, AGAIN = "sleep", "update", "wake"
"""Names of steps on which others depend."""


class Loop:
    """The steps of the loop, and the trainer and engine that they share."""

    def __init__(self, device: str, out: Path, seconds: float, only: Collection[str] = ()):
        """Starts without steps. `seconds`: time for all steps together. `only`: names of the steps to take; all if
        empty."""
        from tools.gpu.pair import Pair

        self.device, self.out, self._make_pair = device, out, Pair
        self.cuda, self.only = device == "cuda", frozenset(only)
        self.steps = Steps(f"The loop on one device ({device}), {time.strftime('%Y-%m-%d')}", out / TABLE)
        self.names: list[str] = []
        """Names of all steps, in order."""
        self._ends = time.monotonic() + seconds
        self._runner = asyncio.Runner()
        self.pair: Pair | None = Pair(make_config(out, device, "fast"), device, out)
        self.sampled: Any = None
        """Rollouts of the last round."""

    def take(
        self,
        name: str,
        work: Callable[[], Awaitable[str]],
        expected: str,
        seconds: float,
        *needs: str,
        gpu: bool = False,
    ) -> None:
        """Takes a step within `seconds`, unless one of the steps `needs` failed. `gpu`: True if only a GPU can take
        it."""

        def timely() -> str:
            if gpu and not self.cuda:
                raise LeftOut("only a GPU can take it")
            left = min(seconds, self._ends - time.monotonic())
            if left < 1:
                raise LeftOut("no time is left (--seconds)")
            try:
                return self._runner.run(asyncio.wait_for(work(), left))
            except TimeoutError:
                raise Failed(f"not done after {left:.0f} s") from None

        self.names.append(name)
        if self.only and name not in self.only:
            return
        self.steps.take(name, timely, expected=expected, needs=() if self.only else needs)

    def run_all(self) -> None:
        """Takes every step."""
        gap = f"mean below {GAP[self.device]:.0e}"
        take = self.take
        take(SERVER, self.start_server, "it attests the plugin, on an empty GPU", 120)
        take(TRAINER, self.start_trainer, "it builds the model", 60)
        take(PUBLISHED, self.publish, "every tensor verified", 30, SERVER, TRAINER)
        take(SAMPLED, self.sample, "64 rollouts with log-probs, version 1 and routes", 40, PUBLISHED)
        take("gap", self.gap, gap, 40, SAMPLED)
        take(SLEEP, self.sleep, "memory of weights and KV cache comes free", 30, PUBLISHED)
        take(TRAINED, self.train, "a finite loss and gradient, weights that change", 60, SAMPLED)
        take(AGAIN, self.wake, f"version 2 verified, other tokens, gap {gap}", 60, SLEEP, TRAINED)
        take("same seeds", self.repeat, "the tokens of the round before", 30, AGAIN)
        take("CUDA graphs", self.graphs, "the gap stays, more tokens/s", 90, PUBLISHED, gpu=True)
        take("deterministic", self.deterministic, "kernels that the batch does not change", 90, PUBLISHED, gpu=True)
        take("exact mode", self.exact, "gap 0.0 in every token", 120)
        for name, expected in PROBES.items():
            take(name, partial(self.probe, name), expected, 60, gpu=True)
        self._runner.run(self._stop())

    # The fast pair ----------------------------------------------------------------------------------------------------

    async def start_server(self) -> str:
        before = self.free()
        (rank,) = await self.pair.start_engine("eager", EAGER[self.device], 110)
        kernels = ", ".join(f"{name} {rank['backends'][name]}" for name in ("decode_attention", "moe_runner_backend"))
        return f"{rank['model']} {rank['dtype']}, {kernels}{self.taken(before)}"

    async def start_trainer(self) -> str:
        before = self.free()
        started = await self.pair.trainer.start(60)
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in started["seconds"].items())
        return f"adapters {', '.join(started['adapters'])}; seconds: {seconds}{self.taken(before)}"

    async def publish(self) -> str:
        done = await self.pair.publish(1)
        rate = done.nbytes / done.seconds["total"] / 1e9
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in done.seconds.items())
        return f"{done.tensors} tensors, {done.nbytes / 2**20:.0f} MiB, {rate:.2f} GB/s; seconds: {stages}"

    async def sample(self) -> str:
        sampled = self.sampled = await self.pair.sample()
        for rollout in sampled.trajectories:
            if {span.version for span in rollout.spans if span.source == "sampled"} != {1}:
                raise Failed(f"rollout {rollout.id} was not sampled by version 1: {rollout.spans}")
            if rollout.routed_experts is None or not np.isfinite(rollout.logprobs[rollout.loss_mask > 0]).all():
                raise Failed(f"rollout {rollout.id} lacks routes or log-probs")
        again = await self.pair.sample()
        return f"{rate_of(sampled)} at first, then {rate_of(again)}"

    async def gap(self) -> str:
        return await self._gap(self.sampled, 1)

    async def _gap(self, sampled: Any, version: int) -> str:
        """Returns the gap of rollouts with the engine's routes replayed, and without. Raises Failed above the bound."""
        pair = self.pair
        batches = pair.batches(sampled)
        replayed = await pair.trainer.call("model.measure_gap", batches, version=version)
        scores = await pair.trainer.call("model.logprobs", batches)
        differences = np.concatenate(
            [
                np.abs(logprobs - batch.rollout_logprobs)[batch.versions == version]
                for logprobs, batch in zip(scores, batches, strict=True)
            ]
        )
        finding = (
            f"R3 replay: mean {replayed['gap/mean']:.1e}, greatest {replayed['gap/max']:.1e} over "
            f"{replayed['gap/tokens']:.0f} tokens; without: mean {differences.mean():.1e}, greatest "
            f"{differences.max():.1e}"
        )
        if not replayed["gap/mean"] <= GAP[self.device]:
            raise Failed(finding)
        return finding

    async def sleep(self) -> str:
        before = self.free()
        await self.pair.engine.pause()
        await self.pair.engine.sleep()
        after = self.free()
        if not self.cuda:
            return "released"
        if after - before < 1:
            raise Failed(f"{before:.2f} GiB were free before, {after:.2f} after")
        return f"{before:.2f} GiB free before, {after:.2f} after"

    async def train(self) -> str:
        batches = self.pair.batches(self.sampled)
        began = time.monotonic()
        metrics = await self.pair.trainer.call("model.train_updates", [batches], step=0, version=1)
        seconds = time.monotonic() - began
        found = {name: metrics[name] for name in ("loss/policy", "optim/grad_norm", "gap/mean")}
        if not all(map(np.isfinite, found.values())) or not found["optim/grad_norm"] or metrics["optim/skipped"]:
            raise Failed(f"{found}, skipped {metrics['optim/skipped']}")
        numbers = ", ".join(f"{name} {value:.2e}" for name, value in found.items())
        return f"{numbers}; {seconds:.1f} s with what torch compiles"

    async def wake(self) -> str:
        engine, before = self.pair.engine, self.sampled
        asleep = self.free()
        await engine.wake(("weights",))
        with_weights = self.free()
        await self.pair.publish(2)  # its last verb takes the KV cache back
        finding = f"; GiB free asleep {asleep:.2f}, with weights {with_weights:.2f}, with all {self.free():.2f}"
        self.sampled = await self.pair.sample()
        if share_of_equal_tokens(before, self.sampled) == 1:
            raise Failed("version 2 samples the tokens that version 1 did")
        return await self._gap(self.sampled, 2) + (finding if self.cuda else "")

    async def repeat(self) -> str:
        again = await self.pair.sample()
        return f"{share_of_equal_tokens(self.sampled, again):.2%} equal; {rate_of(again)}"

    # Other servers ----------------------------------------------------------------------------------------------------

    async def graphs(self) -> str:
        finding, _ = await self._with_server("graphs", GRAPHS[self.device])
        return finding

    async def deterministic(self) -> str:
        finding, equal = await self._with_server("deterministic", DETERMINISTIC[self.device])
        if equal < 1:
            raise Failed(f"{equal:.2%} of the tokens are those of the same seeds before; {finding}")
        return finding

    async def _with_server(self, name: str, arguments: dict[str, Any]) -> tuple[str, float]:
        """Starts another server, publishes to it and samples twice; returns the finding and the share of tokens that
        both rounds have in common."""
        await self.pair.stop_engine()
        before, began, version = self.free(), time.monotonic(), 3
        await self.pair.start_engine(name, arguments, 80)
        started = f"started in {time.monotonic() - began:.0f} s{self.taken(before)}"
        await self.pair.publish(version)
        first, sampled = await self.pair.sample(), await self.pair.sample()
        equal, gap = share_of_equal_tokens(first, sampled), await self._gap(sampled, version)
        return f"{started}; {rate_of(sampled)}; same seeds {equal:.2%} equal; {gap}", equal

    async def exact(self) -> str:
        """Returns the log-prob gap in exact mode, from a second trainer and engine. Raises Failed unless it is 0."""
        await self._stop()
        self.pair = self._make_pair(make_config(self.out, self.device, "exact"), self.device, self.out)
        await asyncio.gather(self.pair.trainer.start(80), self.pair.start_engine("exact", EXACT[self.device], 80))
        done = await self.pair.publish(1)
        sampled = await self.pair.sample()
        batches = self.pair.batches(sampled)
        found = await self.pair.trainer.call("model.measure_gap", batches, version=1)
        finding = f"greatest {found['gap/max']:.1e} over {found['gap/tokens']:.0f} tokens; {rate_of(sampled)}"
        if found["gap/max"] != 0 or not found["gap/tokens"]:
            raise Failed(finding)
        return f"{finding}; {done.tensors} tensors verified"

    async def probe(self, name: str) -> str:
        """Runs a measurement of tools/gpu/probes.py in another process; returns its finding."""
        log = self.out / f"probe-{name.replace(' ', '-')}.log"
        return await asyncio.to_thread(run_command, (sys.executable, "-m", "tools.gpu.probes", name), log, 50)

    async def _stop(self) -> None:
        if self.pair is not None:
            await self.pair.stop()
            self.pair = None

    def taken(self, before: float) -> str:
        """Returns the end of a finding: how many GiB less of the GPU are free than `before`."""
        return f"; {before - self.free():.2f} GiB" if self.cuda else ""

    def free(self) -> float:
        """Returns the free memory of the GPU in GiB, by its driver; nan on the CPU."""
        if not self.cuda:
            return float("nan")
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free / GIB


def make_config(out: Path, device: str, mode: str) -> Config:
    """Returns the configuration of a trainer and an engine in `mode`, "fast" or "exact", with the model in
    out/model."""
    cuda = device == "cuda"
    return Config.model_validate(
        {
            "run": {"dir": str(out / mode)},
            "model": {"path": str(out / "model")},
            "numerics": {"dtype": "bfloat16" if cuda else "float32", "mode": mode},
            "cluster": {"device": device},
            "trainer": {
                "optimizer": {"lr": 1e-4},
                "max_tokens_per_microbatch": 4096,
                "moe": {"routing_replay": "none" if mode == "exact" else "R3"},
            },
            "rollout": {
                "prompts": "none",
                "group_size": 8,
                "engines": [{"name": "actor", "max_total_tokens": 262144 if cuda else 8192}],
            },
            "schedule": {"colocate": True, "steps": 2},
            "publish": {"transport": "cuda_ipc" if cuda else "memory", "staging": "bucket"},
            "algorithm": {"name": "grpo"},
        }
    )


def rate_of(sampled: Any) -> str:
    """Returns the tokens per second of a round."""
    return f"{sampled.tokens / sampled.seconds:,.0f} tokens/s ({sampled.tokens} tokens)"


def share_of_equal_tokens(one: Any, other: Any) -> float:
    """Returns the fraction of positions at which two rounds with equal lengths have the same token."""
    pairs = zip(one.trajectories, other.trajectories, strict=True)
    return float(np.mean(np.concatenate([a.sampled_ids() == b.sampled_ids() for a, b in pairs])))


def write_model(out: Path, device: str) -> int:
    """Writes the model of the loop into out/model; returns the number of its parameters."""
    import torch

    from tools.gpu.model import CPU, GPU
    from tools.gpu.model import write_model as write

    cuda = device == "cuda"
    return write(out / "model", GPU if cuda else CPU, torch.bfloat16 if cuda else torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu-loop", help="directory, emptied of an earlier loop"
    )
    parser.add_argument("--seconds", type=float, default=270, help="for all steps together [270]")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=(), help="these steps and no other")
    options = parser.parse_args()
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()) and not (out / TABLE).exists():
        parser.error(f"--out {out} holds other files than a loop's, which would be removed; name another directory")
    if options.device == "cuda" and (reason := no_gpu()):
        parser.error(reason)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    print(f"model of {write_model(out, options.device) / 1e6:.1f} million parameters", flush=True)
    loop = Loop(options.device, out, options.seconds, options.only)
    loop.run_all()
    if unknown := sorted(loop.only.difference(loop.names)):
        parser.error(f"--only {unknown[0]}: no such step; there are {', '.join(loop.names)}")
    print(f"{loop.steps.summary()}; the table is {loop.steps.path}, the logs are in the same directory")
    return int(bool(loop.steps.failed))


if __name__ == "__main__":
    sys.exit(main())
