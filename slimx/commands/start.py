"""The starts of train, generate and evaluate: first every check that needs no torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from slimx.config.schema import Config
from slimx.orchestration.start import early


def train(config: Config, console: Console) -> tuple[Path, Path | None]:
    """Train, and return the run's directory and its report, if there is one. Raises SlimxError, Interrupted after a
    signal, Preempted after SIGUSR1."""
    early.check_training(config)
    from slimx.orchestration.session import finish, run_training

    directory = run_training(config, console)
    return directory, finish(config, directory)


def generate(config: Config, checkpoint: Path | None, console: Console) -> Path:
    """Generate rollouts without training, and return the directory that has them. Raises as `train` does."""
    config = early.generating(config, checkpoint)
    from slimx.commands.generate import run_generation

    return run_generation(config, console)


def evaluate(config: Config, checkpoint: Path | None, note: Callable[[str], None]) -> dict[str, Any]:
    """Answer the held-out prompts: {checkpoint, prompts, metrics}. Raises as `train` does."""
    config = early.evaluating(config, checkpoint)
    from slimx.commands.evaluate import run_evaluation

    return run_evaluation(config, note)
