"""Imports transformers without the parts that a slimx process does not use. Written for transformers 5.

transformers calls `importlib.metadata.packages_distributions` to map modules to packages. That function checks that
each file of each package still exists: 30,000 files, which takes a second of CPU time, and longer on a network file
system.

slimx uses only AutoTokenizer of its Auto classes, but their import also imports text generation, for models whose code
is part of their checkpoint. Text generation imports torch's compiler, FSDP and DTensor, which takes three seconds of
CPU time.
"""

from __future__ import annotations

import csv
import inspect
import sys
from importlib import metadata


def import_transformers() -> None:
    """Imports transformers and its Auto classes faster than an ordinary import does. Modules are mapped to packages by
    `recorded_packages`, and text generation is imported only when a model needs it. Modules that are already imported
    stay unchanged."""
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

    vars(generation)["GenerationMixin"] = _Later
    try:
        from transformers.models.auto import auto_factory
    finally:
        del vars(generation)["GenerationMixin"]  # the lazy module then imports the real one
    complete = auto_factory.add_generation_mixin_to_remote_model

    def with_mixin(model_class: type) -> type:
        vars(auto_factory)["GenerationMixin"] = generation.GenerationMixin
        return complete(model_class)

    auto_factory.add_generation_mixin_to_remote_model = with_mixin


class _Later:
    """Placeholder for `GenerationMixin` until `add_generation_mixin_to_remote_model`, its only user, is called."""


def recorded_packages() -> dict[str, list[str]]:
    """Returns, like `importlib.metadata.packages_distributions`, the packages that contain each top-level module, but
    reads only their metadata (top_level.txt, else RECORD) and does not check whether files exist."""
    packages: dict[str, list[str]] = {}
    for package in metadata.distributions():
        names = set((package.read_text("top_level.txt") or "").split())
        if not names:
            records = csv.reader((package.read_text("RECORD") or "").splitlines())
            names = {_module(row[0]) for row in records}
        title = package.metadata["Name"]  # parses all of the metadata
        for name in names:
            if "." not in name:
                packages.setdefault(name, []).append(title)
    return packages


def _module(path: str) -> str:
    """Returns the name of the top-level module to which a file at `path`, relative to site-packages, belongs."""
    first, inside, _ = path.partition("/")
    return first if inside else inspect.getmodulename(first) or first
