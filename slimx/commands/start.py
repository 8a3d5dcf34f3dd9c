"""The function behind `slimx train` and `slimx.train`. It first runs all checks that do not need torch, because
importing torch is slow."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from slimx.config.schema import Config
from slimx.orchestration.start import checks


def train(config: Config, console: Console) -> tuple[Path, Path | None]:
    """Trains, and returns the run's directory and the path of its report (None if there is none). Raises SlimxError if
    the run fails; after a signal, raises Preempted if the run has saved a checkpoint (SIGUSR1), and Interrupted
    otherwise."""
    checks.check_training(config)
    from slimx.orchestration.session import finish, run_training

    directory = run_training(config, console)
    return directory, finish(config, directory)
