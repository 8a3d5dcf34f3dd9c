"""The command line: slimx train | generate | eval | plan | data | convert | doctor | health | status | watch |
stacks | rollouts | report."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimx import __version__
from slimx.commands.data import command as data
from slimx.commands.usage import Program, RunCommand, refusal
from slimx.config import load_config
from slimx.config.schema import Config
from slimx.errors import Interrupted, Preempted, SlimxError, ending_of
from slimx.observability.live.safe_text import one_line, plain, visible, with_log
from slimx.runtime.children import search_working_directory

app = typer.Typer(
    cls=Program,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning training for large mixture-of-experts language models.",
)
app.command("data")(data)


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
WITH_RAY = ("train", "generate", "eval", "doctor")
"""Commands that start Ray, or join it."""
EXIT_S = 10.0
"""Seconds that the interpreter gets to end once all is said."""
RunFile = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, applied in order.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Hugging Face directory that engines start from; else as training would.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command(cls=RunCommand)
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


@app.command(cls=RunCommand)
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


@app.command("eval", cls=RunCommand)
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


@app.command(cls=RunCommand)
def plan(
    file: RunFile,
    overrides: Overrides = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Predict stage times on clusters, after a test here of 3 seconds.")
    ] = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Search layouts that fit the memory of cluster.gpu, and rank them.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what FILE's run would do, from it and the model's config.json alone: no weights, no GPU."""
    config = load_config(file, overrides or [])
    from slimx.commands.plan import run_plan

    for line in (done := run_plan(config, predict=predict, suggest=suggest, as_json=as_json)).lines:
        print(visible(line))
    for sentence in done.violations:
        print(f"slimx: {one_line(sentence)}", file=sys.stderr)
    if done.violations:
        raise typer.Exit(2)


@app.command(cls=RunCommand)
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="Check this run's configuration, checkpoint, prompts and hooks too.")
    ] = None,
    overrides: Overrides = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Only say which terms of FILE's loss change its gradient, and how much.")
    ] = False,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Only load FILE's hooks and try them on a prompt, with scripted engines.")
    ] = False,
    say: Annotated[
        list[str] | None,
        typer.Option(help="With --hooks: a text that scripted engines say first, such as a tool's call; again: next."),
    ] = None,
    gap: Annotated[
        bool, typer.Option("--gap", help="Only sample a batch and compare its log-probs between engines and trainers.")
    ] = False,
    layers: Annotated[bool, typer.Option("--layers", help="With --gap: name the first part that differs.")] = False,
    debug: Debug = False,
) -> None:
    """Say what this machine has, what is missing and how to get it."""
    asked = [name for name, given in (("effects", effects), ("hooks", hooks), ("gap", gap or layers)) if given]
    if len(asked) > 1:
        raise SlimxError(
            f"slimx doctor takes one of --{asked[0]} and --{asked[1]} at a time; leave one out",
            code="doctor.options",
            about=f"--{asked[1]}",
        )
    if say and not hooks:
        raise SlimxError(
            "slimx doctor --say tells what scripted engines say to hooks; add --hooks", code="doctor.say", about="--say"
        )
    if asked and file is None:
        raise SlimxError(
            f"slimx doctor --{asked[0]} needs the YAML file of a run; give it as FILE",
            code="doctor.file",
            about=f"--{asked[0]}",
        )
    if asked:
        config = load_config(file, overrides or [])
        if effects:
            fine = _show_effects(file, config)
        elif hooks:
            fine = _show_hooks(file, config, say or [])
        else:
            fine = _show_gap(config, layers)
        if not fine:
            raise typer.Exit(1)
        return
    from slimx.commands.doctor import examine

    console = Console(soft_wrap=True)
    healthy = examine(
        lambda text, style: console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    )
    if file is not None and not healthy:
        console.print(plain(f"{file} is not checked: it needs what is missing"))
    elif file is not None:
        config = load_config(file, overrides or [])
        from slimx.orchestration.prepare import check_run

        prepared = check_run(config)
        first = next(iter(prepared.prompts), None)
        if first is not None:
            from slimx.commands.data import rendered_lines

            for line in ["the first prompt, as the model is given it:", *rendered_lines(first, prepared.tokenizer)]:
                console.print(plain(line))
        console.print(plain(f"publish.transport {prepared.transport}"))
        told = f"{file}: {len(prepared.prompts)} prompts, layout {prepared.sizes}: nothing stands in the way"
        console.print(plain(told))
    if not healthy:
        raise typer.Exit(1)


def _show_gap(config: Config, layers: bool) -> bool:
    """False if numerics.mode is exact and there is a gap."""
    from slimx.commands import start

    return start.measure_gap(config, Console(soft_wrap=True), layers=layers) or not config.exact


def _show_effects(file: Path, config: Config) -> bool:
    """False if a term that the configuration chose changes nothing."""
    from slimx.preflight.effects.effects import describe, effects

    found = effects(config)
    print(f"{file}: what each term of the loss is worth in the gradient of a small invented batch")
    for line in describe(found):
        print(line)
    return all(effect.share or not effect.chosen for effect in found)


def _show_hooks(file: Path, config: Config, texts: list[str]) -> bool:
    """False if a hook is wrong."""
    from slimx.commands.hooks.doctor import examine_hooks

    found = examine_hooks(config, texts)
    print(f"{file}: hooks, tried on one prompt with scripted engines")
    for line in [*found.lines, *(f"  note     {note}" for note in found.notes)]:
        print(visible(line))
    for problem in found.problems:
        print(f"  problem  {one_line(str(problem))}")
    return not found.problems


@app.command()
def health(
    gpus: Annotated[int, typer.Option(help="GPUs that must be there and whole.")] = 0,
    hca: Annotated[list[str] | None, typer.Option(help="InfiniBand or RoCE adapter with an active port.")] = None,
    path: Annotated[list[Path] | None, typer.Option(help="Where space is needed; else /tmp and here.")] = None,
    disk: Annotated[float, typer.Option(help="GiB that must be free in each of these paths.")] = 5.0,
    shm: Annotated[float, typer.Option(help="GiB that must be free in /dev/shm.")] = 1.0,
    clock: Annotated[float | None, typer.Option(help="The launcher's time, seconds since the epoch.")] = None,
) -> None:
    """Say whether this node is fit for a run: exit code 0, or 1 with the reasons."""
    from slimx.commands.node_health import Wanted, examine_node

    paths = path or Wanted().paths
    wanted = Wanted(gpus=gpus, disk_gib=disk, shm_gib=shm, paths=paths, hcas=hca or (), clock=clock)
    problems, notes = examine_node(wanted)
    for line in [*problems, *(f"note: {note}" for note in notes)]:
        print(line)
    if problems:
        raise typer.Exit(1)


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
def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8890,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    debug: Debug = False,
) -> None:
    """Serve a live page about a run: what it does now, curves, time, rollouts token by token. Ctrl-C ends it."""
    from slimx.commands.watch.server import serve

    serve(run, host, port, lambda text: print(text, flush=True))


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


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; those with rollouts come first.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "slimx run",
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML report of one or more runs."""
    from slimx.observability.report.report import write_report

    write_report(runs, out, title)
    Console(soft_wrap=True).print(plain(f"report {out}"))


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

    over = supervised() if sys.argv[1:2] and sys.argv[1] in WITH_RAY else None
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
