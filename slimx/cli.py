"""The command line: commands of the core; those of extras are entry points (`slimx.commands.usage.Program`)."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimx import __version__
from slimx.commands.options import AsJson, Checkpoint, Debug, Overrides, RunFile
from slimx.commands.usage import Program, RayCommand, refusal, starts_ray
from slimx.config import load_config
from slimx.errors import Interrupted, Preempted, SlimxError, ending_of
from slimx.observability.live.safe_text import one_line, plain, visible, with_log
from slimx.runtime.children import search_working_directory

app = typer.Typer(
    cls=Program,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning training for large mixture-of-experts language models.",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"slimx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    pass


INTERRUPTED = 128 + signal.SIGINT
"""Status that typer makes of a KeyboardInterrupt, without a word."""
EXIT_S = 10.0
"""Seconds that the interpreter gets to end once all is said."""


@app.command(cls=RayCommand)
def train(
    file: RunFile,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train as FILE says; a run directory with a checkpoint is continued."""
    console = Console(soft_wrap=True)
    console.print(plain(f"checking {file}"))
    config = load_config(file, overrides or [])
    from slimx.commands import start

    directory, report = start.train(config, console)
    console.print(plain(f"run {directory}" + (f", report {report}" if report else "")))


@app.command(cls=RayCommand)
def generate(
    file: RunFile,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Generate FILE's rollouts without training: engines only; the steps are saved as a run saves them."""
    console = Console(soft_wrap=True)
    console.print(plain(f"checking {file}"))
    config = load_config(file, overrides or [])
    from slimx.commands import start

    directory = start.generate(config, checkpoint, console)
    console.print(plain(f"rollouts {directory}"))


@app.command("eval", cls=RayCommand)
def evaluate(
    file: RunFile,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Answer FILE's held-out prompts with a checkpoint: engines only; mean reward and pass@k of each set."""
    print(f"checking {one_line(file)}", file=sys.stderr, flush=True)
    config = load_config(file, overrides or [])
    import json

    from slimx.commands import start

    found = start.evaluate(config, checkpoint, lambda text: print(text, file=sys.stderr))
    from slimx.commands.evaluate import table

    for line in [json.dumps(found, indent=1)] if as_json else table(found):
        print(visible(line))


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="Run directory, or the YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, with a YAML file.")] = None,
    as_json: AsJson = False,
    saved: Annotated[
        bool, typer.Option("--saved", help="Print the step of the newest checkpoint alone; 0: there is none.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 0: running, 3: finished, 4: stalled, 5: dead, 2: there is no run."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Say how far a run is, whether it still runs, and what its engines do; from its directory alone."""
    import json

    directory = Path(load_config(run, overrides or []).run.dir) if run.is_file() else run
    if saved:
        from slimx.orchestration.state.saves import saved_step

        print(saved_step(directory))
        return
    from slimx.commands.status import describe_status, run_status

    found = run_status(directory)
    print(json.dumps(found, indent=1) if as_json else visible("\n".join(describe_status(found))))
    if check:
        raise typer.Exit(found["state"].exit_status)


@app.command()
def stacks(
    run: Annotated[Path, typer.Argument(help="Run directory; on each machine its own processes are shown.")],
    debug: Debug = False,
) -> None:
    """Print the Python stacks of a run's processes on this machine: driver, ranks, engines, workers."""
    from slimx.commands.stacks import run_stacks

    print(visible(run_stacks(run)))


@app.command()
def rollouts(
    directory: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[
        int | None, typer.Option(help="The step whose groups are shown; else a line for each step.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only the group with this id.")] = None,
    reward_below: Annotated[float | None, typer.Option(help="Only trajectories with less reward.")] = None,
    limit: Annotated[int, typer.Option(help="Groups shown, at most; 0: all.")] = 8,
    tokens: Annotated[bool, typer.Option("--tokens", help="Every token with log-prob, mask and version.")] = False,
    buffer: Annotated[bool, typer.Option("--buffer", help="What waits in the newest checkpoint.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="What was not trained, and why.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a run was trained on, group by group: prompts, texts, rewards, weight versions."""
    from slimx.commands.rollouts import Choice, show_rollouts

    choice = Choice(group=group, reward_below=reward_below, limit=limit, tokens=tokens)
    for line in show_rollouts(directory, step, choice, buffer=buffer, dropped=dropped, as_json=as_json):
        print(visible(line))


def main() -> None:
    """Run the command line. A command that fails ends in one sentence and the exit code of docs/operations.md, raised
    as SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding need not be UTF-8, and prompts are of all letters
            stream.reconfigure(errors="backslashreplace")
    search_working_directory()  # hooks are found there
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = app(standalone_mode=False)
            if status == INTERRUPTED:
                raise Interrupted(signal.SIGINT)
        except KeyboardInterrupt:  # typer catches one only while a command runs
            raise Interrupted(signal.SIGINT) from None
        except typer.TyperException as error:
            raise refusal(error) from error
    except (SlimxError, Preempted, Interrupted) as error:
        if isinstance(error, SlimxError) and "--debug" in sys.argv:
            raise
        status, sentence = ending_of(error)
        print(f"slimx: {with_log(sentence)}", file=sys.stderr)
        sys.exit(status)
    sys.exit(status or 0)


def entry() -> None:
    """Entry point of the program: it ends when `main` does, whatever threads of hooks and exit functions of libraries
    still wait for."""
    from slimx.orchestration.lifetime.parent import supervised
    from slimx.orchestration.lifetime.watchdog import Watchdog

    over = supervised() if sys.argv[1:2] and starts_ray(app, sys.argv[1]) else None
    status: int | str | None = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code
        raise
    finally:
        if over is not None:
            over()
        Watchdog().arm(EXIT_S, status if isinstance(status, int) else int(bool(status)), None)


if __name__ == "__main__":
    entry()
