"""One group from one prompt: generate, judge, filter. What fails is dropped with its reason, and never takes others
along."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.chat.responses import read_response
from slimx.data.chat.template import with_template
from slimx.data.chat.tokens import PromptIds
from slimx.data.records import Group, Prompt, Trajectory
from slimx.engines.outage import Outage, Outages
from slimx.environments.processes import Environments
from slimx.errors import DeadlineError, SlimxError, raised, safe_repr
from slimx.rollout.client.sending import REQUEST
from slimx.rollout.flow.gate import Gate
from slimx.rollout.flow.interruption import Interruptible
from slimx.rollout.flow.progress import GroupProgress
from slimx.rollout.flow.returned import Returned, check_metadata, check_verdict
from slimx.rollout.flow.reward_processes import reward_runner
from slimx.rollout.flow.slots import Slots, SlottedClient
from slimx.rollout.hook_loading import Hooks, form_facts, name_of
from slimx.rollout.hooks import (
    ENGINE_DEADLINE,
    AgentServer,
    Generator,
    GivenUp,
    RewardContext,
    RolloutContext,
    RolloutEngine,
    logged_twice,
    seed_of,
)
from slimx.runtime.clocks import Clock

Score = Callable[[Prompt, Trajectory], Awaitable[None]]
"""Adds numbers of another model, such as a teacher's, to a trajectory of a prompt. Raises SlimxError."""
STRAGGLER = "straggler"
"""Reason of a group that was given up, unfinished, because a batch would have waited for it too long."""


@dataclass(slots=True)
class GroupOutcome:
    """The outcome of a prompt: a group, or the reason why there is none."""

    group: Group | None
    reason: str | None = None
    """Short, countable: "generate failed", "reward failed", "filter: ...", "straggler"; None for a kept group."""
    detail: str | None = None
    """The first exception's text."""

    @property
    def failed(self) -> bool:
        """True if something broke; see `broke`."""
        return self.reason is not None and broke(self.reason)


def broke(reason: str) -> bool:
    """True for the reason of something that broke, as opposed to a filter that said no or a group that was only
    slow."""
    return reason != STRAGGLER and not reason.startswith("filter")


@dataclass(frozen=True, slots=True)
class Speaker:
    """A trained policy as rollouts reach it."""

    client: Generator | None
    """None: nothing is sampled."""
    tokenizer: Any
    """Tokenizer of its model."""
    vocabulary: int | None = None
    """Token ids that its model has; None: unknown."""


