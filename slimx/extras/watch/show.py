"""Groups as `slimx rollouts` shows them: plain values for JSON, and lines of text that are made from these values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.saved.trained_tokens import TrainedTokens

Decode = Callable[[Sequence[int]], str]
"""Function that decodes token ids to text."""
Decoders = Callable[[str], Decode]
"""Function that returns the `Decode` of a policy, by the policy's name."""
Json = dict[str, Any]


def group_values(
    group: Group, version: int | None, decoders: Decoders, trained: Mapping[str, TrainedTokens], *, tokens: bool
) -> Json:
    """Returns the description of a group: {id, prompt: result of `prompt_values`, reward: mean or None, baseline,
    trajectories}.

    `version`: weight version of the trainers, relative to which staleness is counted. `trained`: values that training
    computed, by trajectory id. `tokens`: True to include a list of every token."""
    rewards: list[float] = []
    trajectories: list[Json] = []
    for trajectory in group.trajectories:
        if trajectory.reward is not None:
            rewards.append(trajectory.reward)
        results = trained.get(trajectory.id)
        decode = decoders(trajectory.policy)
        trajectories.append(_trajectory_values(trajectory, version, decode, results, tokens))
    reward = None
    if rewards:
        reward = _number(float(np.mean(rewards)))
    return {
        "id": group.id,
        "prompt": prompt_values(group.prompt, decoders(ACTOR)),
        "reward": reward,
        "baseline": _number(group.baseline),
        "trajectories": trajectories,
    }


def prompt_values(prompt: Prompt, decode: Decode) -> Json:
    """Returns a prompt as {id, text, answer, dataset, images: list of paths and references, or None for an image of
    another form}."""
    if prompt.messages is None:
        text = decode(prompt.token_ids or [])
    else:
        text = "\n".join(f"{turn.get('role')}: {turn.get('content', '')}" for turn in prompt.messages)
    images = prompt.metadata.get("images")
    names = [_reference(image) for image in images] if isinstance(images, list) else []
    return {"id": prompt.id, "text": text, "answer": prompt.answer, "dataset": prompt.source, "images": names}


def _reference(image: object) -> str | None:
    return image if isinstance(image, str) and not image.startswith("data:") else None


def _trajectory_values(
    trajectory: Trajectory, version: int | None, decode: Decode, trained: TrainedTokens | None, tokens: bool
) -> Json:
    ids = trajectory.token_ids
    oldest = trajectory.oldest_version
    counts = {"prompt": 0, "sampled": 0, "inserted": 0}
    parts: list[Json] = []
    versions: list[list[int]] = []
    for span in trajectory.spans:
        counts[span.source] += span.stop - span.start
        if span.version is not None:
            versions.append([span.start, span.stop, span.version])
        if span.source != "prompt":
            text = decode(ids[span.start : span.stop].tolist())
            parts.append({"source": span.source, "turn": span.turn, "text": text})
    staleness = None
    if version is not None and oldest is not None:
        staleness = version - oldest
    values: Json = {
        "id": trajectory.id,
        "rollout": trajectory.rollout_id,
        "policy": trajectory.policy,
        "reward": _number(trajectory.reward),
        "reward_parts": {name: _number(value) for name, value in trajectory.reward_parts.items()},
        "metrics": {name: _number(value) for name, value in trajectory.metrics.items()},
        "status": trajectory.status,
        "finish_reason": trajectory.finish_reason,
        "versions": versions,
        "staleness": staleness,
        "tokens": counts | {"trained": int(trajectory.loss_mask.sum())},
        "parts": parts,
    }
    if trained is not None:
        values |= _trained_values(trajectory, trained)
    if tokens:
        values["each_token"] = list(_token_values(trajectory, decode, trained))
    return values


def _trained_values(trajectory: Trajectory, trained: TrainedTokens) -> Json:
    """Returns statistics over a trajectory's trained tokens: {advantage: mean, gap: largest difference between the
    log-probs of trainer and engine, other_experts: number of tokens that the trainer routed to other experts}. All are
    None if the trajectory has no trained tokens."""
    chosen = trajectory.loss_mask > 0
    if not chosen.any():
        return {"advantage": None, "gap": None, "other_experts": None}
    gaps = np.abs(trained.logprobs - trajectory.logprobs)[chosen]
    other_experts = None
    if trained.other_experts is not None:
        other_experts = int(trained.other_experts[chosen].sum())
    return {
        "advantage": _number(float(trained.advantages[chosen].mean())),
        "gap": _number(float(gaps.max())),
        "other_experts": other_experts,
    }


