"""Imports transformers without what a process of slimx does not use. Written for transformers 5.

transformers asks `importlib.metadata.packages_distributions` which package a module is of. That checks first that each
file of each package is still there: 30,000 files, a second of CPU time, and more where they lie on a network.

Its automatic classes, of which slimx uses the tokenizers', import the generation of text for models whose code comes
with their checkpoint, and with it torch's compiler, FSDP and DTensor: three seconds of CPU time.
"""

from __future__ import annotations

import csv
import inspect
import sys
from importlib import metadata
from typing import Any


def import_transformers() -> None:
    """Import transformers and its automatic classes, with packages mapped by their own records, and the generation of
    text once a model asks for it. Does nothing for what is imported already."""
    original = metadata.packages_distributions
    metadata.packages_distributions = recorded_packages
    try:
        import transformers.utils  # noqa: F401
    finally:
        metadata.packages_distributions = original
    if not {"transformers.models.auto.auto_factory", "transformers.generation.utils"} & sys.modules.keys():
        _import_automatic_classes()


def _import_automatic_classes() -> None:
    from transformers import generation

    generation.GenerationMixin = _Later
    try:
        from transformers.models.auto import auto_factory
    finally:
        del generation.GenerationMixin  # its module then looks for its own
    complete = auto_factory.add_generation_mixin_to_remote_model

    def with_mixin(model_class: Any) -> Any:
        auto_factory.GenerationMixin = generation.GenerationMixin
        return complete(model_class)

    auto_factory.add_generation_mixin_to_remote_model = with_mixin


class _Later:
    """Stands for `GenerationMixin` until `add_generation_mixin_to_remote_model`, the only function that uses it, is
    called."""


def recorded_packages() -> dict[str, list[str]]:
    """Packages by the top-level modules that they declare or record, as `importlib.metadata.packages_distributions`."""
    found: dict[str, list[str]] = {}
    for package in metadata.distributions():
        names = set((package.read_text("top_level.txt") or "").split())
        if not names:
            records = csv.reader((package.read_text("RECORD") or "").splitlines())
            names = {_module(row[0]) for row in records}
        title = package.metadata["Name"]  # parses all of the metadata
        for name in names:
            if "." not in name:
                found.setdefault(name, []).append(title)
    return found


def _module(path: str) -> str:
    """The top-level module of a package's file."""
    first, inside, _ = path.partition("/")
    return first if inside else inspect.getmodulename(first) or first
