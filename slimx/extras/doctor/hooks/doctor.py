"""Tries a run's hooks before it starts: `slimx doctor FILE --hooks`.

Every hook is loaded and its contract checked. Then generate and reward run on the first prompt, with the run's
tokenizer and the run's own code around them, against a stand-in for the engines
(`slimx.extras.doctor.hooks.scripted_server`) that says, in three rollouts, the prompt's answer, something else, and
something else without an end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slimx.algorithms.credit import load_credit
from slimx.config.schema import Config
from slimx.config.sections.algorithm import CREDITS
from slimx.data.records import Group, Prompt, Trajectory
from slimx.errors import SlimxError, raised
from slimx.extras.doctor.effects.probe import try_hooks
from slimx.extras.doctor.hooks.scripted_server import LOGPROB, VERDICT, ScriptedServer
from slimx.extras.doctor.hooks.trial import HookTrial, Tried
from slimx.models.families import ModelSpec, configured_model
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.start.prompts import run_tokenizer, training_prompts
from slimx.rewards.mixture import Mixture
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.hook_loading import Hooks, check_generated, load_generate, load_keep, load_rewards
from slimx.rules.layout import check_layout

HELD_S = 0.5
"""An event loop that stands still for so long is worth a note."""


@dataclass(slots=True)
class Examined:
    """Findings about the hooks of a configuration."""

    lines: list[str] = field(default_factory=list)
    problems: list[SlimxError] = field(default_factory=list)
    """Why a run would fail, or teach nothing; one sentence each."""
    notes: list[SlimxError] = field(default_factory=list)

    def problem(self, code: str, about: str, sentence: str) -> None:
        self.problems.append(SlimxError(sentence, code=code, about=about))

    def note(self, code: str, about: str, sentence: str) -> None:
        self.notes.append(SlimxError(sentence, code=code, about=about))


def examine_hooks(config: Config, texts: Sequence[str] = ()) -> Examined:
    """Load and try the hooks of a run. Never raises SlimxError: what is wrong is in `problems`. `texts`: what the
    stand-in says in a rollout besides the usual three, request by request, before it answers."""
    found = Examined()
    hooks = _load(config, found)
    if found.problems:
        found.note("hooks.untried", "hooks", "hooks were not tried, as not all could be loaded")
        return found
    try:
        spec, tokenizer = configured_model(config), run_tokenizer(config)
        by_source = training_prompts(config, tokenizer, spec)
        prompts = [prompt for several in by_source.values() for prompt in several]
        check_generated(hooks.generate, prompts, tokenizer)
        if isinstance(hooks.reward, Mixture):
            hooks.reward.check(prompts)
    except SlimxError as error:
        found.problems.append(error)
        return found
    with ScriptedServer(ModelShape.of(spec)) as server:
        try:
            tried = HookTrial(config, hooks, spec, tokenizer, prompts[0], server, texts).watch()
        except SlimxError as error:
            found.problems.append(error)
            return found
    _judge(config, hooks, spec, prompts[0], tried, found)
    return found


def _load(config: Config, found: Examined) -> Hooks:
    """Each on its own, so that one wrong hook does not hide another."""

    def attempt(key: str, path: Any, load: Callable[[], Any]) -> Any:
        if path is None:
            return None
        try:
            hook = load()
        except SlimxError as error:
            found.problems.append(error)
            return None
        found.lines.append(f"  {key:<22} {path}")
        return hook

    rewards = " + ".join(part.function for part in config.reward.parts) or config.reward.function
    hooks = Hooks(
        generate=attempt("rollout.generate", config.rollout.generate, lambda: load_generate(config)),
        reward=attempt("reward", rewards, lambda: load_rewards(config)),
        keep=attempt("rollout.filter", config.rollout.filter, lambda: load_keep(config)),
    )
    if (credit := config.algorithm.credit) not in CREDITS:
        attempt("algorithm.credit", credit, lambda: load_credit(credit))
    own = {key: getattr(config.algorithm, key) for key in config.algorithm.hooks}
    if own:
        paths = ", ".join(map(str, own.values()))
        attempt("algorithm." + " and ".join(own), paths, lambda: try_hooks(config))
    return hooks


def _judge(config: Config, hooks: Hooks, spec: ModelSpec, prompt: Prompt, tried: list[Tried], found: Examined) -> None:
    """Say what came back, and what is wrong with it."""
    hook = config.rollout.generate
    found.lines += ["", f"prompt {prompt.id!r}, log-probs of the stand-in {LOGPROB}:", *_table(tried)]
    _failures(tried, found)
    whole = [(each, each.outcome.group) for each in tried if each.outcome.reason is None and each.outcome.group]
    trajectories = [trajectory for _, group in whole for trajectory in group.trajectories]
    if not trajectories:
        return
    _limits(config, spec, trajectories, found)
    if not any(trajectory.loss_mask.any() for trajectory in trajectories):
        sentence = f"rollout.generate: {hook} trains no token; add_sampled with train=True"
        found.problem("hooks.untrained", hook, sentence)
    elif empty := [trajectory.id for trajectory in trajectories if not trajectory.loss_mask.any()]:
        sentence = f"trajectory {empty[0]} has no trained token: it counts in its group and teaches nothing"
        found.note("hooks.empty", empty[0], sentence)
    if any(trajectory.loss_mask[trajectory.versions() < 0].any() for trajectory in trajectories) and tried[0].requests:
        sentence = f"{hook} trains tokens that no engine sampled: their ratio to the rollout's policy is unknown"
        found.note("hooks.unsampled", hook, sentence)
    held = min(each.held for each in tried)  # the first rollout may import and load besides
    if held > HELD_S:
        found.note(
            "hooks.holding",
            hook,
            f"the event loop stood still for {held:.1f} s, and all rollouts share it: let {hook} await, or its "
            "environment live in a process (environment_processes)",
        )
    if any(each.same_seed for each in tried):
        sentence = (
            f"{hook} makes several requests with one turn number: the same seed gives the same words; count `turn` up"
        )
        found.note("hooks.one_seed", hook, sentence)
    rewards = [trajectory.reward for trajectory in trajectories]
    if config.reward.configured and len(tried) > 1 and len(set(rewards)) == 1:
        sentence = f"the reward is {rewards[0]:g} whatever the engine says"
        found.note("hooks.constant_reward", "reward", sentence)
    _keep(hooks, Group(id="0", prompt=prompt, trajectories=trajectories), found)


def _failures(tried: list[Tried], found: Examined) -> None:
    """One sentence for all rollouts that failed in one way."""
    by_reason: dict[str, list[Tried]] = {}
    for each in tried:
        if each.outcome.reason is not None:
            by_reason.setdefault(each.outcome.reason, []).append(each)
    for reason, failed in by_reason.items():
        first = failed[0]
        many = f" ({len(failed)} of {len(tried)} rollouts)" if len(failed) > 1 else ""
        said = f"{reason} where the engine says {first.says}{many}: {' '.join(str(first.outcome.detail).split())}"
        if first.frozen:
            said += f" (frozen models were asked too, and said {VERDICT!r}: that may be why)"
        told = found.notes if first.frozen else found.problems
        told.append(SlimxError(said, code="hooks.failed", about=reason))


def _limits(config: Config, spec: ModelSpec, trajectories: list[Trajectory], found: Examined) -> None:
    """Prompts and trajectories that are long for the run."""
    hook, limit = config.rollout.generate, config.rollout.max_prompt_tokens
    prompt = max(trajectory.spans[0].stop for trajectory in trajectories)
    if prompt > limit:
        found.note(
            "hooks.long_prompt",
            hook,
            f"{hook} makes a prompt too long: {prompt} tokens, where those of the file may have {limit} "
            "(rollout.max_prompt_tokens)",
        )
    try:
        longest = longest_trajectory(config, spec, check_layout(config.trainer, spec))
    except SlimxError:
        return  # the layout is no hook's fault; `slimx doctor FILE` says what is wrong with it
    length = max(len(trajectory.token_ids) for trajectory in trajectories)
    if length > longest:
        of_model = longest == spec.gpt["max_sequence_length"]
        more = f"{spec.path} has no more positions" if of_model else "raise trainer.max_tokens_per_microbatch"
        found.problem(
            "hooks.long_trajectory",
            hook,
            f"rollout.generate: {hook} makes a trajectory of {length} tokens where {longest} can be trained; "
            f"{more}{': ' if of_model else ' or '}return several trajectories",
        )


def _keep(hooks: Hooks, group: Group, found: Examined) -> None:
    if hooks.keep is None:
        return
    try:
        verdict = hooks.keep(group)
    except Exception as error:
        sentence = f"rollout.filter, given these rollouts as a group, raised {raised(error)}"
        found.problem("hooks.filter_raised", "rollout.filter", sentence)
        return
    if not isinstance(verdict, bool | str | np.bool_):
        sentence = f"rollout.filter returned a {type(verdict).__name__}; return True, False or a reason"
        found.problem("hooks.filter_verdict", "rollout.filter", sentence)
        return
    said = f"dropped: {verdict}" if isinstance(verdict, str) else ("kept" if verdict else "dropped")
    found.lines.append(f"  these as one group: {said}")


def _table(tried: list[Tried]) -> list[str]:
    rows = [("engine says", "trajectory", "tokens", "trained", "spans", "requests", "status", "reward", "seconds")]
    for each in tried:
        group = each.outcome.group
        for number, trajectory in enumerate(group.trajectories if group else []):
            spans = " ".join(f"{span.source[0]}{span.stop - span.start}" for span in trajectory.spans)
            first = number == 0
            rows.append(
                (
                    each.says if first else "",
                    trajectory.id,
                    str(len(trajectory.token_ids)),
                    str(int(trajectory.loss_mask.sum())),
                    spans if len(spans) < 28 else spans[:25] + "...",
                    str(each.requests) if first else "",
                    trajectory.status,
                    "-" if trajectory.reward is None else f"{trajectory.reward:g}",
                    f"{each.seconds:.2f}" if first else "",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ] + ["  spans: p prompt, s sampled, i inserted, with their tokens", *_logged(tried)]


def _logged(tried: list[Tried]) -> list[str]:
    """A line for each name that hooks logged, with its value in every rollout."""
    metrics = [
        trajectory.metrics for each in tried if each.outcome.group for trajectory in each.outcome.group.trajectories
    ]
    names = sorted({name for values in metrics for name in values})
    shown = {name: " ".join(f"{values[name]:g}" if name in values else "-" for values in metrics) for name in names}
    return [f"  logged hook/{name}: {values}" for name, values in shown.items()]
