"""Makes one group from one prompt: generates, computes rewards, filters. A failure drops only this group."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from slimx.algorithms.advantages.group import reward_of
from slimx.config.schema import Config
from slimx.config.sections.eval import Eval
from slimx.config.sections.policies import ACTOR
from slimx.data.chat.responses import read_response
from slimx.data.chat.template import with_template
from slimx.data.chat.tokens import PromptIds
from slimx.data.records import Group, Prompt, Trajectory
from slimx.engines.outage import Outage, Outages
from slimx.environments.processes import Environments
from slimx.errors import SlimxError, raised, safe_repr
from slimx.json_types import Json
from slimx.rewards.context import Engines
from slimx.rollout.flow.gate import Gate
from slimx.rollout.flow.interruption import Interruptible
from slimx.rollout.flow.progress import GroupProgress
from slimx.rollout.flow.returned import (
    ReturnCheck,
    Score,
    add_metrics,
    any_failed,
    check_metadata,
    crashed_trajectory,
    failed_trajectory,
    is_cancellation,
    marking,
    reason_of,
    scored,
    verdict_of,
)
from slimx.rollout.flow.reward_pool import RewardPool
from slimx.rollout.flow.reward_processes import RewardProcesses, reward_runner
from slimx.rollout.flow.slots import Slots, SlottedClient
from slimx.rollout.hook_loading import Hooks, form_facts, name_of
from slimx.rollout.hooks import (
    AgentServer,
    Generator,
    GivenUp,
    Keep,
    RewardContext,
    RolloutContext,
    RolloutEngine,
    seed_of,
)
from slimx.rollout.policy import PolicyClient
from slimx.runtime.clocks import Clock
from slimx.runtime.tasks import in_thread

STRAGGLER = "straggler"
"""Drop reason for an unfinished group that would have delayed a batch for too long."""


@dataclass(slots=True)
class GroupOutcome:
    """Group generated for a prompt, and the drop reason if the group was dropped."""

    group: Group
    reason: str | None = None
    """Drop reason, under which the group is counted: "generate failed", "filter: ...", "straggler", ...; None if the
    group was not dropped."""
    detail: str | None = None
    """Explanation of the drop reason, such as the message of the first error; None if there is none."""

    @property
    def failed(self) -> bool:
        """True if the group failed, rather than being dropped by a filter or as a straggler."""
        return self.reason is not None and is_failure(self.reason)


def is_failure(reason: str) -> bool:
    """Returns True if this drop reason stands for a failure, rather than for a filter's decision or a straggler."""
    return reason != STRAGGLER and not reason.startswith("filter")


