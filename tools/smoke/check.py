"""Checks that all of slimx works on this node: a run of a few steps in which an engine is killed, and one table.

    python -m tools.smoke.check [--device cuda] [--trainers 4] [--engines 4] [--model DIR] [--out DIR] [KEY=VALUE ...]

It checks the node, starts reinforcement learning on sums of two numbers, checks that each publication reaches every
engine and is verified there, and compares the log-probs of trainers and engines. Then it kills an engine, waits until
that has recovered, makes the run save and leave, and continues it. Finally trainers and engines compute one batch in
exact mode, where their log-probs must be equal bit for bit. If a check fails, those that need it are left out, and the
others continue. Logs stay in --out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.smoke.training import END_S, TrainingRun
from tools.steps import ROOT, Failed, Steps

MARK = "SLIMX_SMOKE"
"""Environment variable that every process of the run inherits, by which the engine to kill and leftover processes are
found."""
GAP = {"cpu": 1e-5, "cuda": 0.05}
"""Largest accepted mean log-prob gap, in float32 and in bfloat16, where a mixture of experts has 0.006."""
LATER_STEPS = 2
TASK, FIT, STEPS = "a task, a model", "nothing stands in the way", "two steps"
KILLED, LEFT = "an engine is killed", "on a signal, the run saves and leaves"
"""Names of checks on which others depend."""


@dataclass
class Smoke:
    """The run, its options, and the outcome of each check."""

    options: argparse.Namespace
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        out, options = self.options.out, self.options
        self.out: Path = out
        arguments = self.arguments()
        self.steps = Steps(f"smoke test, {time.strftime('%Y-%m-%d')}", out / "smoke.md")
        self.run = TrainingRun(out / "run", out / "train.log", arguments, options.seconds, self.environment())

    def run_all(self) -> None:
        """Takes every check in order."""
        options = self.options
        gpus = options.trainers + options.engines if options.device == "cuda" else 0
        take = self.steps.take
        take("the node is fit", lambda: self.call("slimx.cli", "health", "--gpus", str(gpus)))
        take(TASK, self.prepare)
        take(FIT, lambda: self.call("slimx.cli", "doctor", *self.arguments()), needs=[TASK])
        take(STEPS, self.two_steps, needs=[FIT])
        take("publications are verified", self.verified, needs=[STEPS])
        take("trainers and engines agree", self.gap, needs=[STEPS])
        take(KILLED, self.kill_engine, needs=[STEPS])
        take("it is back, the run went on", self.back, needs=[KILLED])
        take(LEFT, self.leave, needs=[STEPS])
        take("it continues to its end", self.continued, needs=[LEFT])
        self.run.stop()
        take("nothing is left", self.nothing_left)
        take("exact mode has no gap", self.exact, needs=[TASK])

    # Checks -----------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.call("slimx.extras.quickstart.make_task", "--out", str(self.out))
        self.call("slimx.extras.quickstart.make_model", "--out", str(self.out / "model"))

    def exact(self) -> None:
        """Checks exact mode on the tiny model, even if the run has another one, because exact mode supports its
        family."""
        overrides = (f"run.dir={self.out / 'exact'}", f"model.path={self.out / 'model'}", "rollout.prompts_per_step=4")
        self.call("slimx.cli", "doctor", *self.arguments(), *overrides, "numerics.mode=exact", "--gap")

    def two_steps(self) -> None:
        self.run.start()
        self.run.until(lambda: self.run.step() >= 2, "two steps")

    def verified(self) -> str:
        tensors, engines = self.run.metric("publish/tensors_verified"), self.run.metric("publish/engines_verified")
        if not tensors or engines != self.options.engines:
            raise Failed(f"{tensors:.0f} tensors in {engines:.0f} of {self.options.engines} engines")
        return f"{tensors:.0f} tensors, {engines:.0f} engines, {self.run.metric('time/publish'):.2f} s"

    def gap(self) -> str:
        gap, tokens = self.run.metric("gap/mean"), self.run.metric("gap/tokens")
        if not tokens or not gap <= self.options.gap:
            raise Failed(
                f"the mean log-prob gap is {gap:.1e} over {tokens:.0f} tokens, the limit {self.options.gap:.0e}"
            )
        return f"mean log-prob gap {gap:.1e}"

    def kill_engine(self) -> str:
        servers = [process for process in self.processes() if "sglang::scheduler" in " ".join(process.cmdline())]
        if not servers:
            raise Failed("there is no scheduler of an SGLang server among the run's processes")
        servers[0].kill()
        return f"pid {servers[0].pid}"

    def back(self) -> str:
        def whole() -> bool:
            return (
                self.run.metric("engines/restarted") >= 1 and self.run.metric("engines/serving") == self.options.engines
            )

        self.run.until(whole, "all engines to serve again")
        then = self.run.step()
        self.run.until(lambda: self.run.step() >= then + LATER_STEPS, "later steps")
        return f"{self.run.metric('engines/serving'):.0f} engines serve, step {self.run.step()}"

    def leave(self) -> str:
        self.run.process.send_signal(signal.SIGUSR1)
        if (status := self.run.end()) != os.EX_TEMPFAIL:
            raise Failed(f"exit status {status}, not {os.EX_TEMPFAIL}")
        return f"saved step {self.run.step()}"

    def continued(self) -> str:
        last = self.run.step() + LATER_STEPS
        self.run.start(f"schedule.steps={last}")
        if (status := self.run.end()) != 0:
            raise Failed(f"exit status {status}")
        if self.run.step() != last or "resumed at step" not in self.run.log.read_text():
            raise Failed(f"it ended at step {self.run.step()} of {last}")
        return f"step {last}, {self.run.metric('perf/tokens_per_second'):.0f} tokens/s"

    def nothing_left(self) -> None:
        end = time.monotonic() + END_S
        while left := self.processes():
            if time.monotonic() > end:
                raise Failed("still there: " + ", ".join(f"{process.pid} {process.name()}" for process in left))
            time.sleep(0.2)

    # The run ----------------------------------------------------------------------------------------------------------

    def arguments(self) -> list[str]:
        """Returns the quickstart's configuration file and the overrides of this run."""
        options, cpu = self.options, self.options.device == "cpu"
        return [
            "configs/moe/quickstart.yaml",
            "run.name=smoke",
            f"run.dir={self.out / 'run'}",
            f"model.path={options.model or self.out / 'model'}",
            f"numerics.dtype={'float32' if cpu else 'bfloat16'}",
            f"cluster.device={options.device}",
            "trainer.load=null",
            f"trainer.world_size={options.trainers}",
            f"trainer.expert={options.expert or options.trainers}",
            f"rollout.prompts={self.out / 'train.jsonl'}",
            f"rollout.engines=[{{name: actor, count: {options.engines}, max_total_tokens: 32768}}]",
            "rollout.health.interval=1",
            "algorithm.reference=false",
            "schedule.steps=1000000",
            f"publish.transport={options.transport or ('memory' if cpu else 'cuda_ipc')}",
            "checkpoint.every=0",
            "eval.prompts=null",
            "eval.every=0",
            "track.tensorboard=false",
            *options.overrides,
        ]

    def call(self, module: str, *arguments: str) -> None:
        """Runs a command that must succeed. Raises Failed with its last line of output."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.options.seconds,
        )
        with (self.out / "checks.log").open("a") as log:
            log.write(done.stdout)
        if done.returncode:
            raise Failed(" ".join(done.stdout.strip().splitlines()[-1:]) or f"exit status {done.returncode}")

    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark}

    def processes(self) -> list[psutil.Process]:
        """Returns the run's living processes."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, with defaults for `gap` and `out` filled in."""
    parser = argparse.ArgumentParser(prog="smoke_8gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trainers", type=int, default=4, help="ranks that train [4]")
    parser.add_argument("--engines", type=int, default=4, help="servers of one GPU [4]")
    parser.add_argument("--expert", type=int, help="trainer.expert [as many as ranks]")
    parser.add_argument("--model", type=Path, help="Hugging Face directory [a tiny Qwen3-MoE that is made]")
    parser.add_argument("--transport", help="publish.transport [cuda_ipc; memory on the CPU]")
    parser.add_argument("--gap", type=float, help="mean log-prob gap that is let pass [1e-5 on the CPU, else 0.05]")
    parser.add_argument("--seconds", type=float, default=600, help="for each wait [600]")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/smoke"), help="new directory for everything [runs/smoke]"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more for slimx train")
    options = parser.parse_args(arguments)
    options.gap = GAP[options.device] if options.gap is None else options.gap
    options.out = options.out.absolute()
    return options


def main() -> int:
    options = parse()
    if options.out.exists():
        print(f"smoke: {options.out} exists; remove it or choose another --out", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True)
    smoke = Smoke(options)
    try:
        smoke.run_all()
    finally:
        smoke.run.stop()
    print(f"{smoke.steps.summary()}; the table is {smoke.steps.path}, the logs are in the same directory")
    return int(bool(smoke.steps.failed))


if __name__ == "__main__":
    sys.exit(main())
