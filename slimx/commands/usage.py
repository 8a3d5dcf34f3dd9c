"""Command groups, which find the commands of extras, and error messages for unknown commands and options."""

from __future__ import annotations

import difflib
import os
import re
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.suggestions import for_flag
from slimx.errors import REFUSED, SlimxError, raised

if TYPE_CHECKING:
    from typer._click.core import Command, Context  # types in the signatures of its public classes

COMMANDS = "slimx.commands"
"""Entry point group in which extras register their commands."""


class CommandGroup(TyperGroup):
    """A command group that suggests the most similar name for an unknown command, and prints its help if no command is
    given."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        args = [_expanded(argument) for argument in args]
        if not args and not ctx.resilient_parsing:  # it is True while a shell completes words
            print(ctx.get_help())
            ctx.exit(REFUSED)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name = args[0]
        if not (ctx.resilient_parsing or name.startswith("-") or self.get_command(ctx, name)):
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(name, names, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"its commands are {', '.join(names)}"
            raise SlimxError(f"{_command_path(ctx)} has no command {name}; {hint}", code="cli.command", about=name)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        command = super().get_command(ctx, cmd_name)
        return command and _in_capitals(command)


class RootGroup(CommandGroup):
    """The group of all commands: the built-in ones, and those registered as entry points, which are imported when
    looked up."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*super().list_commands(ctx), *entry_points.find(COMMANDS)]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        core_command = super().get_command(ctx, cmd_name)
        if core_command is not None or cmd_name not in entry_points.find(COMMANDS):
            return core_command
        command = typer.main.get_command(entry_points.load(COMMANDS, cmd_name))
        command.name = cmd_name
        return _in_capitals(command)


class PlainCommand(TyperCommand):
    """A command whose usage shows its arguments without braces: `FILE [OVERRIDES]...`."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


class RunCommand(PlainCommand):
    """A command that takes a run's YAML file. For an unknown flag that belongs to another framework, the error suggests
    the equivalent key of slimx. The exit status is 0 only if the command has finished, even if a hook raises
    SystemExit(0)."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        known = {"--", "--help"}
        for parameter in self.params:
            known.update(parameter.opts, parameter.secondary_opts)
        for index, argument in enumerate(args):
            flag, equals, value = argument.partition("=")
            if not flag.startswith("--") or flag in known:
                continue
            if not equals:
                following = args[index + 1 : index + 2]
                value = "true"
                if following and not following[0].startswith("--"):
                    value = following[0]
            suggestion = for_flag(Config, flag, value)
            if suggestion is not None and not ctx.resilient_parsing:
                raise SlimxError(
                    f"slimx {self.name} has no option {flag}; {suggestion}", code="cli.foreign_flag", about=flag
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> object:
        try:
            return super().invoke(ctx)
        except (SystemExit, typer.Exit) as error:
            code = error.code if isinstance(error, SystemExit) else error.exit_code
            if code and isinstance(error, typer.Exit):
                raise  # the command itself failed; commands never raise it for success
            raise SlimxError(
                f"slimx {self.name} was ended early by {raised(error)}; remove the call to exit from the run's hooks "
                "or from the modules that the hooks import",
                code="cli.exit",
                about=type(error).__name__,
            ) from error


class RayCommand(RunCommand):
    """A command that starts or joins Ray. Its process runs as the child of a supervising parent
    (slimx.orchestration.lifetime.parent)."""


def starts_ray(app: typer.Typer, name: str) -> bool:
    """Returns True if the command `name` of `app` is a `RayCommand`; False if its entry point cannot be loaded, which
    is reported later."""
    group = typer.main.get_command(app)
    try:
        return isinstance(group, RootGroup) and isinstance(group.get_command(typer.Context(group), name), RayCommand)
    except SlimxError:
        return False


def _in_capitals(command: Command) -> Command:
    """Returns `command`, whose help then shows the names of its arguments in capitals, as errors do."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.name.upper()
    return command


def _expanded(argument: str) -> str:
    """Returns `argument` with a leading `~` expanded to the home directory, also at the start of an option's value
    (--option=~/path), where shells do not expand it."""
    if not argument.startswith("--"):
        return os.path.expanduser(argument)
    option, equals, value = argument.partition("=")
    return option + equals + os.path.expanduser(value)


def refusal(error: typer.TyperException) -> SlimxError:
    """Returns the error to report for arguments that the command-line parser rejected with `error`."""
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return SlimxError(str(error), code="cli.arguments", about="slimx")
    command = _command_path(ctx)
    option = getattr(error, "option_name", None)
    options = _options_of(ctx.command)
    if option is not None and option not in options:
        near = difflib.get_close_matches(option, options, n=1)
        hint = f"did you mean {near[0]}?" if near else _hint_without(ctx, option)
        return SlimxError(f"{command} has no option {option}; {hint}", code="cli.option", about=option)
    parameter = getattr(error, "param", None)
    if parameter is not None and not error.args[0]:
        name = parameter.name.upper()
        option = next((option for option in parameter.opts if option.startswith("--")), None)
        if option is not None:
            name = f"{option} {name}"
        description = (parameter.help or name).rstrip(".")
        return SlimxError(
            f"{command} requires {name} ({description}); add this argument", code="cli.missing", about=name
        )
    return SlimxError(f"{command}: {error.format_message()}", code="cli.arguments", about=command)


def _hint_without(ctx: Context, option: str) -> str:
    """Returns a hint for an unknown option: the other commands that have it or, if there are none, the arguments and
    options of this command."""
    others = _commands_with(ctx, option)
    if others:
        verb = "has" if len(others) == 1 else "have"
        return f"{' and '.join(others)} {verb} it"
    arguments = []
    for parameter in ctx.command.params:
        if parameter.param_type_name == "argument":
            arguments.append((parameter.name or "").upper())
    return f"its arguments are {', '.join([*arguments, *_options_of(ctx.command), '--help'])}"


def _options_of(command: Command) -> list[str]:
    options = []
    for parameter in command.params:
        for name in parameter.opts:
            if name.startswith("--"):
                options.append(name)
    return options


def _commands_with(ctx: Context, option: str) -> list[str]:
    """Returns the other commands of the same group that have the option `option`."""
    if ctx.parent is None or not isinstance(ctx.parent.command, TyperGroup):
        return []
    group = ctx.parent.command
    names = []
    for name in group.list_commands(ctx.parent):
        command = group.get_command(ctx.parent, name)
        if command is not None and any(option in parameter.opts for parameter in command.params):
            names.append(f"slimx {name}")
    return names


def _command_path(ctx: Context) -> str:
    """Returns the full name of a command, such as "slimx convert hf-to-int4"."""
    names = []
    while ctx.parent is not None:
        names.append(ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(["slimx", *reversed(names)])
