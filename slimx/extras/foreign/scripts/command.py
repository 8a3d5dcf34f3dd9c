"""The commands `slimx from-slime`, `from-verl` and `from-trl`: a launch script becomes a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from slimx.commands.usage import PlainCommand
from slimx.errors import SlimxError
from slimx.extras.foreign.commented_yaml import refuse_existing, write_out
from slimx.extras.foreign.megatron import MEGATRON
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.from_slime import PROGRAMS, read_slime
from slimx.extras.foreign.scripts.from_trl import is_program as is_trl
from slimx.extras.foreign.scripts.from_trl import launch_values, read_trl, yaml_values
from slimx.extras.foreign.scripts.from_verl import is_program, read_verl
from slimx.extras.foreign.scripts.python_file import arguments_in
from slimx.extras.foreign.scripts.shell.expansion import shown, unknown_in
from slimx.extras.foreign.scripts.shell.files import text_of
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of, keys_of, launch_of
from slimx.extras.foreign.scripts.shell.script import commands_of
from slimx.extras.foreign.slime import SLIME
from slimx.extras.foreign.trl import TRL
from slimx.observability.live.safe_text import one_line, visible

slime_app = typer.Typer(add_completion=False)
verl_app = typer.Typer(add_completion=False)
trl_app = typer.Typer(add_completion=False)

_SIGNS = {
    "slime": r"\btrain(_async)?\.py\b.*|--rollout-batch-size",
    "verl": r"\bverl\.\w+|actor_rollout_ref\.",
    "trl": r"\btrl\b|\w+(Config|Trainer)\(|--num_generations|num_generations:",
}
"""Patterns of text that occurs in the scripts of each framework."""
_KINDS = {".py": "a Python program", ".yaml": "a YAML file", ".yml": "a YAML file"}
_UNREAD = {".json": "a JSON file", ".ipynb": "a notebook"}
_STARTS = {"slime": "train.py or train_async.py of slime", "verl": "a trainer of verl", "trl": "a trainer of TRL"}

Script = Annotated[Path, typer.Argument(help="Launch script, or a file with only the flags.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=VALUE]...",
        help="Variables of the script's environment, and arguments as 1=VALUE; of a Python or YAML file, settings.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="File to write instead of standard output.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]


@slime_app.command(cls=PlainCommand)
def from_slime(script: Script, variables: Settings = None, out: Out = None, force: Force = False) -> None:
    """Write the configuration that SCRIPT, a launch script of slime or Miles, corresponds to.

    Examples:

    slimx from-slime run-qwen3-30B-A3B.sh

    slimx from-slime run.sh MASTER_ADDR=127.0.0.1 --out run.yaml

    Page: docs/guides/coming-from.md
    """
    names = {*SLIME, *MEGATRON}

    def find(commands: Sequence[list[str]]) -> Launch | None:
        return launch_of(commands, lambda word: Path(word).name in PROGRAMS, names) or _alone(commands, "-", "train.py")

    with _written("slime", script, out, force=force) as (draft, text):
        launch = _launch(script, text, _values(variables), draft, find)
        words = () if launch is None else launch.arguments
        if launch is None or not (flags_of(words).keys() & names or unknown_in(" ".join(words))):
            raise _no_launch(script, text, "slime")
        read_slime(dataclasses.replace(launch, program=Path(launch.program).name), draft)


@verl_app.command(cls=PlainCommand)
def from_verl(script: Script, variables: Settings = None, out: Out = None, force: Force = False) -> None:
    """Write the configuration that SCRIPT, a launch script of verl, corresponds to.

    Examples:

    slimx from-verl run_qwen3moe-30b_megatron.sh --out run.yaml

    Page: docs/guides/coming-from.md
    """

    def find(commands: Sequence[list[str]]) -> Launch | None:
        return launch_of(commands, is_program) or _alone(commands, r"\S+=", "verl.trainer.main_ppo")

    with _written("verl", script, out, force=force) as (draft, text):
        launch = _launch(script, text, _values(variables), draft, find)
        if launch is None:
            raise _no_launch(script, text, "verl")
        read_verl(launch, draft)


@trl_app.command(cls=PlainCommand)
def from_trl(script: Script, variables: Settings = None, out: Out = None, force: Force = False) -> None:
    """Write the configuration that SCRIPT, a launch script, Python file or YAML file of TRL, corresponds to.

    Examples:

    slimx from-trl grpo.py

    slimx from-trl sft.yaml trainer=sft --out run.yaml

    Page: docs/guides/coming-from.md
    """
    settings = _values(variables)
    with _written("trl", script, out, force=force) as (draft, text):
        if script.suffix == ".py":
            values = arguments_in(script, text)
        elif script.suffix in _KINDS:
            values = yaml_values(script)
        else:
            files: dict[str, str] = {}
            launch = _launch(
                script,
                text,
                settings,
                draft,
                lambda words: launch_of(words, is_trl, TRL) or _alone(words, "-", ""),
                files,
            )
            values = {} if launch is None else launch_values(launch, files)
        if not values.keys() & {"trainer", "model_name_or_path", "output_dir"}:
            raise _no_launch(script, text, "trl")
        if script.suffix in _KINDS:
            values |= {name: [value] for name, value in settings.items()}
            if "TrlParser" in text:
                draft.left["TrlParser"] = (
                    "the program has more flags on its command line; read the launch script instead"
                )
            if "trainer" not in values:
                draft.supply["algorithm.name"] = (
                    "the file does not name a trainer; add trainer=sft or another to the command"
                )
        read_trl(values, draft)


@contextlib.contextmanager
def _written(framework: str, script: Path, out: Path | None, *, force: bool) -> Iterator[tuple[Draft, str]]:
    """Yields an empty draft and the text of `script`; writes the draft at the end of the `with` block. Turns an
    impossible computation in it, such as a division by a batch size of 0, into an error about the script."""
    draft = Draft(f"{script.name} by `slimx from-{framework}`")
    try:
        yield draft, _text(script, framework)
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, SlimxError):
            raise
        raise SlimxError(
            f"{script}: a size or number cannot be computed ({error}); correct the values of the script",
            code="foreign.values",
            about=str(script),
        ) from error
    refuse_existing(out, force=force)
    written, refusals = draft.text()
    if out is None:
        print(visible(written), end="")
    else:
        write_out(out, written)
        print(f"wrote {out}", file=sys.stderr)
    for sentence in refusals:
        print("slimx: " + one_line(sentence), file=sys.stderr)
    if refusals:
        raise typer.Exit(2)


def _text(script: Path, framework: str) -> str:
    if not script.is_file():
        raise SlimxError(
            f"there is no file {script}; give the path of a launch script of {framework}",
            code="foreign.no_script",
            about=str(script),
        )
    read = "shell scripts" + ", Python and YAML files" * (framework == "trl")
    kind = (_UNREAD if framework == "trl" else _KINDS | _UNREAD).get(script.suffix)
    if kind is not None:
        raise SlimxError(
            f"{script} is {kind}, but from-{framework} reads {read}; give the script that starts "
            f"{_STARTS[framework]}, or write the {'keys' if framework == 'verl' else 'flags'} of its command into a "
            "text file",
            code="foreign.kind",
            about=str(script),
        )
    return text_of(script)


def _values(variables: Settings) -> dict[str, str]:
    values = {}
    for variable in variables or ():
        name, equals, value = variable.partition("=")
        if not equals:
            raise SlimxError(
                f"{variable!r} sets no variable; write NAME=VALUE after the script",
                code="foreign.no_variable",
                about=variable,
            )
        values[name] = value
    return values


def _launch(
    script: Path,
    text: str,
    variables: Mapping[str, str],
    draft: Draft,
    find: Callable[[Sequence[list[str]]], Launch | None],
    files: dict[str, str] | None = None,
) -> Launch | None:
    """Returns the launch command that `find` finds among the commands of a script; None if there is none. Notes in
    `draft` what depends on conditions that are not known here. `files`: receives the texts that the script writes."""
    found = []
    for assumed in (False, True):
        with contextlib.suppress(*[SlimxError] * assumed):
            commands = commands_of(script, text, variables, {} if assumed else files, assumed=assumed)
            for words in commands:
                if words[0] in ("source", "."):
                    draft.left[shown(" ".join(words))] = "this file is not here; what it sets is not known"
            launch = find(commands)
            found += [] if launch is None else [launch]
    if not found:
        return None
    one, other = (flags_of(launch.arguments) | keys_of(launch.arguments)[0] for launch in (found[0], found[-1]))
    names = sorted(name for name in one | other if one.get(name) != other.get(name))
    if names:
        draft.left["conditions that are not known here"] = (
            f"taken as false (by || as true), they decide on {', '.join(names)}"
        )
    return found[0]


def _alone(commands: Sequence[list[str]], start: str, program: str) -> Launch | None:
    """Returns the command of `program` that a file with only flags or keys, which match `start`, stands for; None if
    the file has other commands."""
    if not commands or not all(re.match(start, words[0]) for words in commands):
        return None
    return Launch(program, tuple(word for words in commands for word in words))


def _no_launch(script: Path, text: str, framework: str) -> SlimxError:
    """Returns the error for a script in which nothing of `framework` is started; it names the command for the framework
    that is."""
    other = next((name for name, sign in _SIGNS.items() if name != framework and re.search(sign, text)), None)
    if other is not None:
        return SlimxError(
            f"{script} is a script of {other}, not of {framework}; use slimx from-{other}",
            code="foreign.other_framework",
            about=str(script),
        )
    return SlimxError(
        f"{script} never starts {_STARTS[framework]}; give the launch script, or a file with only its "
        f"{'keys' if framework == 'verl' else 'flags'}",
        code="foreign.no_launch",
        about=str(script),
    )
