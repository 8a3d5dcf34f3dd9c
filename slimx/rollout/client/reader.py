"""Reads SGLang's answers to /generate: tokens, log-probs, versions, kept candidates, experts."""

from __future__ import annotations

import binascii
from dataclasses import replace
from typing import Any

import numpy as np

from slimx.data.support import Support
from slimx.engines.server.wire import stamped
from slimx.errors import SlimxError
from slimx.rollout.client.completion import Completion, ModelShape, VersionSpan
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.sending import as_logprobs
from slimx.runtime.tasks import in_thread

Meta = dict[str, Any]
"""`meta_info` of an answer."""
PORTION = 2**20
"""Characters of base64 that are decoded at once: a multiple of 16, of which 12 bytes come, three expert ids."""


class Reader:
    """Reads the `meta_info` of answers of a model of `shape`; `url` names the server in errors. `adapters`: the policy
    whose version is read where servers have several."""

    def __init__(self, url: str, shape: ModelShape, adapters: str | None = None) -> None:
        self.url, self.shape, self.adapters = url, shape, adapters

    async def completion(self, meta: Meta, request: GenerationRequest, seconds: float) -> Completion:
        """The whole answer to `request`. Raises SlimxError where something that was asked for is missing."""
        routed, aborted = self.routed(request), not meta["finish_reason"] or meta["finish_reason"]["type"] == "abort"
        count = len(meta.get("output_token_logprobs") or [])
        if aborted and routed and not meta.get("routed_experts"):
            # Aborted while it waited in the engine's queue, perhaps not for the first time: its routes are forgotten.
            count = 0
        reason = "abort" if aborted else meta["finish_reason"]["type"]
        routes = None
        if routed and (count or not aborted):
            routes = await self.experts(meta, len(request.token_ids) + count - 1)
        return replace(self._tokens(meta, request, 0, count, reason, seconds), routed_experts=routes)

    def piece(self, meta: Meta, request: GenerationRequest, start: int, seconds: float) -> Completion:
        """The tokens from `start` on of an answer that is being streamed, without their experts.

        The lists of `meta` may hold all tokens so far, or the new ones alone (--incremental-streaming-output)."""
        reason = (meta["finish_reason"] or {"type": ""})["type"]
        return self._tokens(meta, request, start, meta["completion_tokens"], reason, seconds)

    def routed(self, request: GenerationRequest) -> bool:
        """True if the answer to `request` holds experts: it asks for them, and the model has some."""
        return request.routed_experts and self.shape.experts > 0

    async def experts(self, meta: Meta, rows: int) -> np.ndarray:
        """The experts of `rows` tokens, uint8 or uint16 [rows, layers, k]. Other work goes on meanwhile: there are tens
        of megabytes of them."""
        shape = (rows, self.shape.layers, self.shape.top_k)
        dtype = np.dtype(np.uint8 if self.shape.experts <= 256 else np.uint16)
        ids = await in_thread(_decoded, meta.get("routed_experts") or "", dtype)
        if ids.size != np.prod(shape):
            raise SlimxError(
                f"{self.url} returned {ids.size} expert ids where {shape} (tokens, layers, experts per token) were "
                "asked for; start the engine with routed_experts and the slimx plugin",
                code="answer.experts",
                about=self.url,
            )
        return ids.reshape(shape)

    def version(self, version: str) -> int:
        """The number of a weight version, out of what a server is stamped with."""
        try:
            return int(stamped(version, self.adapters))
        except ValueError:
            raise SlimxError(
                f"{self.url} sampled with weights of version {version!r}: nothing was ever published to that server; "
                "publish first",
                code="answer.version",
                about=self.url,
            ) from None

    def _tokens(
        self, meta: Meta, request: GenerationRequest, start: int, stop: int, reason: str, seconds: float
    ) -> Completion:
        """The sampled tokens `start` to `stop` of an answer, without their experts."""
        count = stop - start
        sampled = _last(meta, "output_token_logprobs", count)
        if len(sampled) != count:
            raise SlimxError(
                f"{self.url} streamed {count} tokens, but log-probs of {len(sampled)}",
                code="answer.logprobs",
                about=self.url,
            )
        support, logprobs = None, [entry[0] for entry in sampled]
        if request.restricted:
            support, logprobs = self._support(meta, count)
        return Completion(
            token_ids=np.array([entry[1] for entry in sampled], np.int32),
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

    def _support(self, meta: Meta, count: int) -> tuple[Support, list[float]]:
        """The candidates kept by top-k and top-p at each of the last `count` tokens, and each token's log-prob among
        these."""
        kept = _last(meta, "output_token_sampling_mask", count)
        logprobs = _last(meta, "output_token_sampling_logprobs", count)
        if len(kept) != count or len(logprobs) != count:
            raise SlimxError(
                f"{self.url} returned the tokens kept by top-k and top-p for {len(kept)} of {count} sampled tokens; "
                "start the engine with the slimx plugin",
                code="answer.support",
                about=self.url,
            )
        ids = np.array([token for row in kept for token in row], np.int32)
        return Support(ids=ids, counts=np.array([len(row) for row in kept], np.int32)), logprobs

    def _versions(self, meta: Meta, start: int, stop: int) -> list[VersionSpan]:
        """The versions of the tokens `start` to `stop`, counted from `start`."""
        told = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": stop}]
        out: list[VersionSpan] = []
        for span in told:
            begin, end = max(span["start"], start) - start, min(span["end"], stop) - start
            if end <= begin:
                continue
            version = self.version(span["version"])
            if out and out[-1][2] == version:  # it was another policy's adapters that changed in between
                begin = out.pop()[0]
            out.append((begin, end, version))
        return out


def _decoded(text: str, dtype: np.dtype) -> np.ndarray:
    """The int32 that `text` is the base64 of, as `dtype` [n]."""
    ids = np.empty(len(text) * 3 // 16, dtype)
    count = 0
    for start in range(0, len(text), PORTION):  # a thread that decodes keeps all others from running
        part = np.frombuffer(binascii.a2b_base64(text[start : start + PORTION]), np.int32)
        ids[count : count + len(part)] = part
        count += len(part)
    return ids[:count]


def _last(meta: Meta, name: str, count: int) -> list[Any]:
    """The last `count` entries of a list that has one for each sampled token."""
    return (meta.get(name) or [])[-count:] if count else []
