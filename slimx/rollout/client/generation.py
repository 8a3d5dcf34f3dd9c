"""Client of the router: sends token ids, and receives sampled token ids with log-probs, weight versions and experts.

Token ids are those that the server sampled; they are never re-encoded from text. The client refuses an id outside the
vocabulary, because it would crash SGLang's scheduler and with it all other requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import aiohttp
import numpy as np

from slimx.config.sections.rollout import MAX_SUPPORT, Rollout
from slimx.data.records import Image
from slimx.engines.outage import Outage
from slimx.engines.server.http_calls import message_of
from slimx.engines.server.keys import bearer
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rollout.client.completion import Completion, ModelShape, Scores
from slimx.rollout.client.reader import Reader
from slimx.rollout.client.request import GenerationRequest, compact
from slimx.rollout.client.sending import RequestSender, Resending, input_logprobs
from slimx.rollout.client.stream import TokenStream


async def _nothing() -> None: ...


class GenerationClient:
    """Client for sampling and scoring requests over one HTTP session, which `async with` opens and closes."""

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
        images: str = "",
    ) -> None:
        """Stores the settings of all requests.

        `url`: URL of the router or of one server. `shape`: sizes of the model. `deadline_s`: time limit of a request in
        seconds, including queueing. `retry_s`: seconds during which a request is retried while the router has no
        engine. `retries`: maximum number of retries of a request that is lost with its engine. `on_lost`: awaited
        before each of these retries; it should remove the lost engine from the router. `outage`: while it lasts,
        requests wait and deadlines are suspended. `api_key`: key that the router or server requires, if any.
        `adapters`: name of the policy to sample from, if the servers have the LoRA adapters of several policies.
        `images`: directory of the run's image store.
        """
        self.url = url.rstrip("/")
        self.shape = shape
        self.deadline_s = deadline_s
        self.on_lost = on_lost
        self.outage = Outage() if outage is None else outage
        self._rule = Resending(retries, retry_s, self._lost, self.outage)
        self.headers = bearer(api_key)
        self.retried = 0
        """Number of retries so far because an engine was lost."""
        self.adapters = adapters
        self.images = images
        self._reader = Reader(self.url, shape, adapters)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GenerationClient:
        # No connection limit: the caller bounds the requests in flight, and a hidden queue would use up their deadline.
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self.headers)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples a continuation of the request's tokens.

        Top-p without top-k samples from at most `MAX_SUPPORT` candidates, because the engine returns the candidates of
        every token as `support`, whose size must be bounded.
        """
        start = time.monotonic()
        meta = await self._post(self._request_body(request), request.affinity)
        return await self._reader.completion(meta, request, time.monotonic() - start)

    def stream(self, request: GenerationRequest) -> TokenStream:
        """Samples like `generate`, and returns the stream from which tokens can be read while they are sampled."""
        score = partial(self.score, routed_experts=True, images=request.images)
        sender = self._sender(request.affinity)
        return TokenStream(request, sender, self._reader, self._request_body, self.deadline_s, score)

    async def score(
        self, token_ids: Sequence[int], routed_experts: bool = False, images: Sequence[Image] = ()
    ) -> Scores:
        """Returns the log-probs of `token_ids` [L], except the first, without sampling.

        `routed_experts`: True to also return the tokens' routed experts; a dense model has none. `images`: images in
        the tokens.
        """
        routed = routed_experts and self.shape.experts > 0
        fields = {"return_routed_experts": True} if routed else {}
        body = self._body(token_ids, {"max_new_tokens": 0, "temperature": 1.0}, fields, images)
        meta = await self._post(body | {"logprob_start_len": 0}, None)
        return Scores(
            logprobs=np.array(input_logprobs(meta, token_ids, self.url), np.float32),
            version=self._reader.version(meta["weight_version"]),
            routed_experts=await self._reader.experts(meta, len(token_ids) - 1) if routed else None,
        )

    def _request_body(self, request: GenerationRequest) -> Json:
        """Returns the JSON body of a sampling request."""
        parameters = {**request.sampling, "sampling_seed": request.seed}
        fields: Json = {"packed": self._reader.dtype.name}
        if request.restricted:
            # SGLang's default log-probs are over the whole vocabulary, regardless of top-k and top-p.
            fields["return_sampling_mask"] = True
            if parameters.get("top_k", -1) < 1:
                parameters["top_k"] = min(MAX_SUPPORT, self.shape.vocab_size)
        if self._reader.routed(request):
            fields["return_routed_experts"] = True
        return self._body(request.token_ids, parameters, fields, request.images)

    def _body(self, token_ids: Sequence[int], parameters: Json, fields: Json, images: Sequence[Image]) -> Json:
        """Returns the JSON body of a request.

        `parameters`: SGLang's sampling parameters. `fields`: request fields that the router does not know and would
        drop; they are sent in a label, because the router forwards labels. `images`: images in the
        tokens.
        """
        if images:
            shown = [[image.digest, image.start, image.stop, *image.grid] for image in images]
            fields["stored_images"] = {"directory": self.images, "images": shown}
        if self.adapters is not None:
            fields = {"lora_id": self.adapters, **fields}
        ids = compact(token_ids)
        if not ids or np.frombuffer(ids, np.uint32).max() >= self.shape.vocab_size:  # a negative id is a large one here
            invalid = next((token for token in ids if not 0 <= token < self.shape.vocab_size), None)
            subject = "a prompt without tokens" if invalid is None else f"token id {invalid}"
            raise SlimxError(
                f"{subject} cannot be sent to an engine; pass at least one token id, and only ids from 0 to "
                f"{self.shape.vocab_size - 1}",
                code="request.token_ids",
                about=subject,
            )
        body: Json = {"input_ids": ids.tolist(), "sampling_params": parameters, "return_logprob": True, "stream": False}
        if fields:
            # The router drops unknown fields but forwards labels; the slimx plugin in the server unpacks this one.
            body["custom_labels"] = {"slimx": json.dumps(fields)}
        return body

    async def _post(self, body: Json, key: str | None) -> Json:
        """Returns the `meta_info` of the response to a /generate request.

        The request is sent again if its response is lost, which is safe because its seed makes the result repeatable.
        """
        response = await self._sender(key).answer(body, self.deadline_s)
        if "meta_info" not in response:
            raise SlimxError(
                f"POST {self.url}/generate returned status 200 without meta_info ({message_of(response)}); start the "
                "engine with SGLang 0.5.23"
            )
        return response["meta_info"]

    def _sender(self, key: str | None) -> RequestSender:
        if self._session is None:
            raise SlimxError("the generation client is closed; use the client inside `async with`")
        return RequestSender(self._session, f"{self.url}/generate", key, self._rule, self.outage.time)

    async def _lost(self) -> None:
        self.retried += 1
        await self.on_lost()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a policy's engines, from which any process can make a client."""

    url: str
    """URL of the router."""
    shape: ModelShape
    api_key: str | None
    adapters: str | None
    """Name of the policy, if the servers have the LoRA adapters of several policies."""
    images: str
    """Directory of the run's image store."""

    def client(self, rollout: Rollout, on_lost: Callable[[], Awaitable[None]], outage: Outage) -> GenerationClient:
        """Returns a client with the deadlines of section `rollout`. `on_lost` and `outage`: see `GenerationClient`."""
        return GenerationClient(
            self.url,
            self.shape,
            rollout.request_deadline,
            # While no engine serves, `outage` pauses this deadline.
            retry_s=rollout.request_deadline,
            retries=rollout.request_retries,
            on_lost=on_lost,
            outage=outage,
            api_key=self.api_key,
            adapters=self.adapters,
            images=self.images,
        )