class GroupMaker:
    """Makes groups with the run's hooks: `rollout.max_rollouts` rollouts and `rollout.concurrency` requests at once."""

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        speakers: Mapping[str, Speaker],
        engines: Mapping[str, Any] | None = None,
        proxy: AgentServer | None = None,
        outage: Outage | Outages | None = None,
        score: Score | None = None,
    ):
        """`speakers`: every trained policy by its name, first `actor`. `engines`: clients of frozen ones, which hooks
        may ask. `proxy`: the server through which agents sample. `outage`: while it lasts, no rollout's deadline
        runs. `score`: called with each finished rollout that is trained."""
        self.config, self.hooks, self.speakers = config, hooks, speakers
        self.engines, self.proxy = engines or {}, proxy
        self._score = score
        self.versions = dict.fromkeys(speakers, 0)
        """Newest published weight version of each policy; the loop keeps it."""
        self.begun: dict[str, int] = {}
        """Version of each policy whose publication has begun: the first engines may have it already."""
        self.outage = outage or Outage()
        self.gate = Gate()
        """Closed while rollouts that are trained may ask no engine; an evaluation may."""
        self._slots = Slots(config.rollout.concurrency)
        self._route_stride = config.route_stride
        # An evaluation has places of its own: rollouts that wait behind the closed gate keep theirs.
        self._places = {kind: Slots(config.rollout.max_rollouts) for kind in ("train", "eval")}
        self._rewards = (
            reward_runner(config.reward, hooks.reward, config.model.path, form_facts(config)) if hooks.reward else None
        )
        self._judge_name = f"reward hook {name_of(hooks.reward)}" if hooks.reward else config.rollout.generate
        self._environments = Environments()

    @property
    def version(self) -> int:
        """The oldest of `versions`: what a rollout that begins now may be sampled by."""
        return min(self.versions.values())

    @version.setter
    def version(self, version: int) -> None:
        self.versions = dict.fromkeys(self.versions, version)

    async def make(
        self,
        prompt: Prompt,
        *,
        group_id: str,
        number: int,
        evaluation: bool = False,
        progress: GroupProgress | None = None,
    ) -> GroupOutcome:
        """All rollouts of one prompt, judged. `number` seeds them: the same number gives the same seeds in a resumed
        run. `progress`: what is done of them already; it is kept up to date."""
        progress = GroupProgress() if progress is None else progress
        judged = evaluation and not self.config.algorithm.scores  # held-out pairs are pairs, too
        size = self.config.eval.samples if judged else self.config.rollout.group_size
        ids = {name: PromptIds(with_template(each.tokenizer, prompt.template)) for name, each in self.speakers.items()}
        rollouts = [self._rollout(prompt, ids, group_id, number, i, evaluation, progress) for i in range(size)]
        if self.config.algorithm.advantages.kind == "remax" and not evaluation:
            rollouts.append(self._rollout(prompt, ids, group_id, number, size, evaluation, progress, greedy=True))
        results = await asyncio.gather(*rollouts)
        greedy = results.pop() if len(results) > size else []
        trajectories = [trajectory for result in results for trajectory in result]
        group = Group(id=group_id, prompt=prompt, trajectories=trajectories)
        if self.config.reward.scope == "group" and all(each.status != "failed" for each in trajectories + greedy):
            await asyncio.gather(
                *(
                    self._judge(prompt, Group(id=group_id, prompt=prompt, trajectories=part), evaluation)
                    for part in (trajectories, greedy)
                    if part
                )
            )
        for trajectory in trajectories + greedy:
            if trajectory.status == "failed":
                reason = trajectory.metadata.get("failed", "generate failed")  # a hook may give a rollout up by itself
                return GroupOutcome(group, reason, trajectory.finish_reason)
        try:
            check_metadata(f"prompt {prompt.id} has", prompt.metadata)
        except SlimxError as error:
            return GroupOutcome(group, "generate failed", str(error))
        try:
            if self.config.reward.scope == "group":
                self.check(group, self._judge_name)
        except SlimxError as error:
            return GroupOutcome(group, "reward failed", str(error))
        if greedy:
            group.baseline = sum(trajectory.reward for trajectory in greedy) / len(greedy)
        return self._filtered(group) if self.hooks.keep and not evaluation else GroupOutcome(group)

    def check(self, group: Group, hook: str) -> None:
        """Raise SlimxError for what `hook`, which saw `group`, left of it that cannot be trained or written."""
        check_metadata(f"{hook} left prompt {group.prompt.id} with", group.prompt.metadata)
        rollouts: dict[str, list[Trajectory]] = {}
        for trajectory in group.trajectories:
            rollouts.setdefault(safe_repr(trajectory.index), []).append(trajectory)
        for trajectories in rollouts.values():
            self._returned(group.id, trajectories[0].index, hook).check(trajectories)

    def close(self) -> None:
        """Let the threads and processes of rewards and environments end."""
        if self._rewards:
            self._rewards.close()
        self._environments.close()

    def _filtered(self, group: Group) -> GroupOutcome:
        before, name, hook = list(group.trajectories), group.id, str(self.config.rollout.filter)
        try:
            verdict = self.hooks.keep(group)
            check_verdict(verdict, group, before, hook)
            self.check(replace(group, id=name), hook)
        except SlimxError as error:
            group.trajectories = before
            return GroupOutcome(group, "keep failed", str(error))
        except BaseException as error:
            return GroupOutcome(group, "keep failed", raised(error))
        if isinstance(verdict, str):
            return GroupOutcome(group, f"filter: {verdict}")
        return GroupOutcome(group, None if verdict else "filter")

    async def _rollout(
        self,
        prompt: Prompt,
        prompt_ids: Mapping[str, PromptIds],
        group_id: str,
        number: int,
        index: int,
        evaluation: bool,
        progress: GroupProgress,
        *,
        greedy: bool = False,
    ) -> list[Trajectory]:
        if (done := progress.done.get(index)) is not None:
            return done
        sampling = self._sampling(evaluation=evaluation, greedy=greedy)
        seed = seed_of(self.config.run.seed, number, index)
        routed = bool(self._route_stride) and not (evaluation or greedy)
        routed = routed and (number * self.config.rollout.group_size + index) % self._route_stride == 0
        limit = self.config.rollout.rollout_deadline
        clock = Clock(limit)

        def way(client: Generator | None) -> Generator | None:
            if client is None:
                return None
            if evaluation:
                return SlottedClient(client, self._slots, clock)
            return Interruptible(client, self._slots, clock, self.gate, progress.journal(index))

        views: dict[str, RolloutContext] = {}
        by_role: dict[str, RolloutContext] = {}  # the same for all of them, the actor's included
        metrics: dict[str, float] = {}
        for name, speaker in self.speakers.items():
            # One journal has the answers of all policies: they are told apart by their seeds.
            own = seed if name == ACTOR else seed_of(seed, zlib.crc32(name.encode()))
            views[name] = RolloutContext(
                engine=RolloutEngine(way(speaker.client), sampling, own, routed, self._affinity(group_id, index), name),
                tokenizer=prompt_ids[name].tokenizer,
                version=self.versions[name],
                evaluation=evaluation,
                seed=own,
                group_id=group_id,
                index=index,
                engines=self.engines,
                address=getattr(speaker.client, "url", ""),
                headers=getattr(speaker.client, "headers", {}),
                proxy=self.proxy if name == ACTOR else None,
                environments=self._environments,
                prompt_ids=prompt_ids[name],
                metrics=metrics,
                policy=name,
                policies=by_role,
            )
        by_role |= {role: views[name] for role, name in self.config.roles.items()}
        ctx = views[ACTOR]
        hook = self.config.rollout.generate
        try:
            async with self._places["eval" if evaluation else "train"].one(), clock:
                with self.outage.stops(clock):
                    result = await self.hooks.generate(ctx, prompt)
            trajectories = result if isinstance(result, list) else [result]
            self._returned(group_id, index, hook).check(trajectories)
            _keep_logged(trajectories[0], ctx.metrics)
        except SlimxError as error:
            reason = error.reason if isinstance(error, GivenUp) else _reason(error, "generate failed")
            trajectories = [_failed(ctx, reason, str(error))]
        except BaseException as error:  # a SystemExit of a hook's library is a failure of this rollout, too
            if _ours(error):
                raise
            reason, text = "generate failed", f"{hook} raised {raised(error)}"
            if isinstance(error, TimeoutError) and clock.expired:  # not a time-out inside the hook
                reason, text = "generate deadline", str(DeadlineError(f"rollout {group_id}/{index}", limit, hook))
            trajectories = [_failed(ctx, reason, text)]
        else:
            alone = self.config.reward.scope == "trajectory"
            work = [self._judge(prompt, trajectory, evaluation) for trajectory in trajectories if alone]
            if self._score is not None and not (evaluation or greedy):
                work += [self._scored(prompt, trajectory) for trajectory in trajectories]
            if len(work) == 1:  # no task of its own for the one that most rollouts have
                await work[0]
            else:
                await asyncio.gather(*work)
            if not any(trajectory.status == "failed" for trajectory in trajectories):
                try:
                    self._returned(group_id, index, self._judge_name).check(trajectories)
                except SlimxError as error:  # nothing is kept of what a checkpoint could not hold
                    trajectories = [_failed(ctx, "reward failed", str(error))]
        progress.finish(index, trajectories)
        return trajectories

    def _affinity(self, group_id: str, index: int) -> str | None:
        """The key of requests that stay together; None where the router goes by their prefixes."""
        return {"group": group_id, "rollout": f"{group_id}/{index}"}.get(self.config.rollout.affinity)

    def _sampling(self, *, evaluation: bool, greedy: bool) -> dict[str, Any]:
        options, held_out = self.config.rollout.sampling, self.config.eval
        sampling: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
        if greedy or (evaluation and held_out.temperature == 0):
            sampling["temperature"] = 0.0
        elif evaluation:
            sampling |= {"temperature": held_out.temperature, "top_p": held_out.top_p}
        else:
            sampling |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        if options.stop_token_ids:
            sampling["stop_token_ids"] = list(options.stop_token_ids)
        return sampling

    def _returned(self, group_id: str, index: int, hook: str) -> Returned:
        """The rules for the trajectories of a rollout that `hook` made or saw."""
        return Returned(
            hook,
            group_id,
            index,
            vocabularies={name: speaker.vocabulary for name, speaker in self.speakers.items()},
            versions={name: max(version, self.begun.get(name, 0)) for name, version in self.versions.items()},
            sampled=self.speakers[ACTOR].client is not None,
        )

    async def _judge(self, prompt: Prompt, judged: Trajectory | Group, evaluation: bool) -> None:
        """Give a trajectory, or those of a group, their rewards; a failure is marked on the first one."""
        if self._rewards is None:
            return
        trajectories = judged.trajectories if isinstance(judged, Group) else [judged]
        responses = [read_response(each, self.speakers[each.policy].tokenizer) for each in trajectories]
        ctx = RewardContext(
            prompt, self.speakers[ACTOR].tokenizer, responses[0].text, evaluation, self.engines, responses
        )
        with _marking(trajectories[0], "reward"):
            said = await self._rewards.judge(ctx, judged)
            for trajectory, verdict in zip(trajectories, said if isinstance(said, list) else [said], strict=True):
                trajectory.reward, trajectory.reward_parts = verdict
            _keep_logged(trajectories[0], ctx.metrics)

    async def _scored(self, prompt: Prompt, trajectory: Trajectory) -> None:
        with _marking(trajectory, "teacher"):
            await self._score(prompt, trajectory)


