"""Entry points of train, generate and evaluate: every check that works without torch runs before its slow import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from slimx.config.schema import Config
from slimx.json_types import Json
from slimx.orchestration.start import checks


def train(config: Config, console: Console) -> tuple[Path, Path | None]:
    """Trains; returns the run's directory and its report, if there is one. Raises SlimxError, Interrupted after a
    signal, Preempted after SIGUSR1."""
    checks.check_training(config)
    from slimx.orchestration.session import finish, run_training

    directory = run_training(config, console)
    return directory, finish(config, directory)


def generate(config: Config, checkpoint: Path | None, console: Console) -> Path:
    """Generates rollouts without training; returns their directory. Raises as `train` does."""
    config = checks.generation_config(config, checkpoint)
    from slimx.commands.generate import run_generation

    return run_generation(config, console)


def evaluate(config: Config, checkpoint: Path | None, note: Callable[[str], None]) -> Json:
    """Answers the held-out prompts; returns {checkpoint, prompts, metrics}. Raises as `train` does."""
    config = checks.evaluation_config(config, checkpoint)
    from slimx.commands.evaluate import run_evaluation

    return run_evaluation(config, note)
