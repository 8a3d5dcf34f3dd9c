"""Groups as `slimx rollouts` shows them: plain values for JSON, and lines of text made of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.saved.trained_tokens import TrainedTokens

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""
Json = dict[str, Any]


def group_values(
    group: Group, version: int | None, decode: Decode, trained: Mapping[str, TrainedTokens], *, tokens: bool
) -> Json:
    """{id, prompt: {id, text, answer, dataset}, reward: mean or None, baseline, trajectories}; `version`: that of the
    trainers, from which staleness is counted. `trained`: by trajectory what its training computed. `tokens`: with a
    list of every token."""
    rewards = [each.reward for each in group.trajectories if each.reward is not None]
    return {
        "id": group.id,
        "prompt": prompt_values(group.prompt, decode),
        "reward": _number(float(np.mean(rewards))) if rewards else None,
        "baseline": _number(group.baseline),
        "trajectories": [
            _trajectory_values(each, version, decode, trained.get(each.id), tokens) for each in group.trajectories
        ],
    }


def prompt_values(prompt: Prompt, decode: Decode) -> Json:
    """{id, text, answer, dataset}."""
    if prompt.messages is None:
        text = decode(prompt.token_ids or [])
    else:
        text = "\n".join(f"{turn.get('role')}: {turn.get('content', '')}" for turn in prompt.messages)
    return {"id": prompt.id, "text": text, "answer": prompt.answer, "dataset": prompt.source}


def _trajectory_values(
    trajectory: Trajectory, version: int | None, decode: Decode, trained: TrainedTokens | None, tokens: bool
) -> Json:
    ids, oldest = trajectory.token_ids, trajectory.oldest_version
    counts = {source: 0 for source in ("prompt", "sampled", "inserted")}
    for span in trajectory.spans:
        counts[span.source] += span.stop - span.start
    out: Json = {
        "id": trajectory.id,
        "rollout": trajectory.rollout_id,
        "policy": trajectory.policy,
        "reward": _number(trajectory.reward),
        "reward_parts": {name: _number(value) for name, value in trajectory.reward_parts.items()},
        "metrics": {name: _number(value) for name, value in trajectory.metrics.items()},
        "status": trajectory.status,
        "finish_reason": trajectory.finish_reason,
        "versions": [[s.start, s.stop, s.version] for s in trajectory.spans if s.version is not None],
        "staleness": version - oldest if version is not None and oldest is not None else None,
        "tokens": counts | {"trained": int(trajectory.loss_mask.sum())},
        "parts": [
            {"source": span.source, "turn": span.turn, "text": decode(ids[span.start : span.stop].tolist())}
            for span in trajectory.spans
            if span.source != "prompt"
        ],
    }
    if trained is not None:
        out |= _trained_values(trajectory, trained)
    if tokens:
        out["each_token"] = list(_token_values(trajectory, decode, trained))
    return out


def _trained_values(trajectory: Trajectory, trained: TrainedTokens) -> Json:
    """{advantage: mean of the trained tokens, gap: largest distance of two log-probs, other_experts: tokens}."""
    chosen = trajectory.loss_mask > 0
    if not chosen.any():
        return {"advantage": None, "gap": None, "other_experts": None}
    gaps, experts = np.abs(trained.logprobs - trajectory.logprobs)[chosen], trained.other_experts
    return {
        "advantage": _number(float(trained.advantages[chosen].mean())),
        "gap": _number(float(gaps.max())),
        "other_experts": None if experts is None else int(experts[chosen].sum()),
    }


def _token_values(trajectory: Trajectory, decode: Decode, trained: TrainedTokens | None) -> Iterator[Json]:
    for span in trajectory.spans:
        for position in range(span.start, span.stop):
            token = int(trajectory.token_ids[position])
            yield {
                "position": position,
                "id": token,
                "text": decode([token]),
                "source": span.source,
                "trained": bool(trajectory.loss_mask[position]),
                "logprob": _number(float(trajectory.logprobs[position])),
                "version": span.version,
            } | ({} if trained is None else _trained_token(trained, position))


def _trained_token(trained: TrainedTokens, position: int) -> Json:
    experts = trained.other_experts
    return {
        "trainer_logprob": _number(float(trained.logprobs[position])),
        "advantage": _number(float(trained.advantages[position])),
        "other_experts": None if experts is None else bool(experts[position]),
    }


def group_lines(group: Json) -> Iterator[str]:
    """A group of `group_values`."""
    baseline = "" if group["baseline"] is None else f", baseline {group['baseline']:.3f}"
    count = len(group["trajectories"])
    yield (
        f"group {group['id']}, {prompt_line(group['prompt'])}, {count} trajectories, reward {_shown(group['reward'])}"
        + (baseline)
    )
    yield from _indented(group["prompt"]["text"], "    ? ")
    for each in group["trajectories"]:
        yield from _trajectory_lines(each)


def prompt_line(prompt: Json) -> str:
    """A prompt of `prompt_values` in a few words."""
    return f"prompt {prompt['id']}" + (f" (answer {prompt['answer']!r})" if prompt["answer"] is not None else "")


def _trajectory_lines(each: Json) -> Iterator[str]:
    parts, logged = (
        ", ".join(f"{name} {_shown(value)}" for name, value in each[key].items()) for key in ("reward_parts", "metrics")
    )
    versions = "+".join(dict.fromkeys(str(version) for _, _, version in each["versions"])) or "none"
    behind = f", {each['staleness']} behind" if each["staleness"] is not None else ""
    counts, parts = each["tokens"], f" ({parts})" if parts else ""
    policy = "" if each["policy"] == ACTOR else f" of the policy {each['policy']}"
    inserted = f", {counts['inserted']} inserted" if counts["inserted"] else ""
    yield (
        f"  {each['id']}{policy}  reward {_shown(each['reward'])}{parts}; {each['status']}"
        f" ({each['finish_reason']}); version {versions}{behind}; tokens: {counts['prompt']} of the prompt, "
        f"{counts['sampled']} sampled{inserted}, {counts['trained']} trained{_trained_words(each)}"
        + (f"; {logged}" if logged else "")
    )
    for part in each["parts"]:
        yield from _indented(part["text"], "    > " if part["source"] == "sampled" else "    | ")
    if "each_token" in each:
        yield "    position        id  source    trained   logprob   trainer advantage experts  version  text"
        yield from map(_token_line, each["each_token"])


def _trained_words(each: Json) -> str:
    """Words about what the trainers computed of a trajectory; none before it is trained."""
    if each.get("gap") is None:
        return ""
    experts = f", {each['other_experts']} by other experts" if each["other_experts"] else ""
    return f" with advantage {_shown(each['advantage'])}{experts}, largest log-prob gap {each['gap']:.1e}"


def _token_line(token: Json) -> str:
    logprob, trainer, advantage = (
        "-" if token.get(name) is None else f"{token[name]:.4f}" for name in ("logprob", "trainer_logprob", "advantage")
    )
    version = "-" if token["version"] is None else token["version"]
    trained = "yes" if token["trained"] else "no"
    experts = {None: "-", True: "other", False: "same"}[token.get("other_experts")]
    return (
        f"    {token['position']:>8}{token['id']:>10}  {token['source']:<10}{trained:<7}{logprob:>10}{trainer:>10}"
        f"{advantage:>10}{experts:>8}{version:>9}  {token['text']!r}"
    )


def _indented(text: str, mark: str) -> Iterable[str]:
    return (mark + line for line in text.splitlines() or [""])


def _number(value: float | None) -> float | None:
    """JSON has no word for what is not a number."""
    return None if value is None or math.isnan(value) else value


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
