"""Parses SGLang's responses to /generate into completions: tokens, log-probs, versions, candidates and experts.

The slimx plugin of a server answers with packed columns (slimx/adapters/sglang/answers.py); servers without it, and
streams, with lists in JSON.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from slimx.data.sampling_support import Support
from slimx.engines.server.http_calls import version_in
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rollout.client.completion import Completion, ModelShape, VersionSpan
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.sending import as_logprobs
from slimx.runtime.tasks import in_thread

Meta = Json
"""Object `meta_info` in a /generate response."""
PORTION = 2**20
"""Number of base64 characters decoded at once. It is a multiple of 16, because 16 characters encode three int32 expert
ids."""
INT32 = np.dtype(np.int32)


class Reader:
    """Parser for the `meta_info` in responses from one model's engines."""

    def __init__(self, url: str, shape: ModelShape, adapters: str | None = None) -> None:
        """Stores the model's sizes.

        `url`: URL of the server, for error messages. `adapters`: name of the policy whose weight version is read, for
        servers that have the adapters of several policies.
        """
        self.url = url
        self.shape = shape
        self.adapters = adapters
        self.dtype = np.dtype(np.uint8 if shape.experts <= 256 else np.uint16)
        """Type of expert ids."""

    async def completion(self, meta: Meta, request: GenerationRequest, seconds: float) -> Completion:
        """Returns the complete response to `request` as a completion.

        `seconds`: wall time of the request. Raises SlimxError if the response lacks anything that was requested, such
        as routed experts.
        """
        routed = self.routed(request)
        reason = (meta["finish_reason"] or {"type": "abort"})["type"]
        aborted = reason == "abort"
        count = len(meta.get("token_ids", b"")) // INT32.itemsize or len(meta.get("output_token_logprobs") or [])
        if aborted and routed and not meta.get("routed_experts"):
            # A request that is aborted in the queue, even after it ran and was retracted, returns no routed experts.
            count = 0
        routes = None
        if routed and (count or not aborted):
            routes = await self.experts(meta, len(request.token_ids) + count - 1)
        return replace(self._tokens(meta, request, 0, count, reason, seconds), routed_experts=routes)

    def piece(self, meta: Meta, request: GenerationRequest, start: int, seconds: float) -> Completion:
        """Returns the tokens of a streamed response from position `start` on, without routed experts.

        The lists in `meta` contain all tokens so far, or only the new ones if the server runs with
        --incremental-streaming-output. `seconds`: time since the previous piece.
        """
        reason = (meta["finish_reason"] or {"type": ""})["type"]
        return self._tokens(meta, request, start, meta["completion_tokens"], reason, seconds)

    def routed(self, request: GenerationRequest) -> bool:
        """Returns True if the response to `request` contains routed experts: they were requested, and the model is an
        MoE."""
        return request.routed_experts and self.shape.experts > 0

    async def experts(self, meta: Meta, rows: int) -> np.ndarray:
        """Returns the expert ids of `rows` input positions, uint8 or uint16 [rows, layers, k].

        Decodes base64 in a thread, because the response may contain tens of megabytes of ids.
        """
        shape = (rows, self.shape.layers, self.shape.top_k)
        answer = meta.get("routed_experts") or b""
        if isinstance(answer, bytes):
            ids = np.frombuffer(answer, self.dtype)
        else:
            ids = await in_thread(_decoded, answer, self.dtype if "packed" in meta else INT32, self.dtype)
        if ids.size != np.prod(shape):
            raise SlimxError(
                f"{self.url} returned {ids.size} expert ids, which do not fill the shape {shape} (tokens, layers, "
                "experts per token); start the engine with routed_experts and the slimx plugin",
                code="answer.experts",
                about=self.url,
            )
        return ids.reshape(shape)

    def version(self, version: str) -> int:
        """Parses the weight version that a server reported for its tokens."""
        try:
            return int(version_in(version, self.adapters))
        except ValueError:
            raise SlimxError(
                f"{self.url} reports weight version {version!r}, which is not a number, because no weights were "
                "published to this engine; publish weights before sampling",
                code="answer.version",
                about=self.url,
            ) from None

    def _tokens(
        self, meta: Meta, request: GenerationRequest, start: int, stop: int, reason: str, seconds: float
    ) -> Completion:
        """Returns the sampled tokens at positions `start` to `stop` of a response, without routed experts.

        `reason`: finish reason. `seconds`: wall time to store in the completion.
        """
        count = stop - start
        ids, logprobs, candidates = _sampled(meta, count)
        if len(ids) != count or len(logprobs) != count:
            raise SlimxError(
                f"{self.url} returned {len(logprobs)} log-probs for {count} sampled tokens; start the engine "
                "with SGLang 0.5.23",
                code="answer.logprobs",
                about=self.url,
            )
        support = None
        if request.restricted:
            support = candidates
            if len(support) != count:
                raise SlimxError(
                    f"{self.url} returned top-k and top-p candidates for only {len(support)} of {count} sampled "
                    "tokens; start the engine with the slimx plugin",
                    code="answer.support",
                    about=self.url,
                )
        return Completion(
            token_ids=ids,
            logprobs=as_logprobs(logprobs, self.url),
            versions=self._versions(meta, start, stop) if count else [],
            finish_reason=reason,
            routed_experts=None,
            cached_tokens=meta.get("cached_tokens", 0),
            seconds=seconds,
            temperature=request.temperature,
            support=support,
            policy=request.policy,
        )

    def _versions(self, meta: Meta, start: int, stop: int) -> list[VersionSpan]:
        """Returns the version ranges of the tokens at `start` to `stop`, with positions relative to `start`."""
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": stop}]
        versions: list[VersionSpan] = []
        for span in spans:
            begin = max(span["start"], start) - start
            end = min(span["end"], stop) - start
            if end <= begin:
                continue
            version = self.version(span["version"])
            if versions and versions[-1][2] == version:  # only another policy's adapters changed
                begin = versions.pop()[0]
            versions.append((begin, end, version))
        return versions


