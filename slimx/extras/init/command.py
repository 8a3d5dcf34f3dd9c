"""The command `slimx init`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimx.commands.options import Debug
from slimx.commands.usage import PlainCommand
from slimx.errors import SlimxError
from slimx.extras.foreign.commented_yaml import refuse_existing, write_out
from slimx.extras.init.machine import CPU, TYPES, target
from slimx.observability.live.safe_text import one_line, visible

if TYPE_CHECKING:
    from slimx.extras.init.prompts import Prompts
    from slimx.extras.init.settings import Setting

app = typer.Typer(add_completion=False)
MODEL, PROMPTS = "directory of the model", "file of prompts"
"""Questions on a terminal, and names in errors, of the two options that have no default."""


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
    if not asks:  # said before seconds of imports
        for option, question, value in (("--model", MODEL, model), ("--prompts", PROMPTS, prompts)):
            if not value:
                raise _missing(option, question)
    from slimx.extras.init.prompts import examine  # the imports of tokenizers take seconds
    from slimx.models.families import read_model

    def named(answer: str) -> str:
        read_model(answer)
        return answer

    # Every answer is checked before the next question.
    directory = named(model) if model else _answer("--model", MODEL, _first("models/*/config.json", parent=True), named)

    def examined(file: str) -> Prompts:
        print(f"reading {one_line(file)}", file=sys.stderr, flush=True)
        return examine(file, directory)

    if prompts:
        found = examined(prompts)
    else:
        found = _answer("--prompts", PROMPTS, _first("data/*train*.jsonl") or _first("data/*.jsonl"), examined)
    evaluated = None
    if held_out:
        evaluated = examined(held_out)
    elif asks and held_out is None:
        evaluated = _answer("", "file of held-out prompts, or Enter", "", lambda file: examined(file) if file else None)
    from slimx.extras.init.run import Wishes, check_reward, checked_file, settings_of

    def loadable(function: str) -> str:
        check_reward(function, directory, found.path)
        return function

    if reward is None and found.reward is None:
        question = f"reward function, as {found.why}"
        if not asks:
            raise _missing("--reward", question)
        reward = _answer("--reward", question, "", loadable)
    wishes = Wishes(
        model=directory,
        eval=evaluated,
        reward=reward or found.reward or "",
        why="chosen with --reward: docs/hooks.md" if reward else f"{found.why}: docs/hooks.md",
        algorithm=algorithm,
        steps=steps,
        max_tokens=max_tokens,
        directory=run_dir or f"runs/{out.stem}",
    )

    def settings_on(kind: str) -> list[Setting]:
        chosen = target(kind, gpus, nodes)
        if kind != CPU and not (gpus or nodes):
            chosen = _answer("--nodes", "number of nodes", "1", lambda answer: target(kind, None, _number(answer)))
        return settings_of(wishes, found, chosen)

    if asks and gpu is None and machine.gpu is None:
        settings = _answer("--gpu", f"machine of the run ({', '.join(TYPES)})", CPU, settings_on)
    else:
        settings = settings_of(wishes, found, machine)
    title = "A first run, written by slimx init. slimx keys KEY explains a key; all of them: docs/configuration.md"
    text = checked_file(settings, title, str(out))
    write_out(out, text)
    print(f"{one_line(out)}: written; next:")
    for action in ("plan", "doctor", "train"):
        print(f"  slimx {action} {shlex.quote(one_line(out))}")


def _answer[T](option: str, question: str, default: str, read: Callable[[str], T]) -> T:
    """Returns what `read` makes of the user's answer to `question`, or of `default` if the answer is empty. Asks again,
    with the reason, while `read` raises SlimxError; after the end of the input, this error is raised. `option`: option
    of the answer, named if there is neither an answer nor a default; "" if there may be none."""
    shown = f" [{default}]" if default else ""
    while True:
        ended = False
        answer = default
        try:
            answer = os.path.expanduser(input(f"{question}{shown}: ").strip()) or default
        except EOFError:
            ended = True
        try:
            if option and not answer:
                raise _missing(option, question)
            return read(answer)
        except SlimxError as error:
            if ended:
                raise
            print(visible(f"slimx: {error}"), file=sys.stderr, flush=True)


def _missing(option: str, question: str) -> SlimxError:
    return SlimxError(f"slimx init needs the {question}; add {option}", code="init.missing", about=option)


def _number(answer: str) -> int:
    """Returns the number that the user typed. Raises SlimxError if it is no positive integer."""
    if not answer.isdecimal() or not int(answer):
        raise SlimxError(f"{answer!r} is no positive number; type digits", code="init.number", about=answer)
    return int(answer)


def _first(pattern: str, *, parent: bool = False) -> str:
    """Returns the first path in the working directory that matches `pattern`, or its parent; "" if there is none."""
    for path in sorted(Path().glob(pattern)):
        return str(path.parent if parent else path)
    return ""
