"""Reward functions written for TRL, `def reward(prompts, completions, **columns) -> list[float]`, as reward hooks: the
prefix `trl:` of `reward.function`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from slimx.config.schema import Config
from slimx.config.sections.rollout import PromptSet, RowFields
from slimx.data.prompts.rows import read_rows
from slimx.data.records import Group, Trajectory
from slimx.dotted import imported
from slimx.errors import SlimxError, raised, safe_repr
from slimx.json_types import Json
from slimx.runtime.tasks import without_loop

PREFIX = "trl:"
SHAPE = "def reward(prompts, completions, **kwargs)"
ABSENT = ("trainer_state", "log_extra")
"""Arguments of TRL's trainer that slimx cannot pass."""


def is_trl(function: object) -> bool:
    """Returns True if `function` takes completions, as TRL's reward functions do."""
    try:
        return "completions" in inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def is_form_of(path: str) -> bool:
    """Returns True if the function at the dotted path `path` is a reward function of TRL."""
    try:
        return is_trl(imported("", path))
    except SlimxError:
        return False


def load_generate(path: str, config: Config) -> NoReturn:
    raise _no_hook("rollout.generate", path)


def load_keep(path: str, config: Config) -> NoReturn:
    raise _no_hook("rollout.filter", path)


def _no_hook(key: str, path: str) -> SlimxError:
    return SlimxError(
        f"{key} is {PREFIX}{path}, but only reward functions of TRL can be used; write this hook for slimx "
        "(docs/hooks.md)",
        code="trl.hook",
        about=key,
    )


def load_reward(key: str, path: str, options: Json, *, group: bool, facts: Json) -> TrlReward:
    """Loads the reward function at the dotted path `path`. `key`: configuration section of the reward; `options`:
    further keyword arguments. Raises SlimxError if it is not a reward function of TRL."""
    function = imported(f"{key}.function", path)
    if not is_trl(function):
        raise SlimxError(
            f"{key}.function: {path} does not take completions, as reward functions of TRL do; define it as `{SHAPE}`, "
            "or remove the prefix",
            code="trl.signature",
            about=path,
        )
    for name in ABSENT:
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is not None and parameter.default is parameter.empty:
            raise SlimxError(
                f"{key}.function: {path} needs {name} of TRL's trainer, which slimx does not have; give {name} a "
                "default value",
                code="trl.signature",
                about=path,
            )
    return TrlReward(function, path, options, facts["texts"])


def facts(config: Config) -> Json:
    """Returns `texts`: True if the training prompts are texts in a column that is named prompt, as in data sets of TRL
    that are not conversational. The first row of each file decides."""
    rollout = config.rollout
    files = [*rollout.sources]
    if rollout.prompts is not None:
        files.append(PromptSet(path=rollout.prompts, name=""))
    return {"texts": bool(files) and all(_has_texts(file, file.fields or rollout.fields) for file in files)}


def _has_texts(file: PromptSet, fields: RowFields | None) -> bool:
    if fields is not None and fields.prompt == "prompt":
        with suppress(OSError, SlimxError):  # reported when the prompts are read
            for _, _, row in read_rows(file.path, file.subset, file.split)[1]:
                return isinstance(row.get("prompt"), str)
    return False


@dataclass(frozen=True, slots=True)
class TrlReward:
    """Reward hook that calls a reward function of TRL with a batch: one trajectory, or all trajectories of a group."""

    function: Callable[..., Any]
    path: str
    options: Mapping[str, object]
    texts: bool = False
    """True if prompts and completions are passed as texts, False if as lists of messages."""

    @property
    def hook_name(self) -> str:
        """Name by which error messages refer to the hook."""
        return self.path

    @property
    def needs_process(self) -> bool:
        """True if the function is marked with `slimx.rewards.needs.needs_process`."""
        return getattr(self.function, "needs_process", False)

    async def __call__(self, ctx: Any, judged: Trajectory | Group) -> float | list[float]:
        """Returns the reward of a trajectory, or of each trajectory of a group. None, with which the function says that
        it does not apply, is 0. `ctx`: RewardContext."""
        trajectories = judged.trajectories if isinstance(judged, Group) else [judged]
        texts = ctx.texts if isinstance(judged, Group) else [ctx.text]
        arguments = self._arguments(ctx, trajectories, texts)
        try:
            with without_loop():  # the function may call asyncio.run
                values = self.function(**arguments)
            if inspect.isawaitable(values):
                values = await values
        except (AttributeError, TypeError) as error:
            if not re.search(r"'list'|^string indices", str(error)):
                raise
            form = "a text"
            if not self.texts and ctx.prompt.messages is not None:
                form = "a list of messages, or name the column with the texts of the prompts prompt"
            raise SlimxError(
                f"the function raised {raised(error)}; read each completion as {form}",
                code="trl.form",
                about=self.path,
            ) from error
        values = _plain(values)
        if not isinstance(values, list | tuple) or len(values) != len(trajectories):
            raise SlimxError(
                f"the function returned {safe_repr(values)} for {len(trajectories)} completions; return a list with "
                "one reward per completion",
                code="trl.returned",
                about=self.path,
            )
        numbers = [0.0 if value is None else _plain(value) for value in values]
        return numbers if isinstance(judged, Group) else numbers[0]

    def _arguments(self, ctx: Any, trajectories: list[Trajectory], texts: list[str]) -> Json:
        """Returns the keyword arguments of a call: those that the function takes of prompts, completions,
        completion_ids, log_metric, the options, and the answer and metadata of the prompt, once per completion."""
        prompt, count = ctx.prompt, len(texts)
        shown: object = prompt.messages
        completions: list[object] = [*texts]
        if prompt.messages is None:
            shown = ctx.tokenizer.decode(prompt.token_ids)
        elif self.texts:
            shown = prompt.messages[-1]["content"]
        else:
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        ids = [trajectory.token_ids[trajectory.versions() >= 0].tolist() for trajectory in trajectories]
        columns = {"answer": prompt.answer, **prompt.metadata, "prompts": shown}
        known: Json = {name: [value] * count for name, value in columns.items()}
        known |= {"completions": completions, "completion_ids": ids, "log_metric": ctx.log, **self.options}
        parameters = inspect.signature(self.function).parameters.values()
        for parameter in parameters:
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and parameter.name not in known:
                raise SlimxError(
                    f"the function takes {parameter.name}, but the prompts have only {', '.join(columns)}; add the "
                    f"column {parameter.name} to rollout.fields.metadata, or give {parameter.name} a default value",
                    code="trl.column",
                    about=parameter.name,
                )
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return known
        return {name: value for name, value in known.items() if name in {one.name for one in parameters}}


def _plain(value: Any) -> Any:
    """Returns an array or a tensor as numbers or lists, and other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