def _decoded(text: str, source: np.dtype, dtype: np.dtype) -> np.ndarray:
    """Decodes base64-encoded expert ids of type `source` into an array [n] of `dtype`, perhaps a smaller type."""
    ids = np.empty(len(text) * 3 // (4 * source.itemsize), dtype)
    count = 0
    for start in range(0, len(text), PORTION):  # in portions, because each call holds the GIL
        part = np.frombuffer(binascii.a2b_base64(text[start : start + PORTION]), source)
        ids[count : count + len(part)] = part
        count += len(part)
    return ids[:count]


def _sampled(meta: Meta, count: int) -> tuple[np.ndarray, Sequence[float | None] | np.ndarray, Support]:
    """Returns ids, log-probs and candidates of the last `count` sampled tokens.

    The candidates are those that top-k and top-p kept, among which the log-probs then are. Without top-k and top-p,
    there are no candidates, for no token.
    """
    if "token_ids" in meta:
        ids, kept, counts = (
            np.frombuffer(meta.get(name, b""), np.int32) for name in ("token_ids", "support_ids", "support_counts")
        )
        counts = counts[:count]
        logprobs = np.frombuffer(meta["logprobs"], np.float32)
        return ids[:count], logprobs[:count], Support(ids=kept[: counts.sum()], counts=counts)
    sampled = _last(meta, "output_token_logprobs", count)
    rows = _last(meta, "output_token_sampling_mask", count)
    values = [entry[0] for entry in sampled]
    if rows:
        values = _last(meta, "output_token_sampling_logprobs", count)
    ids = np.array([entry[1] for entry in sampled], np.int32)
    kept = np.array(list(chain.from_iterable(rows)), np.int32)
    return ids, values, Support(ids=kept, counts=np.array([len(row) for row in rows], np.int32))


def _last(meta: Meta, name: str, count: int) -> list:
    """Returns the last `count` entries of the list `name` in `meta`, which has one entry per sampled token."""
    if not count:
        return []
    return (meta.get(name) or [])[-count:]
