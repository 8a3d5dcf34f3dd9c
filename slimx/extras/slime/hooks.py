"""Adapters that make slime's hooks usable as slimx hooks: generate, reward and keep."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slimx.config.schema import Config
from slimx.data.chat.tokens import encode_prompt, load_tokenizer
from slimx.data.records import Group, Prompt, Trajectory
from slimx.dotted import imported
from slimx.errors import SlimxError
from slimx.extras.slime import grading
from slimx.extras.slime.arguments import PREFIX, RESERVED, Arguments, RunFacts, addresses
from slimx.extras.slime.call import CURRENT, HookCall
from slimx.extras.slime.convert import begin, to_sample, to_trajectory
from slimx.extras.slime.modules import serve
from slimx.extras.slime.recognition import NotServed, not_served
from slimx.extras.slime.sample import Sample
from slimx.json_types import Json

NAME = "slime"
"""Name by which configurations refer to the hook `reward` of this module."""
FORMS = {
    "generate": ("async def {}(args, sample, sampling_params)", ("args", "sample", "sampling_params")),
    "reward": ("async def {}(args, sample)", ("args", "sample")),
    "rewards": ("async def {}(args, samples)", ("args", "samples")),
    "keep": ("def {}(args, samples)", ("args", "samples")),
}


def load(key: str, path: str, kind: str) -> Callable[..., Any]:
    """Returns the function at the dotted path `path`, which is the value, without its prefix, of the configuration key
    `key`. `kind`: kind of slime hook, a key of `FORMS` such as "generate" or "reward".

    Raises SlimxError if the function needs a part of slime that slimx does not provide, naming that part, or if its
    signature does not match `kind`."""
    serve()
    try:
        function = imported(key, path)
    except (NotServed, SlimxError) as error:
        missing = not_served(error)
        if missing is None:
            raise
        verb = "is" if missing is error else "imports"
        raise SlimxError(f"{key}: {path} {verb} {missing}", code="slime.not_served", about=path) from error
    text, parameters = FORMS[kind]
    shape = text.format(path.rpartition(".")[2])
    name = f"{key}: {path}"
    if not callable(function):
        raise SlimxError(
            f"{name} is of type {type(function).__name__}, not a function; define a function `{shape}`",
            code="slime.hook",
            about=path,
        )
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise SlimxError(
            f"{name}{inspect.signature(function)} has the wrong parameters ({error}); define the function as `{shape}`",
            code="slime.signature",
            about=path,
        ) from error
    if inspect.iscoroutinefunction(function) != text.startswith("async"):
        raise SlimxError(
            f"{name} must{'' if text.startswith('async') else ' not'} be async; define the function as `{shape}`",
            code="slime.async",
            about=path,
        )
    if kind.startswith("reward"):
        takes = "group" if list(inspect.signature(function).parameters)[1] == "samples" else "trajectory"
        if (takes == "group") != (kind == "rewards"):
            raise SlimxError(
                f"{name} scores {'a list of samples' if takes == 'group' else 'one sample'} per call, which does not "
                f"fit the configured reward.scope; set reward.scope={takes}",
                code="slime.scope",
                about="reward.scope",
            )
    return function


@dataclass(frozen=True)
class GenerateHook:
    """slimx generate hook that calls a slime generate hook."""

    function: Callable[..., Any]
    path: str
    config: Config
    run: RunFacts
    semaphore: asyncio.Semaphore
    """Semaphore that all rollouts share and that `GenerateState` provides to hooks."""

    @classmethod
    def load(cls, path: str, config: Config) -> GenerateHook:
        """Loads the hook at `path`, the value of `rollout.generate`. Raises SlimxError under the same conditions as
        this module's function `load`, and for an option that only the run may set."""
        semaphore = asyncio.Semaphore(config.rollout.max_rollouts)
        reserved = sorted(RESERVED & config.rollout.options.keys())
        if reserved:
            raise SlimxError(
                f"rollout.options sets {reserved[0]}, which only the run may set; remove {reserved[0]} from "
                "rollout.options",
                code="slime.option",
                about=reserved[0],
            )
        return cls(load("rollout.generate", path, "generate"), path, config, RunFacts.of(config), semaphore)

    async def __call__(self, ctx: Any, prompt: Prompt) -> Trajectory | list[Trajectory]:
        """Calls the hook, and returns its samples as trajectories. `ctx`: RolloutContext."""
        call = self._call(ctx)
        text = prompt_text(ctx.tokenizer, prompt, template=call.args.apply_chat_template)
        sample = begin(prompt, text, index=ctx.index, group=ctx.group_id, run=self.run)
        parameters = inspect.signature(self.function).parameters
        options = {}
        if "evaluation" in parameters:
            options["evaluation"] = ctx.evaluation
        with _set(call):
            result = await self.function(call.args, sample, dict(call.sampling), **options)
        self._check_rewards(result)
        # With max_staleness 0 the weights do not change during a rollout.
        version = ctx.version if self.config.schedule.max_staleness == 0 else None
        if isinstance(result, Sample):
            return to_trajectory(result, ctx, call.requests, version=version)
        if not isinstance(result, list) or not all(isinstance(item, Sample) for item in result):
            raise SlimxError(
                f"the generate hook {self.path} returned a value of type {type(result).__name__}, which is neither a "
                "Sample nor a list of Samples; return a Sample, or a list that contains only Samples",
                code="slime.returned",
                about=self.path,
            )
        return [
            to_trajectory(item, ctx, call.requests, suffix=f"-{index}", version=version)
            for index, item in enumerate(result)
        ]

    def _check_rewards(self, result: Any) -> None:
        """Raises SlimxError if the hook set rewards that the run would ignore."""
        samples = result if isinstance(result, list) else [result]
        rewards = (self.config.reward.function, *(part.function for part in self.config.reward.parts))
        reads_sample = any(str(path).startswith(PREFIX) or path == NAME for path in rewards)
        if not reads_sample and any(getattr(sample, "reward", None) is not None for sample in samples):
            raise SlimxError(
                f"the generate hook {self.path} set sample.reward, but the run's reward (reward.function={rewards[0]}) "
                f"ignores sample.reward; set reward.function={NAME}, or leave sample.reward unset",
                code="slime.reward",
                about=self.path,
            )

    def _call(self, ctx: Any) -> HookCall:
        sampling = {
            "top_p": 1.0,
            "top_k": -1,
            **ctx.engine.sampling,
            "stop": None,
            "stop_token_ids": ctx.engine.sampling.get("stop_token_ids"),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        return HookCall(
            Arguments({**self.run.values, **addresses(ctx), **self.config.rollout.options}),
            ctx.tokenizer,
            ctx.engines,
            engine=ctx.engine,
            address=ctx.address,
            sampling=sampling,
            semaphore=self.semaphore,
        )


@dataclass(frozen=True)
class RewardHook:
    """slimx reward hook that calls a slime reward function, in a thread or a process, with one sample per call unless
    `group` is True."""

    function: Callable[..., Any]
    path: str
    options: Mapping[str, Any]
    group: bool
    """True if the hook scores all samples of a prompt in one call (slime's --group-rm)."""
    run: RunFacts

    @property
    def hook_name(self) -> str:
        """Name by which error messages refer to the hook."""
        return self.path

    @property
    def needs_process(self) -> bool:
        """True if the hook must run in a separate process, because it is marked with `slimx.rewards.needs` or because
        its module imports rules of `rm_hub`, which can be interrupted only in the main thread of a process."""
        names = getattr(self.function, "__globals__", {}).values()
        uses_rules = any(getattr(value, "__module__", None) == grading.__name__ for value in names)
        return uses_rules or getattr(self.function, "needs_process", False)

    @classmethod
    def load(
        cls, key: str, path: str, options: Mapping[str, Any], *, group: bool, facts: Mapping[str, Any]
    ) -> RewardHook:
        """Loads the hook at `path`. `key`: configuration section of the reward; `options`: its options; `facts`: fields
        of RunFacts. Raises SlimxError under the same conditions as this module's function `load`."""
        function = load(f"{key}.function", path, "rewards" if group else "reward")
        return cls(function, path, options, group, RunFacts(**facts))

    async def __call__(self, ctx: Any, judged: Trajectory | Group) -> float | list[float]:
        """Returns the reward of a trajectory, or of each trajectory of a group. If the generate hook set
        `sample.reward`, that value is returned. `ctx`: RewardContext."""
        values = {**self.run.values, **addresses(ctx)}
        values |= {"reward_key": None, "rm_type": None, "group_rm": self.group, "custom_rm_path": self.path}
        call = HookCall(Arguments({**values, **self.options}), ctx.tokenizer, ctx.engines)
        trajectories = judged.trajectories if isinstance(judged, Group) else [judged]
        samples = [to_sample(trajectory, ctx.prompt, lambda: ctx.tokenizer, self.run) for trajectory in trajectories]
        unscored = [sample for sample in samples if sample.reward is None]
        if unscored:
            with _set(call):
                argument = unscored if self.group else unscored[0]
                result = await grading.ask(self.function, self.path, call.args, argument)
            if self.group and (not isinstance(result, Sequence) or len(result) != len(unscored)):
                raise SlimxError(
                    f"{self.path} returned {result!r} for {len(unscored)} samples; return a list with one reward per "
                    "sample",
                    code="slime.returned",
                    about=self.path,
                )
            for sample, value in zip(unscored, result if self.group else [result], strict=True):
                sample.reward = value
        numbers = [_number(sample, call.args, self.path) for sample in samples]
        if self.group:
            return numbers
        return numbers[0]


async def reward(ctx: Any, trajectory: Trajectory, *, reward_key: str | None = None) -> float:
    """Returns the `sample.reward` that a slime generate hook set. `reward_key`: key of the value to return if
    `sample.reward` is a dict."""
    sample = to_sample(trajectory, ctx.prompt, lambda: ctx.tokenizer, RunFacts())
    return _number(sample, Arguments({"reward_key": reward_key}), "the generate hook")


@dataclass(frozen=True)
class KeepHook:
    """slimx filter hook that calls a slime dynamic filter."""

    function: Callable[..., Any]
    path: str
    options: Mapping[str, Any]
    run: RunFacts
    model: str
    """Directory of the tokenizer that decodes samples generated by slimx hooks."""

    @classmethod
    def load(cls, path: str, config: Config) -> KeepHook:
        """Loads the hook at `path`, the value of `rollout.filter`. Raises SlimxError under the same conditions as this
        module's function `load`."""
        run = RunFacts.of(config)
        return cls(load("rollout.filter", path, "keep"), path, config.rollout.options, run, config.model.path)

    def __call__(self, group: Group) -> bool | str:
        """Returns True to keep the group. To drop it, returns the reason, or False if the filter gives none."""
        samples = [to_sample(item, group.prompt, lambda: self._tokenizer, self.run) for item in group.trajectories]
        # Here a trajectory's reward is a number, so reward_key does not apply.
        verdict = self.function(Arguments({**self.run.values, **self.options, "reward_key": None}), samples)
        keep = getattr(verdict, "keep", verdict)
        if not keep and getattr(verdict, "keep_when_insufficient", False):
            raise SlimxError(
                f"{self.path} sets keep_when_insufficient, which slimx does not support; set only keep",
            )
        if keep:
            return True
        return getattr(verdict, "reason", None) or False

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model)


