"""Conversion between slime's Sample and slimx's Trajectory.

The token data in a sample count only if an engine confirms them: each trained token must have been sampled by a request
of this rollout, after exactly the preceding tokens. Its log-prob, weight versions, experts and support are taken from
the engine's response. A hook that does not use `post` has made no request that slimx knows of; its sample must then
have complete `rollout_log_probs`, and `weight_versions` if weights change during rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slimx.data.integers import as_ids
from slimx.data.records import Prompt, Trajectory
from slimx.data.saved.codec import encode
from slimx.errors import SlimxError
from slimx.extras.slime.arguments import RunFacts
from slimx.extras.slime.call import Request
from slimx.extras.slime.sample import FIELDS, Sample, Status
from slimx.json_types import Json
from slimx.rollout.client.completion import Completion

KEY = "slime"
"""Key in a trajectory's metadata for the sample fields that rewards need but a trajectory lacks."""
KEPT = ("prompt", "response", "label", "reward", "rollout_id", "train_metadata", "session_id", "non_generation_time")
"""Names of the sample's fields that are stored under `KEY`."""
UNSERVED = {
    "multimodal_inputs": "slimx does not support images in slime hooks",
    "multimodal_train_inputs": "slimx does not support images in slime hooks",
    "teacher_log_probs": "set a teacher with algorithm.teacher",
    "generate_function_path": "a run has only one generate hook, rollout.generate",
    "custom_rm_path": "set rewards per data set with reward.parts",
}
"""Fields that a hook must not set, each with the reason or the setting to use instead."""
_STATUS = {Status.COMPLETED: "completed", Status.TRUNCATED: "truncated", Status.FAILED: "failed"}


def begin(prompt: Prompt, text: str | list[Json], *, index: int, group: str, run: RunFacts) -> Sample:
    """Returns the sample that a generate hook receives for rollout `index` of group `group`. `text`: the prompt as
    slime passes it to hooks."""
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
    sample: Sample, ctx: Any, requests: Sequence[Request], *, suffix: str = "", version: int | None = None
) -> Trajectory:
    """Converts a sample, which a hook has filled, into a trajectory. Raises SlimxError naming what is invalid in the
    sample.

    `ctx`: RolloutContext. `requests`: requests of the rollout. `suffix`: suffix of the trajectory's id. `version`:
    version of the weights in all engines while the hook ran; None if it may have changed."""
    name = f"the sample of rollout {ctx.group_id}/{ctx.index}{suffix}"
    for field, reason in UNSERVED.items():
        if getattr(sample, field):
            raise SlimxError(
                f"{name} sets {field}, which is not allowed ({reason}); leave {field} unset",
                code="slime.field",
                about=field,
            )
    status = Status(sample.status)  # published hooks also set the status as a string
    if status is Status.ABORTED:
        raise SlimxError(
            f"{name} has the status ABORTED, which slimx does not accept from a hook; return only samples with the "
            "status COMPLETED, TRUNCATED or FAILED",
            code="slime.aborted",
            about=name,
        )
    tokens = as_ids(sample.tokens)
    mask = _mask(sample, name)
    start = len(tokens) - sample.response_length
    draft = ctx.draft(tokens[:start], suffix=suffix)
    position = start
    added = start
    while position < len(tokens):
        completion = _sampled_at(tokens, position, requests)
        if completion is None and not requests and mask[position]:
            completion = _as_claimed(sample, position, mask, ctx, name, version)
        if completion is None:
            if mask[position]:
                raise SlimxError(
                    f"{name} trains token {position} (id {tokens[position]}), but no request of this rollout sampled "
                    "this token after the preceding tokens; append the ids in output_token_logprobs unchanged, and "
                    "do not tokenize a response's text again",
                    code="slime.token",
                    about=f"token {position} of {name}",
                )
            position += 1
            continue
        _check_logprobs(sample, completion, position, start, mask, name)
        draft.add_inserted(tokens[added:position])
        draft.add_sampled(completion)
        position += len(completion.token_ids)
        added = position
    trajectory = draft.finish(metadata=_metadata(sample, name))
    trajectory.loss_mask = np.array(mask[: len(trajectory.token_ids)], np.uint8)
    if status is not Status.PENDING:
        trajectory.status = _STATUS[status]
    if status is Status.FAILED:
        trajectory.finish_reason = "the hook set the sample's status to FAILED"
    return trajectory


def to_sample(trajectory: Trajectory, prompt: Prompt, tokenizer: Callable[[], Any], run: RunFacts) -> Sample:
    """Converts a trajectory to the sample that a reward or a filter receives. Inserted tokens after the last sampled
    one are omitted. `tokenizer` is called only for a trajectory that a slimx hook generated, which does not contain the
    sample's text."""
    start = trajectory.spans[0].stop
    tokens = trajectory.token_ids.tolist()
    metadata = dict(trajectory.metadata)
    stored = metadata.pop(KEY, None)
    if stored is None:
        decode = tokenizer().decode
        stored = {"prompt": decode(tokens[:start]), "response": decode(tokens[start:])}
        stored |= {"label": prompt.metadata.get("label", prompt.answer), "reward": trajectory.reward}
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
        **{key: value for key, value in stored.items() if key != "attributes"},
    )
    vars(sample).update(stored.get("attributes", {}))
    if trajectory.reward is not None:
        sample.reward = trajectory.reward
    return sample


