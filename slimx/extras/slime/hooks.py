"""slime's hooks as slimx's: generate, reward and keep."""

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
from slimx.data.whole import Json
from slimx.dotted import imported
from slimx.errors import SlimxError
from slimx.extras.slime import grading
from slimx.extras.slime.arguments import PREFIX, TOLD, Arguments, RunFacts, addresses
from slimx.extras.slime.convert import begin, to_sample, to_trajectory
from slimx.extras.slime.modules import serve
from slimx.extras.slime.recognition import NotServed, not_served
from slimx.extras.slime.sample import Sample
from slimx.extras.slime.scene import CURRENT, Scene

NAME = "slime"
"""Name of `reward` in configurations."""
FORMS = {
    "generate": ("async def {}(args, sample, sampling_params)", ("args", "sample", "sampling_params")),
    "reward": ("async def {}(args, sample)", ("args", "sample")),
    "rewards": ("async def {}(args, samples)", ("args", "samples")),
    "keep": ("def {}(args, samples)", ("args", "samples")),
}


def load(key: str, path: str, kind: str) -> Callable[..., Any]:
    """The function at `path` (without the prefix), the value of `key`. Raises SlimxError for what slimx does not serve
    of slime, by name, and for another form than `kind` has."""
    serve()
    try:
        function = imported(key, path)
    except (NotServed, SlimxError) as error:
        if (lacking := not_served(error)) is None:
            raise
        said = "is" if lacking is error else "imports"
        raise SlimxError(f"{key}: {path} {said} {lacking}", code="slime.not_served", about=path) from error
    text, parameters = FORMS[kind]
    shape, name = text.format(path.rpartition(".")[2]), f"{key}: {path}"
    if not callable(function):
        raise SlimxError(
            f"{name} is a {type(function).__name__}; a slime hook is {shape}", code="slime.hook", about=path
        )
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise SlimxError(
            f"{name}{inspect.signature(function)} cannot be called ({error}); write {shape}",
            code="slime.signature",
            about=path,
        ) from error
    if inspect.iscoroutinefunction(function) != text.startswith("async"):
        raise SlimxError(
            f"{name} must{'' if text.startswith('async') else ' not'} be async; write {shape}",
            code="slime.async",
            about=path,
        )
    if kind.startswith("reward"):
        takes = "group" if list(inspect.signature(function).parameters)[1] == "samples" else "trajectory"
        if (takes == "group") != (kind == "rewards"):
            raise SlimxError(
                f"{name} judges {'a list' if takes == 'group' else 'one sample'}; set reward.scope={takes}",
                code="slime.scope",
                about="reward.scope",
            )
    return function