def prompt_text(tokenizer: Any, prompt: Prompt, *, template: bool) -> str | list[Json]:
    """Returns a prompt as slime passes it to hooks. With `template` the text is rendered by the chat template;
    otherwise it is the text of a single message, or the list of messages if there are several."""
    if prompt.messages is None:
        return tokenizer.decode(prompt.token_ids)
    if template:
        encode_prompt(tokenizer, prompt)  # raises an error naming the prompt if the template cannot render it
        return tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
    single = len(prompt.messages) == 1 and isinstance(prompt.messages[0]["content"], str)
    if single:
        return prompt.messages[0]["content"]
    return [dict(message) for message in prompt.messages]


@contextmanager
def _set(call: HookCall) -> Iterator[None]:
    token = CURRENT.set(call)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _number(sample: Sample, args: Any, path: str) -> float:
    value = sample.reward
    if isinstance(value, dict):
        if args.reward_key not in value:
            raise SlimxError(
                f"{path} returned a dict as the reward, but reward.options.reward_key={args.reward_key!r} is not a "
                f"key of this dict; set reward.options.reward_key to one of {', '.join(map(str, value))}",
            )
        value = value[args.reward_key]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SlimxError(
            f"{path} returned {value!r} as a reward, which is not a number; return a number for each sample",
            code="slime.reward",
            about=path,
        ) from None
