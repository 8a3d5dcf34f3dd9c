"""The command line, with its built-in commands. Extras add commands as entry points
(`slimx.commands.usage.RootGroup`)."""

from __future__ import annotations

import gc
import io
import shlex
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from slimx import __version__
from slimx.commands.options import Debug, Overrides, RunFile
from slimx.commands.usage import RayCommand, RootGroup, refusal, starts_ray
from slimx.config.load import load_config
from slimx.errors import Interrupted, Preempted, SlimxError, ending_of, not_installed
from slimx.observability.live.safe_text import plain, with_log
from slimx.runtime.children import search_working_directory

app = typer.Typer(
    cls=RootGroup,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Reinforcement-learning training for large mixture-of-experts language models.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"slimx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


HEAVY = ("torch", "megatron", "sglang", "sglang_router", "ray", "transformers")
"""Packages that `slimx setup` installs, and no other way of installing slimx."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status that typer returns for a KeyboardInterrupt; typer prints no message for it."""
EXIT_S = 10.0
"""Maximum number of seconds that the interpreter may take to exit after `main` has returned."""


@app.command(cls=RayCommand)
def train(
    file: RunFile,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train the policy as configured in FILE. A run directory with a checkpoint is resumed.

    Examples:

    slimx train run.yaml

    slimx train run.yaml run.dir=runs/short schedule.steps=3

    slimx train run.yaml 'rollout.engines+={name: teacher, model: models/big}'

    Exit codes: 0 finished, 1 failed, 2 refused, 75 stopped after a checkpoint (SIGUSR1).

    Pages: docs/guides/first-run.md, docs/operations.md. `slimx keys` explains the keys of FILE.
    """
    console = Console(soft_wrap=True)
    console.print(plain(f"checking {file}"))
    config = load_config(file, overrides or [])
    from slimx.commands import start

    directory, report = start.train(config, console)
    summary = f"run {directory}"
    if report:
        summary += f", report {report}"
    console.print(plain(summary))
    shown = shlex.quote(str(directory))
    following = f"slimx watch {shown}"
    if (directory / "rollouts").is_dir():
        following += f", slimx rollouts {shown}"
    console.print(plain(f"next: {following}"))


def main() -> None:
    """Runs the command line and raises SystemExit with one of the exit codes listed in docs/operations.md. A failure is
    printed as one sentence."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters of prompts
            stream.reconfigure(errors="backslashreplace")
    search_working_directory()  # users' hooks may be modules in it
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = app(prog_name="slimx", standalone_mode=False)
            if status == INTERRUPTED:
                raise Interrupted(signal.SIGINT)
        except KeyboardInterrupt:  # raised outside of a command, where typer does not catch it
            raise Interrupted(signal.SIGINT) from None
        except typer.TyperException as error:
            raise refusal(error) from error
        except ModuleNotFoundError as error:
            module = error.name or ""
            if module.partition(".")[0] not in HEAVY:
                raise
            raise not_installed(module) from error
    except (SlimxError, Preempted, Interrupted) as error:
        if isinstance(error, SlimxError) and "--debug" in sys.argv:
            raise
        status, sentence = ending_of(error)
        print(f"slimx: {with_log(sentence)}", file=sys.stderr)
        sys.exit(status)
    sys.exit(status or 0)


def entry() -> None:
    """Runs the command line. The process exits within `EXIT_S` seconds after `main` has returned, even if threads of
    hooks or exit handlers are still running."""
    from slimx.orchestration.lifetime.hangs import Watchdog
    from slimx.orchestration.lifetime.parent import supervised

    release = None
    if sys.argv[1:2] and starts_ray(app, sys.argv[1]):
        release = supervised()
    status: int | str | None = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code
        raise
    finally:
        if release is not None:
            release()
        Watchdog().arm(EXIT_S, status if isinstance(status, int) else int(bool(status)), None)
        gc.freeze()  # the interpreter's last collections would take seconds with torch's modules, and free nothing


if __name__ == "__main__":
    entry()
