"""Lookup of entry points, through which extras and other packages extend slimx.

    slimx.advantages          advantage estimation by kind of advantages or of loss: `Estimator`
    slimx.agent_servers       chat completion servers through which agents sample
    slimx.agents              agents by name: `rollout.options.agent`
    slimx.checkpoint_formats  formats of checkpoints from which a run can start: `CheckpointFormat`
    slimx.commands            subcommands of `slimx`: Typer apps
    slimx.completions         completions of command-line arguments in a shell: `overrides`
    slimx.datasets            published data sets that `slimx data` writes
    slimx.devices             adaptations of megatron-core and SGLang to "cpu" and "cuda": `Device`
    slimx.engine_layers       layouts of SGLang's layers by kind: modules with ROWS, GAPS and REPLACEMENTS
    slimx.engine_processors   package of SGLang's image processors
    slimx.environments        environments by name: `rollout.options.environment`
    slimx.evaluation_engines  evaluation engines: `EvaluationEngines`, named `engines`
    slimx.event_receivers     receivers of a run's events: `Events`
    slimx.exports             public names of the package slimx, imported on first use
    slimx.families            modules that build models, by architecture
    slimx.foreign_names       names of keys and values in other frameworks
    slimx.frozen_engines      engines of frozen models: `FrozenEngines`, named `routers`
    slimx.generate            generate hooks by name: `rollout.generate`
    slimx.hook_forms          adapters for hooks written for another framework
    slimx.layer_kinds         descriptions of decoder layers by kind
    slimx.learners            trainers of models other than policies, by kind of loss: `Learner`
    slimx.machines            access to the further machines of a server that spans several: `Machines`, named `ray`
    slimx.maps                hooks by name that map rows of prompt files to prompts: `rollout.map`
    slimx.number_formats      quantized number formats: `NumberFormat`, by `quant_method` of a config.json
    slimx.numerics            numerics of trainer and engines by mode: `numerics.mode`
    slimx.objectives          modules with kinds of losses and advantages, and presets of section `algorithm`
    slimx.optimizer_states    optimizers with state outside of GPU memory: `ExternalState`, named `host`
    slimx.plain_hooks         classes that make async hooks of plain functions, by hook
    slimx.prompt_files        readers of prompt files other than JSON lines: `read_rows`
    slimx.prompt_sources      sources that mix prompts of several files: `DataSource`, named `mixed`
    slimx.recoveries          handlers of lost trainer ranks: `RankLossHandler`, or None
    slimx.reports             writers of reports about finished runs
    slimx.rewards             reward hooks by name: `reward.function`
    slimx.roles               further tasks of a trainer rank, such as training the critic
    slimx.rollout_workers     rollout workers: a `GroupMaker`, named `pool`, and the function `count` of their number
    slimx.roundings           rounding of matrix products' inputs in training: `trainer.fp8`, `trainer.qat`
    slimx.rules               modules with rules that a configuration is checked against
    slimx.sections            further sections of the configuration
    slimx.server_hooks        hooks in SGLang's processes: functions that register them
    slimx.server_verbs        operations that an engine's ranks perform: functions of SGLang's model runner
    slimx.sinks               destinations of a step's metrics
    slimx.toolboxes           toolboxes by name: `rollout.options.toolbox`
    slimx.transports          transports of weights to engines by name: `publish.transport`
    slimx.weight_forms        forms in which a policy's weights are trained and published, such as adapters

An entry point is a line in a package's pyproject.toml; slimx's core never imports the packages that extend it.
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
    """Returns the entry points of `group`, by name, in alphabetical order.

    Raises SlimxError if two packages define the same name, or if the group is empty, because slimx itself defines at
    least one entry point in every group.
    """
    points: dict[str, EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        if other is not point:
            raise SlimxError(
                f"entry point {point.name} of {group} is defined by {_package(other)} ({other.value}) and by "
                f"{_package(point)} ({point.value}); uninstall one of the two packages",
                code="entry_point.twice",
                about=point.name,
            )
    if not points:
        raise SlimxError(
            f"the slimx installed in this environment declares no entry points of {group}; reinstall slimx with pip, "
            "or with `make build` in its source directory",
            code="entry_point.none",
            about=group,
        )
    return points


def load(group: str, name: str) -> Any:
    """Imports and returns the object that the entry point `name` of `group` refers to. Raises SlimxError if its module
    cannot be imported or lacks the object."""
    point = find(group)[name]
    try:
        return point.load()
    except SlimxError:
        raise
    except Exception as error:
        raise SlimxError(
            f"entry point {name} of {group} ({point.value} in {_package(point)}) cannot be loaded ({raised(error)}); "
            "fix or uninstall that package",
            code="entry_point.load",
            about=name,
        ) from error


def load_all(group: str) -> dict[str, Any]:
    """Returns the objects of all entry points of `group`, by name. Raises the same errors as `load`."""
    return {name: load(group, name) for name in find(group)}


def by_option(group: str, argv: Sequence[str]) -> Any:
    """Returns the object that an extra parses from the command line `argv`; None if no extra's option is in it.

    Each entry point of `group` is a class with an attribute `OPTION`, the option's name, and a method `parse`, which
    receives the argument after the option. Arguments after `--` are ignored."""
    options = list(argv[: argv.index("--")] if "--" in argv else argv)
    for kind in load_all(group).values():
        if kind.OPTION in options:
            return kind.parse(options[options.index(kind.OPTION) + 1])
    return None


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else point.dist.name
