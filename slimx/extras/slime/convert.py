"""Between slime's Sample and slimx's Trajectory.

What a sample says of its tokens is believed only where an engine said it too: a trained token is one that a request of
this rollout sampled, after exactly the tokens that stand before it. Its log-prob, weight versions, experts and support
are the engine's own record. A hook that asks the engines by other means than `post` has made no such request; then its
sample's `rollout_log_probs` must be complete, and `weight_versions` where weights change while rollouts run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slimx.data.records import Prompt, Trajectory
from slimx.data.saved.codec import encode
from slimx.data.whole import Json, as_ids
from slimx.errors import SlimxError
from slimx.extras.slime.arguments import RunFacts
from slimx.extras.slime.sample import OWN, Sample, Status
from slimx.extras.slime.scene import Call
from slimx.rollout.client.completion import Completion

KEY = "slime"
"""Key of a trajectory's metadata for what a reward must find again on the sample, and a trajectory has no place for."""
KEPT = ("prompt", "response", "label", "reward", "rollout_id", "train_metadata", "session_id", "non_generation_time")
"""Fields of a sample that are kept there."""
UNSERVED = {
    "multimodal_inputs": "images are not served",
    "multimodal_train_inputs": "images are not served",
    "teacher_log_probs": "teachers are algorithm.teacher",
    "generate_function_path": "a run has one generate hook, rollout.generate",
    "custom_rm_path": "rewards by dataset are reward.parts",
}
"""Fields that a hook may not set, and why."""
_STATUS = {Status.COMPLETED: "completed", Status.TRUNCATED: "truncated", Status.FAILED: "failed"}


def begin(prompt: Prompt, text: str | list[Json], *, index: int, group: str, run: RunFacts) -> Sample:
    """The sample that a generate hook receives for rollout `index` of a group."""
    group_index, number = run.indices(group, index)
    return Sample(
        group_index=group_index,
        index=number,
        prompt=text,
        label=prompt.metadata.get("label", prompt.answer),
        metadata=dict(prompt.metadata),
        session_id=f"{group}/{index}",
    )


def to_trajectory(
    sample: Sample, ctx: Any, calls: Sequence[Call], *, suffix: str = "", version: int | None = None
) -> Trajectory:
    """The trajectory of a sample that a hook filled. Raises SlimxError naming what cannot be so.

    `version`: of the weights in all engines while the hook ran; None where it may have changed."""
    name = f"the sample of rollout {ctx.group_id}/{ctx.index}{suffix}"
    for field, why in UNSERVED.items():
        if getattr(sample, field):
            raise SlimxError(f"{name} has {field}: {why}", code="slime.field", about=field)
    status = Status(sample.status)  # published hooks also write the plain word
    if status is Status.ABORTED:
        raise SlimxError(f"{name} was aborted", code="slime.aborted", about=name)
    tokens, mask = as_ids(sample.tokens), _mask(sample, name)
    start = len(tokens) - sample.response_length
    draft, position, told = ctx.draft(tokens[:start], suffix=suffix), start, start
    while position < len(tokens):
        found = _sampled_here(tokens, position, calls)
        if found is None and not calls and mask[position]:
            found = _by_its_own_account(sample, position, mask, ctx, name, version)
        if found is None:
            if mask[position]:
                raise SlimxError(
                    f"{name} trains token {position} (id {tokens[position]}), which no request of this rollout sampled "
                    "after the tokens before it; append the ids of output_token_logprobs as they are, never text that "
                    "was tokenised again",
                    code="slime.token",
                    about=f"token {position} of {name}",
                )
            position += 1
            continue
        _check_logprobs(sample, found, position, start, mask, name)
        draft.add_inserted(tokens[told:position])
        draft.add_sampled(found)
        position = told = position + len(found.token_ids)
    trajectory = draft.finish(metadata=_metadata(sample, name))
    trajectory.loss_mask = np.array(mask[: len(trajectory.token_ids)], np.uint8)
    if status is not Status.PENDING:
        trajectory.status = _STATUS[status]
    if status is Status.FAILED:
        trajectory.finish_reason = "the hook gave its sample the status FAILED"
    return trajectory


def to_sample(trajectory: Trajectory, prompt: Prompt, tokenizer: Callable[[], Any], run: RunFacts) -> Sample:
    """The sample that a reward or a filter receives, without inserted tokens after the last sampled one. `tokenizer` is
    asked for only where the sample's text was not kept: a hook of slimx's own generated it."""
    start = trajectory.spans[0].stop
    tokens = trajectory.token_ids.tolist()
    metadata = dict(trajectory.metadata)
    kept = metadata.pop(KEY, None)
    if kept is None:  # the hook that generated it is slimx's own
        text = tokenizer().decode
        kept = {"prompt": text(tokens[:start]), "response": text(tokens[start:])}
        kept |= {"label": prompt.metadata.get("label", prompt.answer), "reward": trajectory.reward}
    logprobs = trajectory.logprobs[start:]
    group_index, index = run.indices(trajectory.group_id, trajectory.index)
    sample = Sample(
        group_index=group_index,
        index=index,
        tokens=tokens,
        response_length=len(tokens) - start,
        loss_mask=trajectory.loss_mask[start:].tolist(),
        rollout_log_probs=np.where(np.isnan(logprobs), 0.0, logprobs).tolist(),
        weight_versions=[str(span.version) for span in trajectory.spans if span.version is not None],
        rollout_routed_experts=trajectory.routed_experts,
        status=Status(trajectory.status),
        metadata=metadata,
        **{key: value for key, value in kept.items() if key != "attributes"},
    )
    vars(sample).update(kept.get("attributes", {}))
    if trajectory.reward is not None:
        sample.reward = trajectory.reward
    return sample