@dataclass(frozen=True)
class GenerateHook:
    """A slime generate hook as slimx calls it."""

    function: Callable[..., Any]
    path: str
    config: Config
    run: RunFacts
    semaphore: asyncio.Semaphore
    """`GenerateState.semaphore`: of all rollouts together."""

    @classmethod
    def load(cls, path: str, config: Config) -> GenerateHook:
        """The hook at `path`, of `rollout.generate`. Errors are those of `load`."""
        semaphore = asyncio.Semaphore(config.rollout.max_rollouts)
        if taken := sorted(TOLD & config.rollout.options.keys()):
            raise SlimxError(
                f"rollout.options.{taken[0]} is what the run itself tells slime hooks; leave it out",
                code="slime.option",
                about=taken[0],
            )
        return cls(load("rollout.generate", path, "generate"), path, config, RunFacts.of(config), semaphore)

    async def __call__(self, ctx: Any, prompt: Prompt) -> Trajectory | list[Trajectory]:
        """ctx: RolloutContext."""
        scene = self._scene(ctx)
        text = prompt_text(ctx.tokenizer, prompt, template=scene.args.apply_chat_template)
        sample = begin(prompt, text, index=ctx.index, group=ctx.group_id, run=self.run)
        takes = inspect.signature(self.function).parameters
        more = {"evaluation": ctx.evaluation} if "evaluation" in takes else {}
        with _set(scene):
            result = await self.function(scene.args, sample, dict(scene.sampling), **more)
        self._check_rewards(result)
        # Without staleness nothing is published while a rollout runs.
        version = ctx.version if self.config.schedule.max_staleness == 0 else None
        if isinstance(result, Sample):
            return to_trajectory(result, ctx, scene.calls, version=version)
        if not isinstance(result, list) or not all(isinstance(each, Sample) for each in result):
            raise SlimxError(
                f"{self.path} returned a {type(result).__name__}; return a Sample or a list of them",
                code="slime.returned",
                about=self.path,
            )
        return [
            to_trajectory(each, ctx, scene.calls, suffix=f"-{number}", version=version)
            for number, each in enumerate(result)
        ]

    def _check_rewards(self, result: Any) -> None:
        """A reward that the hook gave must count."""
        samples = result if isinstance(result, list) else [result]
        own = (self.config.reward.function, *(part.function for part in self.config.reward.parts))
        read = any(str(path).startswith(PREFIX) or path == NAME for path in own)
        if not read and any(getattr(sample, "reward", None) is not None for sample in samples):
            raise SlimxError(
                f"{self.path} set sample.reward, which the run's reward {own[0]} does not look at; set "
                f"reward.function={NAME}",
                code="slime.reward",
                about=self.path,
            )

    def _scene(self, ctx: Any) -> Scene:
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
        return Scene(
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
    """A slime reward as slimx calls it: in a thread or a process, one sample at a time."""

    function: Callable[..., Any]
    path: str
    options: Mapping[str, Any]
    group: bool
    """True if it judges all samples of a prompt at once (slime's --group-rm)."""
    run: RunFacts

    @property
    def hook_name(self) -> str:
        """Name of the hook in messages."""
        return self.path

    @property
    def needs_process(self) -> bool:
        """True if the function is marked so (`slimx.rewards.needs`), or its module imports rules of `rm_hub`, which can
        be interrupted in the main thread of a process alone."""
        names = getattr(self.function, "__globals__", {}).values()
        ruled = any(getattr(value, "__module__", None) == grading.__name__ for value in names)
        return ruled or getattr(self.function, "needs_process", False)

    @classmethod
    def load(
        cls, key: str, path: str, options: Mapping[str, Any], *, group: bool, facts: Mapping[str, Any]
    ) -> RewardHook:
        """`key`: of the configuration; `facts`: fields of a RunFacts. SlimxError as `load`."""
        function = load(f"{key}.function", path, "rewards" if group else "reward")
        return cls(function, path, options, group, RunFacts(**facts))

    async def __call__(self, ctx: Any, judged: Trajectory | Group) -> float | list[float]:
        """ctx: RewardContext. What the generate hook set as `sample.reward` already is the reward."""
        values = {**self.run.values, **addresses(ctx)}
        values |= {"reward_key": None, "rm_type": None, "group_rm": self.group, "custom_rm_path": self.path}
        scene = Scene(Arguments(values | self.options), ctx.tokenizer, ctx.engines)
        trajectories = judged.trajectories if isinstance(judged, Group) else [judged]
        samples = [to_sample(each, ctx.prompt, lambda: ctx.tokenizer, self.run) for each in trajectories]
        if left := [sample for sample in samples if sample.reward is None]:
            with _set(scene):
                said = await grading.ask(self.function, self.path, scene.args, left if self.group else left[0])
            if self.group and (not isinstance(said, Sequence) or len(said) != len(left)):
                raise SlimxError(
                    f"{self.path} returned {said!r} for {len(left)} samples; return a list with one reward each",
                    code="slime.returned",
                    about=self.path,
                )
            for sample, value in zip(left, said if self.group else [said], strict=True):
                sample.reward = value
        numbers = [_number(sample, scene.args, self.path) for sample in samples]
        return numbers if self.group else numbers[0]


async def reward(ctx: Any, trajectory: Trajectory, *, reward_key: str | None = None) -> float:
    """A reward hook for slime generate hooks that set `sample.reward` themselves. `reward_key`: the entry of a dict."""
    sample = to_sample(trajectory, ctx.prompt, lambda: ctx.tokenizer, RunFacts())
    return _number(sample, Arguments({"reward_key": reward_key}), "the generate hook")


@dataclass(frozen=True)
class KeepHook:
    """A slime dynamic filter as slimx calls it."""

    function: Callable[..., Any]
    path: str
    options: Mapping[str, Any]
    run: RunFacts
    model: str
    """Directory of the tokenizer, for samples that slimx's own hooks generated."""

    @classmethod
    def load(cls, path: str, config: Config) -> KeepHook:
        """The hook at `path`, of `rollout.filter`. Errors are those of `load`."""
        run = RunFacts.of(config)
        return cls(load("rollout.filter", path, "keep"), path, config.rollout.options, run, config.model.path)

    def __call__(self, group: Group) -> bool | str:
        """True, or the reason why the group is dropped."""
        samples = [to_sample(each, group.prompt, lambda: self._tokenizer, self.run) for each in group.trajectories]
        # A trajectory's reward is one number, of which no entry is to be taken.
        verdict = self.function(Arguments({**self.run.values, **self.options, "reward_key": None}), samples)
        keep = getattr(verdict, "keep", verdict)
        if not keep and getattr(verdict, "keep_when_insufficient", False):
            raise SlimxError(
                f"{self.path} sets keep_when_insufficient, which slimx does not serve: a group is kept or not",
            )
        return True if keep else (getattr(verdict, "reason", None) or False)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model)


def prompt_text(tokenizer: Any, prompt: Prompt, *, template: bool) -> str | list[Json]:
    """A prompt as slime hands it to hooks: in the chat template, or (`template` false) the words of a single user turn,
    else the messages."""
    if prompt.messages is None:
        return tokenizer.decode(prompt.token_ids)
    if template:
        encode_prompt(tokenizer, prompt)  # which refuses a prompt that the template cannot take, with its name
        return tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
    alone = len(prompt.messages) == 1 and isinstance(prompt.messages[0]["content"], str)
    return prompt.messages[0]["content"] if alone else [dict(message) for message in prompt.messages]


@contextmanager
def _set(scene: Scene) -> Iterator[None]:
    token = CURRENT.set(scene)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _number(sample: Sample, args: Any, path: str) -> float:
    value = sample.reward
    if isinstance(value, dict):
        if args.reward_key not in value:
            raise SlimxError(
                f"{path} gives a dict as the reward, with {', '.join(map(str, value))}; name one of them in "
                "reward.options.reward_key",
            )
        value = value[args.reward_key]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SlimxError(
            f"{path} gives {value!r} as the reward; give a number", code="slime.reward", about=path
        ) from None
