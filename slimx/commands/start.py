"""Functions behind the commands train, generate and eval. Each first runs all checks that do not need torch, because
importing torch is slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from slimx.config.schema import Config
from slimx.json_types import Json
from slimx.orchestration.start import checks


def train(config: Config, console: Console) -> tuple[Path, Path | None]:
    """Trains, and returns the run's directory and the path of its report (None if there is none). Raises SlimxError if
    the run fails; after a signal, raises Preempted if the run has saved a checkpoint (SIGUSR1), and Interrupted
    otherwise."""
    checks.check_training(config)
    from slimx.orchestration.session import finish, run_training

    directory = run_training(config, console)
    return directory, finish(config, directory)


def generate(config: Config, checkpoint: Path | None, console: Console) -> Path:
    """Generates rollouts without training, and returns the directory that contains them. `checkpoint`: weights that the
    engines load; None: the run's initial weights. Raises the same errors as `train`."""
    config = checks.generation_config(config, checkpoint)
    from slimx.commands.generate import run_generation

    return run_generation(config, console)


def evaluate(config: Config, checkpoint: Path | None, note: Callable[[str], None]) -> Json:
    """Evaluates on the held-out prompts, and returns {checkpoint, prompts, metrics, ...}. `checkpoint`: weights that
    the engines load; None: the run's initial weights. `note`: receives lines of text about the progress. Raises the
    same errors as `train`."""
    config = checks.evaluation_config(config, checkpoint)
    from slimx.commands.evaluate import run_evaluation

    return run_evaluation(config, note)
