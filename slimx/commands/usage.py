"""The group of commands: those of extras, and refusals of commands and options that slimx does not have."""

from __future__ import annotations

import difflib
import os
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.suggestions import for_flag
from slimx.errors import REFUSED, SlimxError, raised

COMMANDS = "slimx.commands"
"""Group of entry points."""


class Group(TyperGroup):
    """A group of commands that refuses an unknown one by its nearest name, and shows its help where none is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = [_expanded(argument) for argument in args]
        if not args:
            print(ctx.get_help())
            ctx.exit(REFUSED)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(name, names, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
            raise SlimxError(f"{_called(ctx)} has no command {name}; {hint}", code="cli.command", about=name)
        return super().resolve_command(ctx, args)


class Program(Group):
    """The group of all commands: those of the core, and those of entry points, imported when they are looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *entry_points.find(COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (found := super().get_command(ctx, cmd_name)) is not None or cmd_name not in entry_points.find(COMMANDS):
            return found
        command = typer.main.get_command(entry_points.load(COMMANDS, cmd_name))
        command.name = cmd_name
        return command


class RunCommand(TyperCommand):
    """A command that takes a run's YAML file: it knows what other frameworks' flags are called here, and ends with
    success after its last line alone, whatever a hook raises."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {"--", "--help", *(name for each in self.params for name in [*each.opts, *each.secondary_opts])}
        for number, argument in enumerate(args):
            flag, given, value = argument.partition("=")
            if flag.startswith("--") and flag not in own:
                following = args[number + 1 : number + 2]
                value = value if given else following[0] if following and following[0][:2] != "--" else "true"
                if (told := for_flag(Config, flag, value)) is not None:
                    raise SlimxError(f"slimx {self.name} has no {flag}; {told}", code="cli.foreign_flag", about=flag)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SystemExit, typer.Exit) as error:
            code = error.code if isinstance(error, SystemExit) else error.exit_code
            if code and isinstance(error, typer.Exit):
                raise  # the command's own, of which none is a success
            raise SlimxError(
                f"slimx {self.name} ended before its work was done, by {raised(error)}; take the exit out of the hook, "
                "or of what it imports",
                code="cli.exit",
                about=type(error).__name__,
            ) from error


class RayCommand(RunCommand):
    """A command that starts Ray, or joins it: its process has a parent (slimx.orchestration.lifetime.parent)."""


def starts_ray(app: typer.Typer, name: str) -> bool:
    """Returns True if the command `name` is a `RayCommand`; an entry point that cannot be loaded is refused later."""
    try:
        return isinstance(typer.main.get_command(app).get_command(None, name), RayCommand)
    except SlimxError:
        return False


def _expanded(argument: str) -> str:
    """An argument with the home directory for a `~` that begins it or the value of its option, which shells leave."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return option + equals + os.path.expanduser(value)


def refusal(error: typer.TyperException) -> SlimxError:
    """The sentence for arguments that a command cannot be called with."""
    ctx, parameter, option = (getattr(error, name, None) for name in ("ctx", "param", "option_name"))
    if ctx is None:
        return SlimxError(str(error), code="cli.arguments", about="slimx")
    command = _called(ctx)
    options = [name for each in ctx.command.params for name in each.opts if name.startswith("--")]
    if option is not None and option not in options:
        near = difflib.get_close_matches(option, options, n=1)
        arguments = [each.name.upper() for each in ctx.command.params if each.param_type_name == "argument"]
        taken = [*arguments, *options, "--help"]
        if near:
            hint = f"did you mean {near[0]}?"
        elif having := _having(ctx, option):
            hint = f"{' and '.join(having)} {'has' if len(having) == 1 else 'have'} it"
        else:
            hint = f"it takes {', '.join(taken)}"
        return SlimxError(f"{command} has no {option}; {hint}", code="cli.option", about=option)
    if parameter is not None and not error.args[0]:
        option = next((each for each in parameter.opts if each.startswith("--")), None)
        name = parameter.name.upper() if option is None else f"{option} {parameter.name.upper()}"
        needed = (parameter.help or name).rstrip(".")
        return SlimxError(f"{command} needs {name}: {needed}", code="cli.missing", about=name)
    return SlimxError(f"{command}: {error.format_message()}", code="cli.arguments", about=command)  # type: ignore[attr-defined]


def _having(ctx: Any, option: str) -> list[str]:
    """Other commands of the same group that have an option."""
    if ctx.parent is None:
        return []
    group = ctx.parent.command
    commands = {name: group.get_command(ctx.parent, name) for name in group.list_commands(ctx.parent)}
    return [f"slimx {name}" for name, each in commands.items() if any(option in own.opts for own in each.params)]


def _called(ctx: Any) -> str:
    """The command's name with those of the groups above it."""
    names = []
    while ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(["slimx", *reversed(names)])