@contextmanager
def _marking(trajectory: Trajectory, what: str) -> Iterator[None]:
    """Mark `trajectory` as failed where the block, the work of `what`, raises SlimxError."""
    try:
        yield
    except SlimxError as error:
        late = isinstance(error, DeadlineError)
        _mark(trajectory, _reason(error, f"{what} {'deadline' if late else 'failed'}"), str(error))


def _reason(error: SlimxError, reason: str) -> str:
    """Returns `reason`, unless `error` is that engines did not answer in time."""
    return ENGINE_DEADLINE if isinstance(error, DeadlineError) and error.awaited == REQUEST else reason


def _ours(error: BaseException) -> bool:
    """True for the cancellation of the present task, as opposed to a hook's own CancelledError."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError | GeneratorExit) and (task is None or task.cancelling() > 0)


def _keep_logged(trajectory: Trajectory, logged: Mapping[str, float]) -> None:
    """Add what a hook logged to its trajectory. Raises SlimxError for a name that another hook logged for it."""
    if both := sorted(trajectory.metrics.keys() & logged.keys()):
        raise logged_twice(both[0])
    trajectory.metrics |= logged


def _mark(trajectory: Trajectory, reason: str, text: str) -> None:
    trajectory.status, trajectory.finish_reason = "failed", text
    trajectory.metadata["failed"] = reason


def _failed(ctx: RolloutContext, reason: str, text: str) -> Trajectory:
    """The empty trajectory that stands in a group for a rollout which brought nothing."""
    out = Trajectory(
        id=f"{ctx.group_id}/{ctx.index}",
        rollout_id=f"{ctx.group_id}/{ctx.index}",
        group_id=ctx.group_id,
        index=ctx.index,
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.uint8),
        logprobs=np.zeros(0, np.float32),
        spans=[],
    )
    _mark(out, reason, text)
    return out