def _mask(sample: Sample, name: str) -> list[int]:
    """[tokens]: 1 where a token is trained."""
    length, start = sample.response_length, len(sample.tokens) - sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if length < 1 or start < 1 or len(mask) != length:
        raise SlimxError(
            f"{name} has {len(sample.tokens)} tokens, response_length {length} and a loss_mask of {len(mask)}; tokens "
            "are those of prompt and response, the mask is of the response alone",
            code="slime.lengths",
            about=name,
        )
    return [0] * start + [int(bool(x) and not sample.remove_sample) for x in mask]


def _sampled_here(tokens: list[int], position: int, calls: Sequence[Call]) -> Any:
    """The longest beginning of an answer that stands at `position` and was sampled after the tokens before it."""
    best, longest = None, 0
    for call in calls:
        if len(call.prompt) != position or call.prompt != tokens[:position]:
            continue
        answer = call.completion.token_ids.tolist()
        rest = tokens[position : position + len(answer)]
        same = next((n for n, (a, b) in enumerate(zip(answer, rest, strict=False)) if a != b), len(rest))
        if same > longest:
            best, longest = call.completion, same
    return None if best is None else _first(best, longest, position)


def _first(completion: Any, count: int, position: int) -> Any:
    """The first `count` tokens of a completion."""
    if count == len(completion.token_ids):
        return completion
    routes, support = completion.routed_experts, completion.support
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        versions=[(a, min(b, count), version) for a, b, version in completion.versions if a < count],
        routed_experts=None if routes is None else routes[: position + count - 1],
        support=None if support is None else support.take(np.arange(count)),
    )


def _by_its_own_account(
    sample: Sample, position: int, mask: list[int], ctx: Any, name: str, version: int | None
) -> Completion:
    """The run of trained tokens at `position`, of a hook that asks the engines by its own means."""
    start = len(sample.tokens) - sample.response_length
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    number = next(n for n, (a, _) in enumerate(edges) if a == position)
    stop = int(edges[number][1])
    versions = sample.weight_versions or ([str(version)] if version is not None else [])
    if sample.rollout_log_probs is None or (len(set(versions)) != 1 and len(versions) != len(edges)):
        raise SlimxError(
            f"{name} has trained tokens, but no request of this rollout went through slime.utils.http_utils.post; a "
            "hook with a client of its own must set rollout_log_probs and, unless schedule.max_staleness is 0, "
            "weight_versions (one for each run of trained tokens)",
            code="slime.unsampled",
            about=name,
        )
    said = versions[number if len(versions) == len(edges) else 0]
    if not said.isdigit():
        raise SlimxError(
            f"{name} was sampled by weights of version {said!r}, which slimx never published",
            code="slime.version",
            about=name,
        )
    routes = sample.rollout_routed_experts
    return Completion(
        token_ids=np.array(sample.tokens[position:stop], np.int32),
        logprobs=np.array(sample.rollout_log_probs[position - start : stop - start], np.float32),
        versions=[(0, stop - position, int(said))],
        finish_reason="stop",
        cached_tokens=0,
        seconds=0.0,
        temperature=ctx.engine.sampling["temperature"],
        routed_experts=None if routes is None else np.asarray(routes)[: stop - 1],
    )


def _check_logprobs(sample: Sample, found: Any, position: int, start: int, mask: list[int], name: str) -> None:
    """The hook's log-probs of trained tokens must be the engine's."""
    given = sample.rollout_log_probs
    if given is None:
        return
    if len(given) != sample.response_length:
        raise SlimxError(
            f"{name} has {len(given)} rollout_log_probs for a response of {sample.response_length} tokens",
            code="slime.lengths",
            about=name,
        )
    for number, said in enumerate(found.logprobs.tolist()):
        at = position + number
        if mask[at] and np.float32(given[at - start]) != np.float32(said):
            raise SlimxError(
                f"{name} gives token {at} the log-prob {given[at - start]:g}, the engine said {said:g}; keep "
                "rollout_log_probs in step with the tokens",
                code="slime.logprobs",
                about=f"token {at} of {name}",
            )


def _metadata(sample: Sample, name: str) -> Json:
    """The trajectory's: the sample's, and under `KEY` what else a reward will look for."""
    own: Mapping[str, Any] = {key: value for key, value in vars(sample).items() if key not in OWN}
    metadata = {**sample.metadata, KEY: {**{key: getattr(sample, key) for key in KEPT}, "attributes": dict(own)}}
    try:
        encode(metadata)
    except SlimxError as error:
        raise SlimxError(
            f"{name} carries, in its metadata or in {', '.join(own) or 'its fields'}, {error}",
            code="slime.metadata",
            about=", ".join(own) or name,
        ) from error
    return metadata
