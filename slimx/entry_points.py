"""Lookup of entry points, through which extras and other packages extend slimx.

    slimx.advantages          advantages of a kind, or those that a kind of loss derives from them: `Estimator`
    slimx.agent_servers       chat completion servers, through which agents sample
    slimx.agents              agents: `rollout.options.agent`
    slimx.checkpoint_formats  forms of checkpoints that a run may start from: `CheckpointFormat`
    slimx.commands            commands of the command line: Typer apps
    slimx.datasets            published data sets that `slimx data` writes
    slimx.devices             adaptations of megatron-core and SGLang to "cpu" and "cuda": `Device`
    slimx.engine_layers       kinds of layers in SGLang: modules with ROWS, GAPS and REPLACEMENTS
    slimx.environments        environments: `rollout.options.environment`
    slimx.event_receivers     receivers of a run's events: `Events`
    slimx.families            families of models, by architecture
    slimx.foreign_names       names of keys and values in other frameworks
    slimx.frozen_engines      engines of frozen models: `FrozenEngines`, named `routers`
    slimx.generate            generate hooks: `rollout.generate`
    slimx.hook_forms          hooks written for another program
    slimx.layer_kinds         kinds of decoder layers
    slimx.learners            trainers of models other than policies, by kind of loss: `Learner`
    slimx.machines            other machines of a server that spans several: `Machines`, named `ray`
    slimx.maps                mapping hooks: `rollout.map`
    slimx.number_formats      formats of codes with scales: `NumberFormat`, by `quant_method` of a config.json
    slimx.numerics            arithmetic of trainer and engines: `numerics.mode`
    slimx.objectives          modules with kinds and presets of section `algorithm`
    slimx.optimizer_states    optimizers whose state is kept elsewhere: `ExternalState`, named `host`
    slimx.prompt_files        readers of prompt files other than JSON lines: `read_rows`
    slimx.prompt_sources      orders of prompts from several files: `DataSource`, named `mixed`
    slimx.recoveries          handlers of lost trainers: `RankLossHandler`, or None
    slimx.reports             reports of finished runs
    slimx.rewards             reward hooks: `reward.function`
    slimx.roles               roles of a trainer rank
    slimx.roundings           rounding of the factors of trainers' products: `trainer.fp8`, `trainer.qat`
    slimx.rules               modules with rules that are checked before a run starts
    slimx.sections            sections of the configuration
    slimx.server_verbs        operations of a server's process: functions of SGLang's model runner
    slimx.sinks               destinations of a step's metrics
    slimx.toolboxes           toolboxes: `rollout.options.toolbox`
    slimx.transports          transports of weights to engines: `publish.transport`
    slimx.weight_forms        forms of a policy's weights

An entry point is a line of a package's pyproject.toml; the core never imports the packages that extend it.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

from slimx.errors import SlimxError, raised


@functools.cache
def find(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of `group` by name, sorted by name.

    Raises SlimxError if two packages define the same name, or if the group is empty: slimx defines some in every group.
    """
    points: dict[str, EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        if other is not point:
            raise SlimxError(
                f"entry point {point.name} of {group} is {other.value} of {_package(other)} and {point.value} of "
                f"{_package(point)}; uninstall one of them",
                code="entry_point.twice",
                about=point.name,
            )
    if not points:
        raise SlimxError(
            f"there are no entry points of {group}: slimx is not installed in this environment, or was installed "
            "before it had them; run make build, or install it again with pip",
            code="entry_point.none",
            about=group,
        )
    return points


def load(group: str, name: str) -> Any:
    """Returns the object of an entry point. Raises SlimxError if its module cannot be imported or lacks the object."""
    point = find(group)[name]
    try:
        return point.load()
    except SlimxError:
        raise
    except Exception as error:
        raise SlimxError(
            f"entry point {name} of {group}, {point.value} of {_package(point)}, cannot be loaded ({raised(error)}); "
            "fix or uninstall it",
            code="entry_point.load",
            about=name,
        ) from error


def load_all(group: str) -> dict[str, Any]:
    """Returns the objects of all entry points of a group by name. Raises SlimxError as `load` does."""
    return {name: load(group, name) for name in find(group)}


def by_option(group: str, argv: Sequence[str]) -> Any:
    """Returns what the class of `group` whose `OPTION` is in `argv` parses from the next argument; None without one.

    Arguments after `--` are ignored."""
    options = list(argv[: argv.index("--")] if "--" in argv else argv)
    for kind in load_all(group).values():
        if kind.OPTION in options:
            return kind.parse(options[options.index(kind.OPTION) + 1])
    return None


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else point.dist.name
