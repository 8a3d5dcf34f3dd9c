"""Tries the hooks of a run before it starts: `slimx doctor FILE --hooks`.

Every hook is loaded and its signature is checked. Then the generate and reward hooks run on the first prompt (with
`trainer.vision`, the first that has images), with the run's tokenizer and the code that surrounds them in a run. A
scripted server replaces the engines (`slimx.extras.doctor.hooks.scripted_server`). In three rollouts it returns the
prompt's answer, a different response, and one that is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from slimx import entry_points
from slimx.algorithms.credit import load_credit
from slimx.config.schema import Config
from slimx.config.sections.algorithm import CREDITS
from slimx.data.chat.tokens import PromptIds
from slimx.data.records import Group, Prompt, Trajectory
from slimx.errors import SlimxError, raised
from slimx.extras.doctor.effects.probe import try_hooks
from slimx.extras.doctor.hooks.scripted_server import LOGPROB, VERDICT, ScriptedServer
from slimx.extras.doctor.hooks.trial import HookTrial, TrialRollout
from slimx.models.families import ModelSpec, configured_model
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.start.prompts import run_tokenizer, training_prompts
from slimx.rewards.mixture import Mixture
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.hook_loading import Hooks, check_generated, load_generate, load_keep, load_rewards
from slimx.rules.layout import check_layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCKED_S = 0.5
"""Maximum time in seconds for which a hook may block the event loop before a note is added to the findings."""


@dataclass(slots=True)
class HookFindings:
    """Results of trying the hooks of a configuration."""

    lines: list[str] = field(default_factory=list)
    problems: list[SlimxError] = field(default_factory=list)
    """Errors that would make a run fail or learn nothing."""
    notes: list[SlimxError] = field(default_factory=list)

    def problem(self, code: str, about: str, sentence: str) -> None:
        self.problems.append(SlimxError(sentence, code=code, about=about))

    def note(self, code: str, about: str, sentence: str) -> None:
        self.notes.append(SlimxError(sentence, code=code, about=about))


def examine_hooks(config: Config, texts: Sequence[str] = ()) -> HookFindings:
    """Loads and tries the hooks of a run. Never raises SlimxError; errors are in the result's `problems`. `texts`:
    responses of the scripted server in one additional rollout, one per request. After the last one, the server returns
    the prompt's answer."""
    findings = HookFindings()
    hooks = _load(config, findings)
    if findings.problems:
        findings.note(
            "hooks.untried",
            "hooks",
            "the hooks were not tried, because not all of them can be loaded; correct the hooks that cannot be loaded",
        )
        return findings
    try:
        with TemporaryDirectory() as directory:  # for the images of prompts and hooks
            _try(config, _images_in(config, directory), hooks, texts, findings)
    except SlimxError as error:
        findings.problems.append(error)
    return findings


def _images_in(config: Config, directory: str) -> Config:
    """Returns a configuration whose image store is in `directory`."""
    run = config.run.model_copy(update={"dir": directory})
    rollout = config.rollout.model_copy(update={"replay": None})
    return config.model_copy(update={"run": run, "rollout": rollout})


