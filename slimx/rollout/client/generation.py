"""Generation through the router: token ids in, token ids out with log-probs, weight versions and experts.

Token ids are those that the server sampled; they are never made again from text. An id outside the vocabulary, which
would end SGLang's scheduler and with it every other request, is refused here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

from slimx.config.sections.rollout import MAX_SUPPORT
from slimx.data.whole import as_ids
from slimx.engines.outage import Outage
from slimx.engines.server.keys import bearer
from slimx.engines.server.wire import message_of
from slimx.errors import SlimxError
from slimx.rollout.client.completion import Completion, ModelShape, Scores
from slimx.rollout.client.reader import Reader
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.sending import Resending, Sender, input_logprobs
from slimx.rollout.client.stream import TokenStream


async def _nothing() -> None: ...


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
        outage: Outage | None = None,
        api_key: str | None = None,
        adapters: str | None = None,
    ) -> None:
        """`url`: the router's, or a server's; it asks for `api_key`. `deadline_s`: seconds for one request, waiting in
        queues included.

        A request that is lost with its engine is sent again `retries` times, one that finds no engine for `retry_s`
        seconds. `on_lost` is awaited before it is: it should take the lost engine out of the router. While `outage`
        lasts, requests wait, and no deadline runs. `adapters`: the policy whose adapters requests name, at servers that
        compute with those of several.
        """
        self.url, self.shape, self.deadline_s = url.rstrip("/"), shape, deadline_s
        self.on_lost, self.outage = on_lost, outage or Outage()
        self._rule = Resending(retries, retry_s, self._lost, self.outage)
        self.headers = bearer(api_key)
        self.retried = 0
        """Requests that were sent again because an engine was lost, so far."""
        self.adapters = adapters
        self._reader = Reader(self.url, shape, adapters)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GenerationClient:
        # No limit of connections: the caller bounds the requests in flight, and a hidden queue here would eat their
        # deadline.
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self.headers)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample a continuation of the request's tokens.

        Under top-p alone at most `MAX_SUPPORT` candidates are sampled from: what the engine kept comes back as
        `support`, and must be bounded.
        """
        start = time.monotonic()
        meta = await self._post(self._request_body(request), request.affinity)
        return await self._reader.completion(meta, request, time.monotonic() - start)

    def stream(self, request: GenerationRequest) -> TokenStream:
        """Sample as `generate` does, with tokens that can be read while they are sampled."""
        score = partial(self.score, routed_experts=True)
        sender = self._sender(request.affinity)
        return TokenStream(request, sender, self._reader, self._request_body, self.deadline_s, score)

    async def score(self, token_ids: Sequence[int], routed_experts: bool = False) -> Scores:
        """Log-probs of `token_ids` [L] themselves; nothing is sampled. A dense model has no routes to return."""
        routed = routed_experts and self.shape.experts > 0
        fields = {"return_routed_experts": True} if routed else {}
        body = self._body(token_ids, {"max_new_tokens": 0, "temperature": 1.0}, fields)
        meta = await self._post(body | {"logprob_start_len": 0}, None)
        return Scores(
            logprobs=np.array(input_logprobs(meta, token_ids, self.url), np.float32),
            version=self._reader.version(meta["weight_version"]),
            routed_experts=await self._reader.experts(meta, len(token_ids) - 1) if routed else None,
        )

    def _request_body(self, request: GenerationRequest) -> dict[str, Any]:
        """The body of a request that samples."""
        parameters, fields = {**request.sampling, "sampling_seed": request.seed}, {}
        if request.restricted:
            # SGLang's own log-probs are over the whole vocabulary, whatever top-k and top-p cut away.
            fields["return_sampling_mask"] = True
            if parameters.get("top_k", -1) < 1:
                parameters["top_k"] = min(MAX_SUPPORT, self.shape.vocab_size)
        if self._reader.routed(request):
            fields["return_routed_experts"] = True
        return self._body(request.token_ids, parameters, fields)

    def _body(self, token_ids: Sequence[int], parameters: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """`fields`: of the request, which the router would drop."""
        if self.adapters is not None:
            fields = {"lora_id": self.adapters, **fields}
        ids = as_ids(token_ids)
        if not ids or min(ids) < 0 or max(ids) >= self.shape.vocab_size:
            wrong = next((token for token in ids if not 0 <= token < self.shape.vocab_size), None)
            what = "a prompt without tokens" if wrong is None else f"token id {wrong}"
            raise SlimxError(
                f"{what} cannot be generated from; ids are 0 to {self.shape.vocab_size - 1}: check the tokenizer",
                code="request.token_ids",
                about=what,
            )
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True, "stream": False}
        # As a label, because the router drops the fields themselves; the slimx plugin in the server sets them again.
        return body | ({"custom_labels": {"slimx": json.dumps(fields)}} if fields else {})

    async def _post(self, body: dict[str, Any], key: str | None) -> dict[str, Any]:
        """The `meta_info` of one /generate request. It may be sent several times: the seed gives the same tokens."""
        answer = await self._sender(key).answer(body, self.deadline_s)
        if "meta_info" not in answer:
            raise SlimxError(f"POST {self.url}/generate answered 200: {message_of(answer)}")
        return answer["meta_info"]

    def _sender(self, key: str | None) -> Sender:
        if self._session is None:
            raise SlimxError("the generation client is closed; use it inside `async with`")
        return Sender(self._session, f"{self.url}/generate", key, self._rule, self.outage.time)

    async def _lost(self) -> None:
        self.retried += 1
        await self.on_lost()
