"""The command `slimx keys`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from slimx.commands.options import AsJson, Debug
from slimx.commands.usage import PlainCommand
from slimx.extras.keys.catalog import Key, all_keys
from slimx.extras.keys.search import Found, search
from slimx.extras.keys.show import lines_of, overview, record_of

app = typer.Typer(add_completion=False)


@app.command(cls=PlainCommand, context_settings={"ignore_unknown_options": True})
def keys(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=lambda: [path for path in all_keys()],
            help="Keys, sections, words, or names in slime, Megatron-LM, verl, TRL or OpenRLHF; default: all sections.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Search the configuration's keys by name, description or name in another framework.

    Examples:

    slimx keys

    slimx keys trainer.moe

    slimx keys rollout.sampling.temperature

    slimx keys kl reference

    slimx keys --rollout-batch-size

    Page: docs/configuration.md
    """
    words = [word for word in words or [] if word.strip()]
    results = search(words)
    if as_json:
        found = {key.path: record_of(key) for result in results for key in _keys(result)}
        if not words:
            found = {path: record_of(key) for path, key in all_keys().items()}
        sentences = [result.sentence for result in results if result.sentence]
        print(json.dumps({"keys": [*found.values()], "meanings": sentences}, indent=1, ensure_ascii=False))
        return
    console = Console(soft_wrap=False, highlight=False)
    for number, result in enumerate(results):
        if number:
            console.print()
        for shown in lines_of(result):
            console.print(shown)
    if not words:
        for shown in overview():
            console.print(shown)


def _keys(found: Found) -> list[Key]:
    """Returns the keys of a result, and those of its sections."""
    listed = [key for heading in found.sections for key in heading.keys]
    return [*found.keys, *listed]
