"""Generation through the router: token ids in, token ids out with log-probs, weight versions and experts.

Token ids are those that the server sampled; they are never made again from text. What would end SGLang's scheduler (an
id outside the vocabulary, min_p with a seed) is refused here, before it takes every other request down with it.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

from slimx.config.rollout import MAX_SUPPORT
from slimx.data.support import Support
from slimx.errors import SlimxError
from slimx.models.families import ModelSpec
from slimx.rollout.control import message_of, parse_body
from slimx.rollout.requests import input_logprobs, send

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "stop_token_ids", "stop", "ignore_eos"}
)
"""Sampling parameters that SGLang's seeded mode carries out; others are refused."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the client must know of the model to check requests and read answers."""

    vocab_size: int
    layers: int = 0
    """All layers, dense ones too: SGLang returns a row of experts for each."""
    top_k: int = 0
    """Experts per token; 0 for a dense model."""
    experts: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Of a model of any family."""
        fields = spec.transformer
        return cls(spec.vocab_size, fields["num_layers"], fields.get("moe_router_topk") or 0, spec.experts)


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request brought."""

    token_ids: np.ndarray
    """int32 [n]: the sampled tokens, with the end token if one was sampled."""
    logprobs: np.ndarray
    """float32 [n]: under softmax(logits / temperature) over the tokens of `support`; greedy counts as temperature 1."""
    versions: list[tuple[int, int, int]]
    """(start, stop, version): runs of tokens sampled by one weight version, covering [0, n)."""
    finish_reason: str
    """"stop", "length" or "abort" (an aborted request returns what it has)."""
    routed_experts: np.ndarray | None
    """uint8 (uint16 above 256 experts) [prompt + n - 1, layers, k]: logical expert ids; None if not asked for."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    seconds: float
    """Wall time of the request."""
    temperature: float = 1.0
    """At which it was sampled, and which `logprobs` are of."""
    support: Support | None = None
    """n positions: the tokens that top-k and top-p kept; None where neither was asked for."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of given tokens under an engine's current weights."""

    logprobs: np.ndarray
    """float32 [L - 1]: log softmax(logits) of tokens 1..L-1. SGLang scores inputs at temperature 1, always."""
    version: int
    routed_experts: np.ndarray | None
    """As in `Completion`, [L - 1, layers, k]."""


async def _nothing() -> None: ...


def _restricts(sampling: dict[str, Any]) -> bool:
    """Whether top-k or top-p cut candidates away. A greedy request has none to cut: its log-probs are those of the
    whole vocabulary at temperature 1."""
    cuts = sampling.get("top_k", -1) > 0 or sampling.get("top_p", 1.0) < 1.0
    return cuts and sampling.get("temperature", 1.0) > 0