class GroupMaker:
    """Generator of groups, with up to `rollout.max_rollouts` rollouts and `rollout.concurrency` requests at a time."""

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        policies: Mapping[str, PolicyClient],
        engines: Engines | None = None,
        proxy: AgentServer | None = None,
        outage: Outage | Outages | None = None,
        score: Score | None = None,
    ):
        """Prepares hooks, slots and reward workers. `policies`: every trained policy by name, `actor` first. `engines`:
        clients of frozen models, for hooks. `proxy`: chat completion server through which agents sample. `outage`:
        suspends the deadlines of rollouts while it lasts. `score`: called with each finished training rollout."""
        self.config = config
        self.hooks = hooks
        self.policies = policies
        self._vocabularies = {name: policy.vocabulary for name, policy in policies.items()}
        self.engines = engines or {}
        self.proxy = proxy
        self._score = score
        self.versions = dict.fromkeys(policies, 0)
        """Newest published weight version of each policy, updated by the training loop."""
        self.begun: dict[str, int] = {}
        """For each policy, the version whose publication has started, so that some engines may already have it."""
        self.outage = outage or Outage()
        self.gate = Gate()
        """Closed while training rollouts may not send requests to engines; evaluations may always send them."""
        self._slots = Slots(config.rollout.concurrency)
        self._route_stride = config.route_stride
        # Evaluations have separate slots, because rollouts that wait at the closed gate keep theirs.
        self._train_slots = Slots(config.rollout.max_rollouts)
        self._eval_slots = Slots(config.rollout.max_rollouts)
        self._rewards: RewardPool | RewardProcesses | None = None
        self._judge_name = config.rollout.generate
        if hooks.reward:
            self._rewards = reward_runner(config.reward, hooks.reward, config.model.path, form_facts(config))
            self._judge_name = f"reward hook {name_of(hooks.reward)}"
        self._environments = Environments()

    @property
    def version(self) -> int:
        """Oldest of `versions`: no token of a rollout that starts now can be sampled by an older version."""
        return min(self.versions.values())

    @version.setter
    def version(self, version: int) -> None:
        self.versions = dict.fromkeys(self.versions, version)

    async def begin(self, policy: str, version: int) -> None:
        """Records the version whose weights engines of `policy` may receive from now on."""
        self.begun[policy] = version

    async def aside[T](self, function: Callable[..., T], *arguments: object) -> T:
        """Calls `function`, which reads whole groups, outside of the event loop, and returns its result."""
        return await in_thread(function, *arguments)

    async def collect(self) -> None:
        """Updates the progress of groups that other processes generate; awaited directly before it is saved."""

    async def make(
        self,
        prompt: Prompt,
        *,
        group_id: str,
        number: int,
        evaluation: Eval | None = None,
        progress: GroupProgress | None = None,
    ) -> GroupOutcome:
        """Generates the rollouts for one prompt and computes their rewards. `number`: ticket number, which determines
        the seeds. `evaluation`: settings of the prompt's set; None in training. `progress`: earlier progress of the
        group, updated in place."""
        progress = GroupProgress() if progress is None else progress
        size = self.config.rollout.group_size
        if evaluation and not self.config.algorithm.scores:  # preference pairs need group_size
            size = evaluation.samples
        ids: dict[str, PromptIds] = {}
        for name, policy in self.policies.items():
            ids[name] = policy.encode(with_template(policy.tokenizer, prompt.template))
        run = partial(self._rollout, prompt, ids, group_id, number, evaluation=evaluation, progress=progress)
        rollouts = [run(index) for index in range(size)]
        if self.config.algorithm.advantages.kind == "remax" and not evaluation:
            rollouts.append(run(size, greedy=True))
        results = await asyncio.gather(*rollouts)
        greedy = results.pop() if len(results) > size else []
        trajectories = list(chain.from_iterable(results))
        group = Group(id=group_id, prompt=prompt, trajectories=trajectories)
        if self.config.reward.scope == "group" and not any_failed(trajectories + greedy):
            parts = [Group(id=group_id, prompt=prompt, trajectories=part) for part in (trajectories, greedy) if part]
            await asyncio.gather(*(self._judge(prompt, part, evaluation) for part in parts))
        for trajectory in trajectories + greedy:
            if trajectory.status == "failed":
                reason = trajectory.metadata.get("failed", "generate failed")  # hooks may mark failures themselves
                return GroupOutcome(group, reason, trajectory.finish_reason)
        return await self._finished(group, greedy, evaluation)

    async def _finished(self, group: Group, greedy: Sequence[Trajectory], evaluation: Eval | None) -> GroupOutcome:
        """Checks and filters a group that has rewards. `greedy`: trajectories of ReMax's greedy baseline."""
        prompt = group.prompt
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
            group.baseline = sum(reward_of(trajectory) for trajectory in greedy) / len(greedy)
        if self.hooks.keep is None or evaluation:
            return GroupOutcome(group)
        return await self._filtered(group, self.hooks.keep)

    def check(self, group: Group, hook: str) -> None:
        """Raises SlimxError if `hook` left anything in `group` that cannot be trained on or written."""
        check_metadata(f"{hook} left prompt {group.prompt.id} with", group.prompt.metadata)
        rollouts: dict[str, list[Trajectory]] = {}
        for trajectory in group.trajectories:
            rollouts.setdefault(safe_repr(trajectory.index), []).append(trajectory)
        for trajectories in rollouts.values():
            self._returned(group.id, trajectories[0].index, hook).check(trajectories)

    def close(self) -> None:
        """Stops the threads and processes that run reward hooks and environments."""
        if self._rewards:
            self._rewards.close()
        self._environments.close()

    async def _filtered(self, group: Group, keep: Keep) -> GroupOutcome:
        before = replace(group, trajectories=list(group.trajectories))
        hook = str(self.config.rollout.filter)
        try:
            deadline_s = self.config.rollout.rollout_deadline
            verdict = await verdict_of(keep, group, before.trajectories, hook, deadline_s)
            self.check(replace(group, id=before.id), hook)
        except SlimxError as error:
            group.trajectories = before.trajectories
            return GroupOutcome(group, "keep failed", str(error))
        except BaseException as error:
            if is_cancellation(error):
                raise
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
        *,
        evaluation: Eval | None,
        progress: GroupProgress,
        greedy: bool = False,
    ) -> list[Trajectory]:
        """Runs a rollout and returns its trajectories, with rewards unless `reward.scope` is group. If the rollout
        fails, at least one of the returned trajectories is marked as failed."""
        done = progress.done.get(index)
        if done is not None:
            return done
        clock = Clock(self.config.rollout.rollout_deadline)
        clients: dict[str, Generator | None] = {}
        for name, policy in self.policies.items():
            clients[name] = policy.client
            if policy.client is not None and evaluation:
                clients[name] = SlottedClient(policy.client, self._slots, clock)
            elif policy.client is not None:
                journal = progress.journal(index)  # shared by the policies: their seeds differ
                clients[name] = Interruptible(policy.client, self._slots, clock, self.gate, journal)
        ctx = self._context(prompt_ids, clients, group_id, number, index, evaluation=evaluation, greedy=greedy)
        try:
            for encoded in prompt_ids.values():
                await encoded.prepare(prompt)
            trajectories = await self._generate(ctx, prompt, clock)
        except SlimxError as error:
            reason = error.reason if isinstance(error, GivenUp) else reason_of(error, "generate failed")
            trajectories = [failed_trajectory(ctx, reason, str(error))]
        except BaseException as error:  # including SystemExit in a hook's library
            if is_cancellation(error):
                raise
            trajectories = [crashed_trajectory(ctx, error, clock, self.config.rollout)]
        else:
            await self._judge_all(prompt, trajectories, evaluation=evaluation, greedy=greedy)
            if not any_failed(trajectories):
                try:
                    self._returned(group_id, index, self._judge_name).check(trajectories)
                except SlimxError as error:  # a checkpoint could not store them
                    trajectories = [failed_trajectory(ctx, "reward failed", str(error))]
        progress.finish(index, trajectories)
        return trajectories

    def _context(
        self,
        prompt_ids: Mapping[str, PromptIds],
        clients: Mapping[str, Generator | None],
        group_id: str,
        number: int,
        index: int,
        *,
        evaluation: Eval | None,
        greedy: bool,
    ) -> RolloutContext:
        """Returns a rollout's context for the policy `actor`; its `policies` contains the other policies' contexts."""
        sampling = self._sampling(evaluation=evaluation, greedy=greedy)
        routed = False
        if self._route_stride and not (evaluation or greedy):
            routed = (number * self.config.rollout.group_size + index) % self._route_stride == 0
        contexts: dict[str, RolloutContext] = {}
        by_role: dict[str, RolloutContext] = {}
        metrics: dict[str, float] = {}
        for name, policy in self.policies.items():
            seed = seed_of(self.config.run.seed, number, index)
            if name != ACTOR:
                seed = seed_of(seed, zlib.crc32(name.encode()))
            contexts[name] = RolloutContext(
                engine=RolloutEngine(clients[name], sampling, seed, routed, self._affinity(group_id, index), name),
                tokenizer=prompt_ids[name].tokenizer,
                version=self.versions[name],
                evaluation=evaluation is not None,
                seed=seed,
                group_id=group_id,
                index=index,
                engines=self.engines,
                address=getattr(policy.client, "url", ""),
                headers=getattr(policy.client, "headers", {}),
                proxy=self.proxy if name == ACTOR else None,
                environments=self._environments,
                prompt_ids=prompt_ids[name],
                metrics=metrics,
                policy=name,
                policies=by_role,
            )
        for role, name in self.config.roles.items():
            by_role[role] = contexts[name]
        return contexts[ACTOR]

    async def _generate(self, ctx: RolloutContext, prompt: Prompt, clock: Clock) -> list[Trajectory]:
        """Calls the generate hook within the rollout's deadline, and returns its trajectories after checking them."""
        slots = self._eval_slots if ctx.evaluation else self._train_slots
        async with slots.occupy(), clock:
            with self.outage.stops(clock):
                result = await self.hooks.generate(ctx, prompt)
        trajectories = result if isinstance(result, list) else [result]
        self._returned(ctx.group_id, ctx.index, self.config.rollout.generate).check(trajectories)
        add_metrics(trajectories[0], ctx.metrics)
        return trajectories

    async def _judge_all(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], *, evaluation: Eval | None, greedy: bool
    ) -> None:
        """Computes the rewards of trajectories and, in training rollouts, calls `score` with them, concurrently."""
        work: list[Coroutine[None, None, None]] = []
        if self.config.reward.scope == "trajectory":
            work += [self._judge(prompt, trajectory, evaluation) for trajectory in trajectories]
        if self._score is not None and not (evaluation or greedy):
            work += [scored(self._score, prompt, trajectory) for trajectory in trajectories]
        if len(work) == 1:  # avoids a task in the most frequent case
            await work[0]
        else:
            await asyncio.gather(*work)

    def _affinity(self, group_id: str, index: int) -> str | None:
        """Returns the affinity key of requests, or None if the router routes by prefix."""
        keys = {"group": group_id, "rollout": f"{group_id}/{index}"}
        return keys.get(self.config.rollout.affinity)

    def _sampling(self, *, evaluation: Eval | None, greedy: bool) -> Json:
        options = self.config.rollout.sampling
        limit = evaluation and evaluation.max_new_tokens
        sampling: Json = {"max_new_tokens": limit or options.max_new_tokens}
        if greedy or (evaluation and evaluation.temperature == 0):
            sampling["temperature"] = 0.0
        elif evaluation:
            sampling |= {"temperature": evaluation.temperature, "top_p": evaluation.top_p}
        else:
            sampling |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        if options.stop_token_ids:
            sampling["stop_token_ids"] = list(options.stop_token_ids)
        return sampling

    def _returned(self, group_id: str, index: int, hook: str) -> ReturnCheck:
        """Returns the check for the trajectories that `hook` returned; its error messages name `hook`."""
        return ReturnCheck(
            hook,
            group_id,
            index,
            vocabularies=self._vocabularies,
            versions={name: max(version, self.begun.get(name, 0)) for name, version in self.versions.items()},
            sampled=self.policies[ACTOR].client is not None,
        )

    async def _judge(self, prompt: Prompt, judged: Trajectory | Group, evaluation: Eval | None) -> None:
        """Sets the reward of a trajectory, or of all in a group; if the hook fails, marks the first as failed."""
        if self._rewards is None:
            return
        trajectories = judged.trajectories if isinstance(judged, Group) else [judged]
        ctx = RewardContext(prompt, self.policies[ACTOR].tokenizer, "", evaluation is not None, self.engines)
        ctx.read_later([partial(read_response, one, self.policies[one.policy].tokenizer) for one in trajectories])
        with marking(trajectories[0], "reward"):
            result = await self._rewards.judge(ctx, judged)
            verdicts = result if isinstance(result, list) else [result]
            for trajectory, verdict in zip(trajectories, verdicts, strict=True):
                trajectory.reward, trajectory.reward_parts = verdict
            add_metrics(trajectories[0], ctx.metrics)