def _mask(sample: Sample, name: str) -> list[int]:
    """Returns the loss mask of all tokens: 1 for trained tokens. `name`: name of the sample in error messages."""
    length = sample.response_length
    start = len(sample.tokens) - length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if length < 1 or start < 1 or len(mask) != length:
        raise SlimxError(
            f"{name} has {len(sample.tokens)} tokens, response_length {length} and a loss_mask of length "
            f"{len(mask)}; return at least one prompt token and one response token, and set one loss_mask entry per "
            "response token",
            code="slime.lengths",
            about=name,
        )
    return [0] * start + [int(bool(x) and not sample.remove_sample) for x in mask]


def _sampled_at(tokens: list[int], position: int, requests: Sequence[Request]) -> Completion | None:
    """Returns the longest prefix of a response that occurs in `tokens` at `position` and was sampled after exactly the
    preceding tokens; None if there is none."""
    best = None
    longest = 0
    for request in requests:
        if len(request.prompt) != position or request.prompt != tokens[:position]:
            continue
        answer = request.completion.token_ids.tolist()
        rest = tokens[position : position + len(answer)]
        same = next((n for n, (a, b) in enumerate(zip(answer, rest, strict=False)) if a != b), len(rest))
        if same > longest:
            best = request.completion
            longest = same
    return None if best is None else _first(best, longest, position)


def _first(completion: Completion, count: int, position: int) -> Completion:
    """Returns the first `count` tokens of a completion that starts at `position` of the sequence."""
    if count == len(completion.token_ids):
        return completion
    routes = completion.routed_experts
    support = completion.support
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        versions=[(a, min(b, count), version) for a, b, version in completion.versions if a < count],
        routed_experts=None if routes is None else routes[: position + count - 1],
        support=None if support is None else support.take(np.arange(count)),
    )


def _as_claimed(sample: Sample, position: int, mask: list[int], ctx: Any, name: str, version: int | None) -> Completion:
    """Returns the consecutive trained tokens from `position` on as a completion, for hooks that do not use slimx's
    client. Log-probs, weight version and routed experts of the completion are those that the sample claims. `mask`:
    loss mask of all tokens; `name`: name of the sample in error messages; `version`: version of the weights in all
    engines while the hook ran; None if it may have changed."""
    start = len(sample.tokens) - sample.response_length
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    index = next(n for n, (first, _) in enumerate(edges) if first == position)
    stop = int(edges[index][1])
    versions = sample.weight_versions or ([str(version)] if version is not None else [])
    if sample.rollout_log_probs is None or (len(set(versions)) != 1 and len(versions) != len(edges)):
        raise SlimxError(
            f"{name} has trained tokens, but no request of this rollout used slime.utils.http_utils.post; send "
            "requests with this function, or set rollout_log_probs in the hook, and also weight_versions (one "
            "version per run of consecutive trained tokens) unless schedule.max_staleness=0",
            code="slime.unsampled",
            about=name,
        )
    claimed = versions[index if len(versions) == len(edges) else 0]
    if not claimed.isdigit():
        raise SlimxError(
            f"{name} has the weight version {claimed!r}, which is not an integer of at least 0; set weight_versions "
            "to the versions that the engines returned",
            code="slime.version",
            about=name,
        )
    routes = sample.rollout_routed_experts
    return Completion(
        token_ids=np.array(sample.tokens[position:stop], np.int32),
        logprobs=np.array(sample.rollout_log_probs[position - start : stop - start], np.float32),
        versions=[(0, stop - position, int(claimed))],
        finish_reason="stop",
        cached_tokens=0,
        seconds=0.0,
        temperature=ctx.engine.sampling["temperature"],
        routed_experts=None if routes is None else np.asarray(routes)[: stop - 1],
    )


def _check_logprobs(
    sample: Sample, completion: Completion, position: int, start: int, mask: list[int], name: str
) -> None:
    """Raises SlimxError if the sample's log-prob for a trained token differs from the engine's. `position`: index of
    the completion's first token; `start`: index of the response's first token; `mask`: loss mask of all tokens; `name`:
    name of the sample in error messages."""
    claimed = sample.rollout_log_probs
    if claimed is None:
        return
    if len(claimed) != sample.response_length:
        raise SlimxError(
            f"{name} has {len(claimed)} rollout_log_probs for a response of {sample.response_length} tokens; set one "
            "log-prob per response token",
            code="slime.lengths",
            about=name,
        )
    for at, logprob in enumerate(completion.logprobs.tolist(), position):
        if mask[at] and np.float32(claimed[at - start]) != np.float32(logprob):
            raise SlimxError(
                f"{name} has the log-prob {claimed[at - start]:g} for token {at}, but the engine returned {logprob:g}; "
                "set rollout_log_probs to the log-probs that the engine returned, in the order of the response tokens",
                code="slime.logprobs",
                about=f"token {at} of {name}",
            )


def _metadata(sample: Sample, name: str) -> Json:
    """Returns the trajectory's metadata: the sample's metadata plus, under `KEY`, the fields that rewards need."""
    attributes = {key: value for key, value in vars(sample).items() if key not in FIELDS}
    stored = {key: getattr(sample, key) for key in KEPT}
    for field, value in {"metadata": sample.metadata, **stored, **attributes}.items():
        try:
            encode(value)
        except SlimxError as error:
            raise SlimxError(
                f"{name} has an invalid value in its field {field} ({error}); store only JSON values and "
                "numeric arrays",
                code="slime.metadata",
                about=", ".join(attributes) or name,
            ) from error
    return {**sample.metadata, KEY: {**stored, "attributes": attributes}}
