"""The quickstart: makes a tiny model and its task, fine-tunes the model, trains it by GRPO and writes the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from slimx.errors import SlimxError
from slimx.orchestration.lifetime.signals import HEARD
from slimx.runtime.children import python_argv
from slimx.runtime.process import end_with_parent

CONFIGS = Path(__file__).with_name("configs")
"""Directory of the two configurations: a link to configs/moe in the repository, copies of the two in a wheel."""
WRITTEN_IN = "runs"
"""Directory in which the configurations place their data and runs."""
SFT, GRPO = "quickstart-sft", "quickstart"
"""Names of the two configurations, and of their runs."""
SFT_STEPS = 4
"""Steps of the fine-tuning per step of GRPO, where the number of steps is not that of the configurations."""


def overrides(name: str, directory: Path, steps: int | None) -> list[str]:
    """Returns the overrides that place the run of configuration `name` in `directory` and set its number of steps.
    `steps`: steps of GRPO; None: the numbers of steps of the configurations."""
    data = directory / "quickstart-data"
    paths = {"run.dir": directory / name, "model.path": data / "model"}
    if name == SFT:
        paths["rollout.prompts"] = data / "demonstrations.jsonl"
    else:
        paths["trainer.load"] = directory / SFT / "hf"
        paths["rollout.prompts"] = data / "train.jsonl"
        paths["eval.prompts"] = data / "heldout.jsonl"
    found = [f"{key}={_written(str(path))}" for key, path in paths.items()]
    if steps is not None:
        if name == SFT:
            steps *= SFT_STEPS
        found.append(f"schedule.steps={steps}")
    return found


def _written(path: str) -> str:
    """Returns `path` as the value of an override, quoted if YAML would read it as something else."""
    return path if re.fullmatch(r"[\w./][\w./ -]*", path) else json.dumps(path, ensure_ascii=False)


def commands(directory: Path, steps: int | None) -> Iterator[list[str]]:
    """Yields the arguments of `slimx` for each stage after the model and the task have been made."""
    for name in (SFT, GRPO):
        places = overrides(name, directory, steps)
        if directory == Path(WRITTEN_IN):
            places = [place for place in places if place.startswith("schedule.")]
        yield ["train", str(CONFIGS / f"{name}.yaml"), *places]
    report = directory / GRPO / "report.html"
    runs = [str(directory / name) for name in (SFT, GRPO)]
    yield ["report", *runs, "--out", str(report), "--title", "slimx quickstart"]


def make(directory: Path) -> None:
    """Writes the model and the task below `directory`. Raises SlimxError if they cannot be written there, and
    ModuleNotFoundError without torch or transformers."""
    from transformers.utils import logging

    from slimx.extras.quickstart.make_model import make_model
    from slimx.extras.quickstart.make_task import make_task

    logging.disable_progress_bar()
    data = directory / "quickstart-data"
    try:
        make_task(data)
        make_model(data / "model")
    except OSError as error:
        raise SlimxError(
            f"{data} cannot be written ({error.strerror}); choose another directory with --dir",
            code="quickstart.dir",
            about=str(directory),
        ) from error


def run(arguments: list[str]) -> int:
    """Runs a command of slimx without GPUs, so that it shows the same on every machine, and returns its exit status.
    Signals that this process receives are forwarded to the command, which counts one that also reaches it from a
    terminal once."""
    command = subprocess.Popen(
        python_argv("slimx", *arguments),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    with _forwarding(command):
        status = command.wait()
    if status < 0:  # ended by a signal
        return 128 - status
    return status


@contextmanager
def _forwarding(command: subprocess.Popen[bytes]) -> Iterator[None]:
    heard = [signum for signum in HEARD if signal.getsignal(signum) != signal.SIG_IGN]  # nohup ignores one
    before = {signum: signal.signal(signum, lambda received, _: command.send_signal(received)) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
