"""The commands `slimx doctor` and `slimx health`, which check a machine, a run or a node."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimx.commands.options import Debug, Overrides
from slimx.commands.usage import PlainCommand, RayCommand
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.errors import SlimxError, counted
from slimx.layout.ranks import Sizes
from slimx.observability.live.safe_text import one_line, plain, visible

app = typer.Typer(add_completion=False)
health_app = typer.Typer(add_completion=False)


@app.command(cls=RayCommand)
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(help="YAML file of a run to check too: its configuration, checkpoint, prompts and hooks."),
    ] = None,
    overrides: Overrides = None,
    effects: Annotated[
        bool,
        typer.Option("--effects", help="Only show how much each term of FILE's loss changes the gradient."),
    ] = False,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Only load FILE's hooks and try them on one prompt, with scripted engines.")
    ] = False,
    say: Annotated[
        list[str] | None,
        typer.Option(help="With --hooks: text that the engine returns first; repeat for later turns."),
    ] = None,
    gap: Annotated[
        bool,
        typer.Option("--gap", help="Only sample one batch and compare its log-probs between engines and trainers."),
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="With --gap: name the first part of the model whose results differ.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show what this machine has, what it lacks for a run, and how to install it. With FILE, also check that run.

    Examples:

    slimx doctor

    slimx doctor run.yaml

    slimx doctor run.yaml --hooks --say 'a tool call'

    slimx doctor run.yaml --gap --layers

    Exit codes: 0 nothing is missing, 1 something is missing or a check failed, 2 the run or the arguments were refused.

    Page: docs/operations.md, docs/hooks.md
    """
    options = {"effects": effects, "hooks": hooks, "gap": gap or layers}
    checks = [name for name, enabled in options.items() if enabled]
    if len(checks) > 1:
        raise SlimxError(
            f"slimx doctor cannot combine --{checks[0]} with --{checks[1]}; remove --{checks[0]} or --{checks[1]}",
            code="doctor.options",
            about=f"--{checks[1]}",
        )
    if say and not hooks:
        raise SlimxError(
            "slimx doctor --say requires --hooks, because --say sets the texts that scripted engines return to hooks; "
            "add --hooks",
            code="doctor.say",
            about="--say",
        )
    if checks:
        if file is None:
            raise SlimxError(
                f"slimx doctor --{checks[0]} needs the YAML file of a run; use `slimx doctor FILE --{checks[0]}`",
                code="doctor.file",
                about=f"--{checks[0]}",
            )
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
    _check_machine(file, overrides or [])


def _check_machine(file: Path | None, overrides: list[str]) -> None:
    """Checks the machine and, if nothing is missing, the run in `file`. Raises typer.Exit with status 1 if something is
    missing."""
    from slimx.extras.doctor.machine import examine

    console = Console(soft_wrap=True)
    healthy = examine(
        lambda text, style: console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    )
    if file is not None and not healthy:
        console.print(
            plain(f"{file} is not checked, because its checks need the missing parts; install these parts first")
        )
    elif file is not None:
        config = load_config(file, overrides)
        from slimx.config.sections.policies import ACTOR
        from slimx.orchestration.start.prepare import check_run

        prepared = check_run(config)
        actor = prepared.policies[ACTOR]
        first = next(iter(prepared.prompts), None)
        if first is not None:
            from slimx.extras.datasets.command import rendered_lines
            from slimx.extras.vision.prompts.check import with_image_parts

            if config.trainer.vision is not None:
                first = with_image_parts(first)
            for line in ["the first prompt, as the model receives it:", *rendered_lines(first, actor.tokenizer)]:
                console.print(plain(line))
        console.print(plain(f"publish.transport {actor.transport}"))
        summary = f"{file}: {counted(len(prepared.prompts), 'prompt')}, {described(actor.sizes)}: ready to start"
        console.print(plain(summary))
    if not healthy:
        raise typer.Exit(1)