def _try(config: Config, stored: Config, hooks: Hooks, texts: Sequence[str], findings: HookFindings) -> None:
    """Tries `hooks`, and adds the results to `findings`. `stored`: the run's configuration with another image store;
    `texts`: as for `examine_hooks`. Raises SlimxError for invalid prompts and images."""
    spec, tokenizer = configured_model(config), run_tokenizer(config)
    prompts = list(chain.from_iterable(training_prompts(stored, tokenizer, spec).values()))
    check_generated(hooks.generate, prompts, tokenizer)
    if isinstance(hooks.reward, Mixture):
        hooks.reward.check(prompts)
    with _encoder(stored, spec) as encode:
        prompt = prompts[0]
        if config.trainer.vision is not None:
            prompt = next((prompt for prompt in prompts if prompt.metadata.get("images")), prompt)
            try:  # here rather than in a rollout, whose deadline does not include starting processes
                asyncio.run(encode(tokenizer).prepare(prompt))
            except SlimxError as error:
                raise SlimxError(f"prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error
        with ScriptedServer(ModelShape.of(spec)) as server:
            rollouts = HookTrial(config, hooks, spec, tokenizer, prompt, server, texts, encode).watch()
    _judge(config, hooks, spec, prompt, rollouts, findings)


@contextmanager
def _encoder(config: Config, spec: ModelSpec) -> Iterator[Callable[[PreTrainedTokenizerBase], PromptIds]]:
    """Yields the function with which a run creates encoders of prompts."""
    if config.trainer.vision is None:
        yield PromptIds
        return
    images = entry_points.load("slimx.images", "vision")(config, spec)
    try:
        yield images.prompt_ids
    finally:
        images.close()


def _load(config: Config, findings: HookFindings) -> Hooks:
    """Loads each hook separately, so that an error in one hook does not hide errors in others."""

    def attempt(key: str, path: Any, load: Callable[[], Any]) -> Any:
        if path is None:
            return None
        try:
            hook = load()
        except SlimxError as error:
            findings.problems.append(error)
            return None
        findings.lines.append(f"  {key:<22} {path}")
        return hook

    rewards = " + ".join(part.function for part in config.reward.parts) or config.reward.function
    hooks = Hooks(
        generate=attempt("rollout.generate", config.rollout.generate, lambda: load_generate(config)),
        reward=attempt("reward", rewards, lambda: load_rewards(config)),
        keep=attempt("rollout.filter", config.rollout.filter, lambda: load_keep(config)),
    )
    credit = config.algorithm.credit
    if credit not in CREDITS:
        attempt("algorithm.credit", credit, lambda: load_credit(credit))
    keys = config.algorithm.hooks
    if keys:
        paths = ", ".join(str(getattr(config.algorithm, key)) for key in keys)
        attempt("algorithm." + " and ".join(keys), paths, lambda: try_hooks(config))
    return hooks


def _judge(
    config: Config, hooks: Hooks, spec: ModelSpec, prompt: Prompt, rollouts: list[TrialRollout], findings: HookFindings
) -> None:
    """Adds the rollouts' results and problems to `findings`."""
    hook = config.rollout.generate
    findings.lines += ["", f"prompt {prompt.id!r}, all log-probs are {LOGPROB}:", *_table(rollouts)]
    _failures(rollouts, findings)
    trajectories: list[Trajectory] = []
    for rollout in rollouts:
        if rollout.outcome.reason is None and rollout.outcome.group is not None:
            trajectories += rollout.outcome.group.trajectories
    if not trajectories:
        return
    _limits(config, spec, trajectories, findings)
    untrained: list[str] = []
    trains_unsampled = False
    for trajectory in trajectories:
        if not trajectory.loss_mask.any():
            untrained.append(trajectory.id)
        if trajectory.loss_mask[trajectory.versions() < 0].any():
            trains_unsampled = True
    if len(untrained) == len(trajectories):
        sentence = f"rollout.generate: {hook} trains no token; call add_sampled with train=True"
        findings.problem("hooks.untrained", hook, sentence)
    elif untrained:
        sentence = f"trajectory {untrained[0]} has no trained token, so it counts in its group but is not trained on"
        findings.note("hooks.empty", untrained[0], sentence)
    if trains_unsampled and rollouts[0].requests:
        sentence = f"{hook} trains tokens that no engine sampled, so their importance ratio is unknown"
        findings.note("hooks.unsampled", hook, sentence)
    blocked = min(rollout.blocked for rollout in rollouts)  # the first rollout may also import modules and load files
    if blocked > BLOCKED_S:
        findings.note(
            "hooks.holding",
            hook,
            f"{hook} blocked the event loop, which all rollouts share, for {blocked:.1f} s; use await in the hook, or "
            "run its environment in other processes with rollout.options.environment_processes",
        )
    if any(rollout.same_seed for rollout in rollouts):
        sentence = (
            f"{hook} sends several requests with the same turn number, so equal seeds give equal texts; increase `turn`"
        )
        findings.note("hooks.one_seed", hook, sentence)
    rewards = [trajectory.reward for trajectory in trajectories]
    if config.reward.configured and len(rollouts) > 1 and len(set(rewards)) == 1:
        sentence = f"the reward is {rewards[0]:g} for every response of the engine"
        findings.note("hooks.constant_reward", "reward", sentence)
    _keep(hooks, Group(id="0", prompt=prompt, trajectories=trajectories), findings)


def _failures(rollouts: list[TrialRollout], findings: HookFindings) -> None:
    """Adds to `findings` one entry for each reason why rollouts failed: a problem, or a note if frozen models were
    called."""
    by_reason: dict[str, list[TrialRollout]] = {}
    for rollout in rollouts:
        if rollout.outcome.reason is not None:
            by_reason.setdefault(rollout.outcome.reason, []).append(rollout)
    for reason, failed in by_reason.items():
        first = failed[0]
        count = ""
        if len(failed) > 1:
            count = f" ({len(failed)} of {len(rollouts)} rollouts)"
        sentence = f"{reason} if the engine returns {first.says}{count}: {' '.join(str(first.outcome.detail).split())}"
        if first.frozen:
            sentence += f" (frozen models were called too and returned {VERDICT!r}, which may be the reason)"
            findings.note("hooks.failed", reason, sentence)
        else:
            findings.problem("hooks.failed", reason, sentence)


def _limits(config: Config, spec: ModelSpec, trajectories: list[Trajectory], findings: HookFindings) -> None:
    """Adds findings about prompts and trajectories that are too long for the run."""
    hook = config.rollout.generate
    limit = config.rollout.max_prompt_tokens
    prompt = max(trajectory.spans[0].stop for trajectory in trajectories)
    if prompt > limit:
        findings.note(
            "hooks.long_prompt",
            hook,
            f"{hook} makes a prompt of {prompt} tokens, but rollout.max_prompt_tokens is {limit}; "
            "shorten the prompt, or raise rollout.max_prompt_tokens",
        )
    try:
        longest = longest_trajectory(config, spec, check_layout(config.trainer, spec))
    except SlimxError:
        return  # an invalid layout is reported by `slimx doctor FILE`, not here
    length = max(len(trajectory.token_ids) for trajectory in trajectories)
    if length > longest:
        remedy = "raise trainer.max_tokens_per_microbatch or return several trajectories"
        if longest == spec.gpt["max_sequence_length"]:
            remedy = f"{spec.path} has no more positions; return several trajectories"
        findings.problem(
            "hooks.long_trajectory",
            hook,
            f"rollout.generate: {hook} makes a trajectory of {length} tokens, more than the {longest} that can be "
            f"trained; {remedy}",
        )


def _keep(hooks: Hooks, group: Group, findings: HookFindings) -> None:
    if hooks.keep is None:
        return
    try:
        verdict = hooks.keep(group)
        if isinstance(verdict, Coroutine):
            verdict = asyncio.run(verdict)
    except Exception as error:
        sentence = f"rollout.filter, called with these rollouts as a group, raised {raised(error)}"
        findings.problem("hooks.filter_raised", "rollout.filter", sentence)
        return
    if not isinstance(verdict, bool | str | np.bool_):
        sentence = f"rollout.filter returned a value of type {type(verdict).__name__}; return True, False or a reason"
        findings.problem("hooks.filter_verdict", "rollout.filter", sentence)
        return
    result = "kept" if verdict else "dropped"
    if isinstance(verdict, str):
        result = f"dropped: {verdict}"
    findings.lines.append(f"  these as one group: {result}")


def _table(rollouts: list[TrialRollout]) -> list[str]:
    rows = [("engine says", "trajectory", "tokens", "trained", "spans", "requests", "status", "reward", "seconds")]
    for rollout in rollouts:
        of_rollout = (rollout.says, str(rollout.requests), f"{rollout.seconds:.2f}")
        for trajectory in _trajectories(rollout):
            says, requests, seconds = of_rollout
            of_rollout = ("", "", "")  # only in the first row of the rollout
            spans = " ".join(f"{span.source[0]}{span.stop - span.start}" for span in trajectory.spans)
            if len(spans) >= 28:
                spans = spans[:25] + "..."
            rows.append(
                (
                    says,
                    trajectory.id,
                    str(len(trajectory.token_ids)),
                    str(int(trajectory.loss_mask.sum())),
                    spans,
                    requests,
                    trajectory.status,
                    "-" if trajectory.reward is None else f"{trajectory.reward:g}",
                    seconds,
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return [*lines, "  spans: p prompt, s sampled, i inserted, with their tokens", *_logged(rollouts)]


def _trajectories(rollout: TrialRollout) -> list[Trajectory]:
    if rollout.outcome.group is None:
        return []
    return rollout.outcome.group.trajectories


def _logged(rollouts: list[TrialRollout]) -> list[str]:
    """Returns one line per metric that hooks logged, with the metric's value in every rollout."""
    metrics: list[dict[str, float]] = []
    for rollout in rollouts:
        for trajectory in _trajectories(rollout):
            metrics.append(trajectory.metrics)
    lines = []
    for name in sorted(set().union(*metrics)):
        values = []
        for logged in metrics:
            value = f"{logged[name]:g}" if name in logged else "-"
            values.append(value)
        lines.append(f"  logged hook/{name}: {' '.join(values)}")
    return lines
