"""Commands that show a run: status, stacks, rollouts and watch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.options import AsJson, Debug
from slimx.commands.usage import PlainCommand
from slimx.config.load import load_config
from slimx.observability.live.safe_text import visible

app = typer.Typer(add_completion=False)
rollouts_app = typer.Typer(add_completion=False)
stacks_app = typer.Typer(add_completion=False)
status_app = typer.Typer(add_completion=False)


@app.command(cls=PlainCommand)
def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8890,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of another run, drawn in the same charts; repeatable."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serves a live web page about a run: its current activity, curves, timing, and rollouts token by token. Ctrl-C
    stops it.

    Examples:

    slimx watch runs/first

    slimx watch runs/first --host 0.0.0.0 --port 9000

    Page: docs/operations.md
    """
    from slimx.extras.watch.page.server import serve

    serve([run, *(compare or [])], host, port, lambda text: print(text, flush=True))


@status_app.command(cls=PlainCommand)
def status(
    run: Annotated[Path, typer.Argument(help="Run directory, or the YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, if RUN is a YAML file.")] = None,
    as_json: AsJson = False,
    saved: Annotated[
        bool, typer.Option("--saved", help="Print only the step of the newest checkpoint; 0 without a checkpoint.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 0: running, 3: finished, 4: stalled, 5: dead, 2: no run found."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Shows whether a run is still running, how far it has got, and the state of its engines, using only its
    directory.

    Examples:

    slimx status runs/first

    slimx status run.yaml --check

    Page: docs/operations.md
    """
    import json

    directory = Path(load_config(run, overrides or []).run.dir) if run.is_file() else run
    if saved:
        from slimx.orchestration.state.saves import saved_step

        print(saved_step(directory))
        return
    from slimx.extras.watch.status import describe_status, run_status

    values = run_status(directory)
    print(json.dumps(values, indent=1) if as_json else visible("\n".join(describe_status(values))))
    if check:
        raise typer.Exit(values["state"].exit_status)


@stacks_app.command(cls=PlainCommand)
def stacks(
    run: Annotated[Path, typer.Argument(help="Run directory; only processes on this machine are shown.")],
    debug: Debug = False,
) -> None:
    """Prints the Python stacks of a run's processes on this machine: driver, ranks, engines, workers.

    Examples:

    slimx stacks runs/first

    Page: docs/runbook.md
    """
    from slimx.extras.watch.status import run_stacks

    print(visible(run_stacks(run)))


@rollouts_app.command(cls=PlainCommand)
def rollouts(
    directory: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[int | None, typer.Option(help="Step whose groups are shown; default: one line per step.")] = None,
    group: Annotated[str | None, typer.Option(help="Show only the group with this id.")] = None,
    reward_below: Annotated[float | None, typer.Option(help="Show only trajectories with a reward below this.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of groups shown; 0: all.")] = 8,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every token with log-prob, mask and version.")] = False,
    buffer: Annotated[
        bool, typer.Option("--buffer", help="Show groups that the newest checkpoint saved for later steps.")
    ] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Show groups that were not trained, and why.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Shows the rollouts that a run was trained on, group by group: prompts, responses, rewards, weight versions.

    Examples:

    slimx rollouts runs/first

    slimx rollouts runs/first --step 20 --reward-below 0.5 --limit 2

    slimx rollouts runs/first --step 20 --tokens

    Page: docs/rollouts.md
    """
    from slimx.extras.watch.rollouts import Choice, show_rollouts

    choice = Choice(group=group, reward_below=reward_below, limit=limit, tokens=tokens)
    for line in show_rollouts(directory, step, choice, buffer=buffer, dropped=dropped, as_json=as_json):
        print(visible(line))