def described(sizes: Sizes) -> str:
    """Returns the number of the trainer's ranks, with those parallel sizes that are not 1."""
    parts = [f"{name} {size}" for name, size in asdict(sizes).items() if isinstance(size, int) and size > 1]
    return f"trainer.world_size={sizes.world} ({', '.join(parts) or 'one rank'})"


def _show_gap(config: Config, layers: bool) -> bool:
    """Shows the log-prob gap between trainers and engines, and returns False if numerics.mode is exact but the
    log-probs of a batch are not bitwise equal. Raises SlimxError, before torch is imported, if the policy has no
    engines, or if the trainer's parallel sizes prevent comparing layers."""
    if not config.served.policy:
        raise SlimxError(
            "slimx doctor --gap compares trainers with engines, but no group in rollout.engines serves the policy; add "
            "an engine group that serves the policy",
            code="engines.none",
            about="rollout.engines",
        )
    if layers and config.trainer.tensor * config.trainer.context > 1:
        raise SlimxError(
            "slimx doctor --gap --layers cannot compare hidden states that are sharded across ranks; set "
            "trainer.tensor=1 and trainer.context=1, and set numerics.leaves to the run's value",
        )
    from slimx.orchestration.start import checks

    checks.check_parts(config)
    from slimx.extras.doctor.gap import run_gap

    return run_gap(config, Console(soft_wrap=True), layers=layers) or not config.exact


def _show_effects(file: Path, config: Config) -> bool:
    """Shows the effects of loss terms, and returns False if a term that the configuration sets has no effect."""
    from slimx.extras.doctor.effects.effects import describe, effects

    terms = effects(config)
    print(f"{file}: share of each term of the loss in the gradient of a small synthetic batch")
    for line in describe(terms):
        print(line)
    return all(effect.share or not effect.chosen for effect in terms)


def _show_hooks(file: Path, config: Config, texts: list[str]) -> bool:
    """Shows the results of trying the hooks, and returns False if a hook has a problem. `texts`: first responses of the
    scripted engine."""
    from slimx.extras.doctor.hooks.doctor import examine_hooks

    findings = examine_hooks(config, texts)
    print(f"{file}: hooks, tried on one prompt with scripted engines")
    for line in findings.lines:
        print(visible(line))
    for note in findings.notes:
        print(visible(f"  note     {note}"))
    for problem in findings.problems:
        print(f"  problem  {one_line(str(problem))}")
    return not findings.problems


@health_app.command(cls=PlainCommand)
def health(
    gpus: Annotated[int, typer.Option(help="Number of GPUs that must be present and healthy.")] = 0,
    hca: Annotated[
        list[str] | None,
        typer.Option(help="InfiniBand or RoCE adapter that needs an active port."),
    ] = None,
    path: Annotated[
        list[Path] | None, typer.Option(help="Paths that need free space; default: /tmp and this directory.")
    ] = None,
    disk: Annotated[float, typer.Option(help="Free GiB that each path must have.")] = 5.0,
    shm: Annotated[float, typer.Option(help="Free GiB that /dev/shm must have.")] = 1.0,
    clock: Annotated[
        float | None,
        typer.Option(help="Time of the launcher's clock, in seconds since the epoch."),
    ] = None,
) -> None:
    """Check whether this node is fit for a run. Exits with code 0 if it is; otherwise prints the reasons and exits with
    code 1.

    Examples:

    slimx health --gpus 8

    slimx health --gpus 8 --hca mlx5_0 --path /scratch --disk 500

    Page: docs/operations.md
    """
    from slimx.extras.doctor.node_health import NodeRequirements, examine_node

    paths = path or NodeRequirements().paths
    required = NodeRequirements(gpus=gpus, disk_gib=disk, shm_gib=shm, paths=paths, hcas=hca or (), clock=clock)
    problems, notes = examine_node(required)
    for problem in problems:
        print(problem)
    for note in notes:
        print(f"note: {note}")
    if problems:
        raise typer.Exit(1)