class GenerationClient:
    """Requests over one HTTP session; `async with` opens and closes it."""

    def __init__(
        self,
        url: str,
        shape: ModelShape,
        deadline_s: float = 600.0,
        retry_s: float = 30.0,
        retries: int = 2,
        on_lost: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """`url`: the router's, or a server's. `deadline_s`: seconds for one request, waiting in queues included.

        A request that is lost with its engine is sent again `retries` times, one that finds no engine for `retry_s`
        seconds. `on_lost` is awaited before it is: it should take the lost engine out of the router.
        """
        self.url, self.shape, self.deadline_s, self.retry_s = url.rstrip("/"), shape, deadline_s, retry_s
        self.retries, self.on_lost = retries, on_lost
        self.retried = 0
        """Requests that were sent again because an engine was lost, so far."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GenerationClient:
        # No limit of connections: the caller bounds the rollouts in flight, and a hidden queue here would eat their
        # deadline.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, return_routed_experts: bool = False
    ) -> Completion:
        """Sample a continuation of `token_ids` [prompt]. The same seed and weights give the same tokens.

        `sampling`: temperature, top_p, top_k, max_new_tokens, stop_token_ids, ... (`SAMPLING`). Under top-p alone
        at most `MAX_SUPPORT` candidates are sampled from: what the engine kept comes back as `support`, and must be
        bounded.
        """
        if unknown := sorted(sampling.keys() - SAMPLING):
            why = (
                "min_p cannot be combined with a seed"
                if unknown[0] == "min_p"
                else f"known are {', '.join(sorted(SAMPLING))}"
            )
            raise SlimxError(f"sampling parameter {unknown[0]} is not supported by the engines; {why}")
        start = time.monotonic()
        parameters, fields = {**sampling, "sampling_seed": seed}, {}
        restricted = _restricts(sampling)
        if restricted:
            # SGLang's own log-probs are over the whole vocabulary, whatever top-k and top-p cut away.
            fields["return_sampling_mask"] = True
            if parameters.get("top_k", -1) < 1:
                parameters["top_k"] = min(MAX_SUPPORT, self.shape.vocab_size)
        return_routed_experts = return_routed_experts and self.shape.experts > 0
        if return_routed_experts:
            fields["return_routed_experts"] = True
        meta = await self._post(self._body(token_ids, parameters, fields))
        sampled = meta["output_token_logprobs"]
        count = len(sampled)
        support, logprobs = None, [entry[0] for entry in sampled]
        if restricted:
            support, logprobs = self._support(meta, count)
        return Completion(
            token_ids=np.array([entry[1] for entry in sampled], np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=self._versions(meta, count),
            finish_reason=(meta["finish_reason"] or {"type": "abort"})["type"],
            routed_experts=self._experts(meta, len(token_ids) + count - 1) if return_routed_experts else None,
            cached_tokens=meta["cached_tokens"],
            seconds=time.monotonic() - start,
            temperature=float(sampling.get("temperature", 1.0)),
            support=support,
        )

    async def score(self, token_ids: Sequence[int], return_routed_experts: bool = False) -> Scores:
        """Log-probs of `token_ids` [L] themselves; nothing is sampled. A dense model has no routes to return."""
        return_routed_experts = return_routed_experts and self.shape.experts > 0
        fields = {"return_routed_experts": True} if return_routed_experts else {}
        body = self._body(token_ids, {"max_new_tokens": 0, "temperature": 1.0}, fields)
        meta = await self._post(body | {"logprob_start_len": 0})
        return Scores(
            logprobs=np.array(input_logprobs(meta, token_ids, self.url), np.float32),
            version=self._version(meta["weight_version"]),
            routed_experts=self._experts(meta, len(token_ids) - 1) if return_routed_experts else None,
        )

    def _body(self, token_ids: Sequence[int], parameters: dict[str, Any], fields: dict[str, bool]) -> dict[str, Any]:
        """`fields`: of the request, which the router would drop."""
        ids = [int(token) for token in token_ids]
        if not ids or min(ids) < 0 or max(ids) >= self.shape.vocab_size:
            wrong = next((token for token in ids if not 0 <= token < self.shape.vocab_size), None)
            what = "a prompt without tokens" if wrong is None else f"token id {wrong}"
            raise SlimxError(
                f"{what} cannot be generated from; ids are 0 to {self.shape.vocab_size - 1}: check the tokenizer"
            )
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True, "stream": False}
        # As a label, because the router drops the fields themselves; the slimx plugin in the server sets them again.
        return body | ({"custom_labels": {"slimx": json.dumps(fields)}} if fields else {})

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The `meta_info` of one /generate request. It may be sent several times: the seed gives the same tokens."""
        url = f"{self.url}/generate"
        answer = await send(
            lambda: self._send(url, body),
            url,
            deadline_s=self.deadline_s,
            retry_s=self.retry_s,
            retries=self.retries,
            on_lost=self._lost,
        )
        if "meta_info" not in answer:
            raise SlimxError(f"POST {url} answered 200: {message_of(answer)}")
        return answer["meta_info"]

    async def _lost(self) -> None:
        self.retried += 1
        await self.on_lost()

    async def _send(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of one attempt; status 0 if the connection failed."""
        if self._session is None:
            raise SlimxError("the generation client is closed; use it inside `async with`")
        try:
            async with self._session.post(url, json=body) as response:
                return response.status, parse_body(await response.text())
        except aiohttp.ClientError as error:
            return 0, {"text": f"{type(error).__name__}: {error}"}

    def _support(self, meta: dict[str, Any], count: int) -> tuple[Support, list[float]]:
        """What top-k and top-p kept at each of `count` sampled tokens, and each token's log-prob among these."""
        kept = meta.get("output_token_sampling_mask") or []
        logprobs = meta.get("output_token_sampling_logprobs") or []
        if len(kept) != count or len(logprobs) != count:
            raise SlimxError(
                f"{self.url} returned the tokens kept by top-k and top-p for {len(kept)} of {count} sampled tokens; "
                "start the engine with the slimx plugin"
            )
        ids = np.array([token for row in kept for token in row], np.int32)
        return Support(ids=ids, counts=np.array([len(row) for row in kept], np.int32)), logprobs

    def _versions(self, meta: dict[str, Any], count: int) -> list[tuple[int, int, int]]:
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
        return [
            (span["start"], span["end"], self._version(span["version"]))
            for span in spans
            if span["end"] > span["start"]
        ]

    def _version(self, version: str) -> int:
        try:
            return int(version)
        except ValueError:
            raise SlimxError(
                f"{self.url} sampled with weights of version {version!r}: nothing was ever published to that server; "
                "publish first"
            ) from None

    def _experts(self, meta: dict[str, Any], rows: int) -> np.ndarray:
        shape = (rows, self.shape.layers, self.shape.top_k)
        wire = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
        if wire.size != np.prod(shape):
            raise SlimxError(
                f"{self.url} returned {wire.size} expert ids where {shape} (tokens, layers, experts per token) were "
                "asked for; start the engine with routed_experts and the slimx plugin"
            )
        return wire.reshape(shape).astype(np.uint8 if self.shape.experts <= 256 else np.uint16)
