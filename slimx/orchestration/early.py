"""Checks that need neither torch nor a model: a wrong path is refused before the imports of a run, which take seconds.

`check_run` asks all of this again, with everything else.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from slimx.cluster.address import check_reachable
from slimx.config.schema import Config
from slimx.data.prompt_files.mapping import make_mapping
from slimx.data.prompts import iter_prompts
from slimx.errors import SlimxError
from slimx.models.families import configured_model
from slimx.orchestration.prompts import first_prompt
from slimx.orchestration.state.directory import check_start
from slimx.orchestration.state.saves import Saves
from slimx.rollout.hook_loading import load_hooks
from slimx.runtime.private import private_directory

PACKAGES = ("torch", "ray", "sglang", "transformers", "pydantic", "numpy")
"""Packages whose place a file of the same name would take."""


def check_early(config: Config) -> None:
    """Raise SlimxError for the first of a run's paths, hooks, prompts and addresses that cannot be used."""
    for name in PACKAGES:
        _check_package(name)
    directory = Path(config.run.dir)
    check_start(config, directory, Saves(directory / "checkpoints", keep=config.checkpoint.keep))
    check_reachable(config.cluster.ray_address)
    if config.cluster.ray_address is None:
        private_directory()
    for policy in config.by_policy.values():
        configured_model(policy)
    if config.rollout.replay:
        return
    first_prompt(config)
    for name, path in config.eval.files.items():
        mapping = make_mapping(config.eval.fields, config.eval.map, config.rollout.system, section="eval")
        next(iter_prompts(path, mapping, dataset=name or None))
    load_hooks(config)


def _check_package(name: str) -> None:
    """Refuse a single file in a package's place."""
    spec = importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin
    if origin is None or Path(origin).name == "__init__.py":
        return  # absent, which others tell, or a package
    raise SlimxError(
        f"{origin} takes the place of the package {name}; rename it, or take its folder off PYTHONPATH",
        code="environment.shadowed",
        about=name,
    )
