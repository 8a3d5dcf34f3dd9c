"""The command `slimx init`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.options import Debug
from slimx.commands.usage import PlainCommand
from slimx.errors import SlimxError
from slimx.extras.foreign.commented_yaml import refuse_existing, write_out
from slimx.extras.init.machine import CPU, TYPES, target
from slimx.observability.live.safe_text import one_line

app = typer.Typer()


@app.command(cls=PlainCommand)
def init(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face directory of the model; config.json suffices.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="File of prompts; slimx data NAME FILE writes known sets.")
    ] = None,
    held_out: Annotated[str | None, typer.Option("--eval", help="File of held-out prompts; default: none.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Reward function; default: one that can grade the answers.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Preset of section algorithm.")] = "grpo",
    gpu: Annotated[
        str | None, typer.Option(help=f"Machine of the run: {', '.join(TYPES)}; default: this machine.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs of all nodes; default: all.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: as many as --gpus need.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps; default: one pass over the data.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens of a response.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Run directory; default: runs/ and the name of --out.")] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    debug: Debug = False,
) -> None:
    """Write a commented run.yaml for a model, a prompt file and a machine. On a terminal, asks for what is missing.

    Examples:

    slimx init

    slimx init --model models/Qwen2.5-0.5B-Instruct --prompts data/gsm8k.jsonl --eval data/gsm8k-test.jsonl

    slimx init --model models/Qwen3-30B-A3B --prompts data/dapo.jsonl --gpu h100 --nodes 4 --out big.yaml

    The file passes `slimx plan` before it is written. Page: docs/guides/first-run.md
    """
    refuse_existing(out, force=force)
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    machine = target(gpu, gpus, nodes)
    model = model or _required(asks, "--model", "directory of the model", _first("models/*/config.json", parent=True))
    if not asks and not prompts:  # said before seconds of imports
        _required(asks, "--prompts", "file of prompts", "")
    from slimx.extras.init.prompts import examine  # the imports of tokenizers take seconds
    from slimx.models.families import read_model

    read_model(model)  # every answer is checked before the next question
    train = _first("data/*train*.jsonl") or _first("data/*.jsonl")
    prompts = prompts or _required(asks, "--prompts", "file of prompts", train)
    print(f"reading {one_line(prompts)}", file=sys.stderr, flush=True)
    found = examine(prompts, model)
    if asks and held_out is None:
        held_out = _answer("file of held-out prompts, or Enter", "") or None
    evaluated = examine(held_out, model) if held_out else None
    if asks and gpu is None and machine.gpu is None:
        gpu = _answer(f"machine of the run ({', '.join(TYPES)})", CPU)
        if gpu != CPU and not (gpus or nodes):
            nodes = _number("number of nodes", 1)
        machine = target(gpu, gpus, nodes)
    from slimx.extras.init.run import Wishes, checked_file, settings_of

    if reward is None and found.reward is None:
        reward = _required(asks, "--reward", f"reward function, as {found.why}", "")
    wishes = Wishes(
        model=model,
        eval=evaluated,
        reward=reward or found.reward or "",
        why="chosen with --reward: docs/hooks.md" if reward else f"{found.why}: docs/hooks.md",
        algorithm=algorithm,
        steps=steps,
        max_tokens=max_tokens,
        directory=run_dir or f"runs/{out.stem}",
    )
    settings = settings_of(wishes, found, machine)
    title = "A first run, written by slimx init. slimx keys KEY explains a key; all of them: docs/configuration.md"
    text = checked_file(settings, title, str(out))
    write_out(out, text)
    print(f"{one_line(out)}: written; next:")
    for action in ("plan", "doctor", "train"):
        print(f"  slimx {action} {one_line(out)}")


def _required(asks: bool, option: str, question: str, default: str) -> str:
    """Returns the user's answer to `question`; `asks`: True if there is a terminal. Raises SlimxError naming `option`
    if there is none, or if the answer is empty."""
    answer = _answer(question, default) if asks else ""
    if not answer:
        raise SlimxError(f"slimx init needs the {question}; add {option}", code="init.missing", about=option)
    return answer


def _answer(question: str, default: str) -> str:
    """Returns what the user types on the terminal; `default` if that is nothing."""
    shown = f" [{default}]" if default else ""
    try:
        return input(f"{question}{shown}: ").strip() or default
    except EOFError:
        return default


def _number(question: str, default: int) -> int:
    """Returns the number that the user types on the terminal; `default` if that is nothing. Raises SlimxError if it is
    no positive integer."""
    answer = _answer(question, str(default))
    if not answer.isdecimal() or not int(answer):
        raise SlimxError(f"the {question} is {answer!r}; type a number", code="init.number", about=question)
    return int(answer)


def _first(pattern: str, *, parent: bool = False) -> str:
    """Returns the first path in the working directory that matches `pattern`, or its parent; "" if there is none."""
    for path in sorted(Path().glob(pattern)):
        return str(path.parent if parent else path)
    return ""