def _token_values(trajectory: Trajectory, decode: Decode, trained: TrainedTokens | None) -> Iterator[Json]:
    for span in trajectory.spans:
        for position in range(span.start, span.stop):
            token = int(trajectory.token_ids[position])
            values = {
                "position": position,
                "id": token,
                "text": decode([token]),
                "source": span.source,
                "trained": bool(trajectory.loss_mask[position]),
                "logprob": _number(float(trajectory.logprobs[position])),
                "version": span.version,
            }
            if trained is not None:
                values |= _trained_token(trained, position)
            yield values


def _trained_token(trained: TrainedTokens, position: int) -> Json:
    other_experts = None
    if trained.other_experts is not None:
        other_experts = bool(trained.other_experts[position])
    return {
        "trainer_logprob": _number(float(trained.logprobs[position])),
        "advantage": _number(float(trained.advantages[position])),
        "other_experts": other_experts,
    }


def group_lines(group: Json) -> Iterator[str]:
    """Yields lines of text that describe `group`, a result of `group_values`."""
    line = f"group {group['id']}, {prompt_line(group['prompt'])}, trajectories: {len(group['trajectories'])}, "
    line += f"reward {_shown(group['reward'])}"
    if group["baseline"] is not None:
        line += f", baseline {group['baseline']:.3f}"
    yield line
    yield from _indented(group["prompt"]["text"], "    ? ")
    for image in group["prompt"]["images"]:
        yield f"    image {image or 'in the prompt file'}"
    for trajectory in group["trajectories"]:
        yield from _trajectory_lines(trajectory)


def prompt_line(prompt: Json) -> str:
    """Returns a short description of `prompt`, a result of `prompt_values`."""
    line = f"prompt {prompt['id']}"
    if prompt["answer"] is not None:
        line += f" (answer {prompt['answer']!r})"
    return line


def _trajectory_lines(trajectory: Json) -> Iterator[str]:
    line = f"  {trajectory['id']}"
    if trajectory["policy"] != ACTOR:
        line += f" of the policy {trajectory['policy']}"
    line += f"  reward {_shown(trajectory['reward'])}"
    if trajectory["reward_parts"]:
        line += f" ({_named_values(trajectory['reward_parts'])})"
    versions = "+".join(dict.fromkeys(str(version) for _, _, version in trajectory["versions"])) or "none"
    line += f"; {trajectory['status']} ({trajectory['finish_reason']}); version {versions}"
    if trajectory["staleness"] is not None:
        line += f", staleness {trajectory['staleness']}"
    counts = trajectory["tokens"]
    line += f"; tokens: {counts['prompt']} of the prompt, {counts['sampled']} sampled"
    if counts["inserted"]:
        line += f", {counts['inserted']} inserted"
    line += f", {counts['trained']} trained{_trained_words(trajectory)}"
    if trajectory["metrics"]:
        line += f"; {_named_values(trajectory['metrics'])}"
    yield line
    for part in trajectory["parts"]:
        mark = "    | "
        if part["source"] == "sampled":
            mark = "    > "
        yield from _indented(part["text"], mark)
    if "each_token" in trajectory:
        yield "    position        id  source    trained   logprob   trainer advantage experts  version  text"
        yield from map(_token_line, trajectory["each_token"])


def _named_values(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _trained_words(trajectory: Json) -> str:
    """Describes the values that training computed for a trajectory; "" before it has been trained on."""
    if trajectory.get("gap") is None:
        return ""
    words = f" with advantage {_shown(trajectory['advantage'])}"
    if trajectory["other_experts"]:
        words += f", {trajectory['other_experts']} routed to other experts"
    return f"{words}, largest log-prob gap {trajectory['gap']:.1e}"


def _token_line(token: Json) -> str:
    logprob = _token_number(token["logprob"])
    trainer = _token_number(token.get("trainer_logprob"))
    advantage = _token_number(token.get("advantage"))
    version = "-" if token["version"] is None else token["version"]
    trained = "yes" if token["trained"] else "no"
    experts = {None: "-", True: "other", False: "same"}[token.get("other_experts")]
    return (
        f"    {token['position']:>8}{token['id']:>10}  {token['source']:<10}{trained:<7}{logprob:>10}{trainer:>10}"
        f"{advantage:>10}{experts:>8}{version:>9}  {token['text']!r}"
    )


def _token_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}"


def _indented(text: str, mark: str) -> Iterator[str]:
    for line in text.splitlines() or [""]:
        yield mark + line


def _number(value: float | None) -> float | None:
    """Returns `value`, or None for NaN, which JSON cannot represent."""
    if value is None or math.isnan(value):
        return None
    return value


def _shown(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.3f}"
