"""Client of a frozen model for hooks: sends requests to the router of its engines, from any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import aiohttp
import numpy as np

from slimx.config.schema import Config
from slimx.data.integers import as_ids
from slimx.engines.outage import Outage, RemoteOutage
from slimx.engines.server.http_calls import message_of, parse_body
from slimx.engines.server.keys import bearer
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.models.families import configured_model
from slimx.rollout.client.sending import Answer, Resending, failed, input_logprobs, input_top_logprobs, send


class FrozenEngine:
    """Client of a group of `rollout.engines` with `frozen: true`; hooks access it as `ctx.engines[NAME]`.

    It is created in the run's event loop, but its methods can be awaited in any other loop, such as that of a reward's
    thread. A copy in another process uses the same router, but does not report lost servers to the run.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        deadline_s: float,
        retries: int,
        look: Callable[[], Awaitable[None]] | None = None,
        failure: Callable[[], SlimxError | None] = lambda: None,
        outage: Outage | None = None,
        api_key: str | None = None,
        placeholder: int | None = None,
    ) -> None:
        """Stores the settings of all requests.

        `name`: name of the group. `url`: URL of the group's router. `deadline_s`: time limit of one request in seconds.
        `retries`: maximum number of retries of a request that is lost with its server. `look`: function that checks for
        lost servers; it is awaited before each retry. `failure`: function that returns the error if the group is
        permanently lost, otherwise None. `outage`: while it lasts, requests wait and deadlines are suspended.
        `api_key`: key that the router requires, if any. `placeholder`: token id that stands for images in the policy's
        tokens; None in a run without images.
        """
        self.name = name
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s
        self.retries = retries
        self._look = look
        self._failure = failure
        self._key = api_key
        self._placeholder = placeholder
        self._loop = asyncio.get_running_loop() if look is not None else None
        self._absence = None if outage is None else RemoteOutage(outage, lambda: failure() is not None)

    def __reduce__(self) -> tuple[Callable[[str, str], FrozenEngine], tuple[str, str]]:
        """Returns, for pickling, the constructor and the arguments of a copy that is not connected to the run."""
        copy = partial(
            FrozenEngine,
            deadline_s=self.deadline_s,
            retries=self.retries,
            api_key=self._key,
            placeholder=self._placeholder,
        )
        return copy, (self.name, self.url)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that requests to the group's servers need."""
        return bearer(self._key)

    async def post(self, path: str, body: Json) -> Json:
        """Sends a request to one of SGLang's endpoints, such as /v1/chat/completions, /v1/rerank or /v1/embeddings, and
        returns the response.

        `path`: path of the endpoint. Raises AnswerError for an error response, and DeadlineError if there is no
        response within `deadline_s` seconds.
        """
        url = self.url + path
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as session:

            async def attempt() -> Answer:
                failure = self._failure()
                if failure is not None:
                    raise SlimxError(
                        f"the frozen engines of group {self.name} are lost ({failure}); see the logs of these "
                        "engines for the cause",
                        code="frozen.lost",
                        about=self.name,
                    )
                try:
                    async with session.post(url, json=body) as response:
                        return response.status, _body(await response.text())
                except aiohttp.ClientError as error:
                    return failed(error)

            rule = Resending(self.retries, self.deadline_s, self._lost, self._absence)
            return await send(attempt, url, self.deadline_s, rule)

    async def chat(self, messages: Sequence[Json], **parameters: object) -> str:
        """Returns the model's reply to a conversation.

        `parameters`: additional request parameters for /v1/chat/completions, such as temperature.
        """
        body = {"model": "default", "messages": list(messages), **parameters}
        response = await self.post("/v1/chat/completions", body)
        try:
            return response["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise SlimxError(
                f"the frozen engines of group {self.name} returned no chat message ({message_of(response)}); serve a "
                "chat model in this group",
            ) from None

    async def logprobs(self, token_ids: Sequence[int], *, start: int = 1) -> list[float]:
        """Returns the log-probs [L - start] of the tokens `start` to L - 1 of `token_ids` [L] under this model, at
        temperature 1.

        The KV entries of tokens before `start` may come from the server's cache, and no logits are computed for these
        tokens. Raises SlimxError for tokens of images, which the server would read as text.
        """
        ids = self._text_only(token_ids)
        response = await self.post("/generate", _scoring(ids, start))
        return input_logprobs(response.get("meta_info", {}), ids[start - 1 :], f"frozen engines {self.name}")

    async def top_logprobs(
        self, token_ids: Sequence[int], *, top: int, start: int = 1
    ) -> tuple[list[float], np.ndarray, np.ndarray]:
        """Returns the log-probs as `logprobs` does, and the `top` most likely tokens at each of these positions.

        The tokens are returned as their ids, int32 [L - start, top], and their log-probs, float32 [L - start, top].
        """
        ids = self._text_only(token_ids)
        body = {**_scoring(ids, start), "top_logprobs_num": top}
        response = await self.post("/generate", body)
        meta = response.get("meta_info", {})
        who = f"frozen engines {self.name}"
        return input_logprobs(meta, ids[start - 1 :], who), *input_top_logprobs(meta, len(ids) - start, top, who)

    def _text_only(self, token_ids: Sequence[int]) -> list[int]:
        ids = as_ids(token_ids)
        if self._placeholder in ids:
            raise SlimxError(
                f"frozen engines {self.name}: token {ids.index(self._placeholder)} (id {self._placeholder}) is the "
                "placeholder of an image, which log-probs of frozen models do not take into account; pass only tokens "
                "of text, or show the image to the model with chat",
                code="frozen.image",
                about=self.name,
            )
        return ids

    async def _lost(self) -> None:
        """Makes the run check for lost servers, in the run's event loop."""
        if self._look is not None and self._loop is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(self._look), self._loop))


def image_placeholder(config: Config) -> int | None:
    """Returns the token id that stands for images in the policy's tokens; None without `trainer.vision`."""
    if config.trainer.vision is None:
        return None
    token: int = configured_model(config).hf["image_token_id"]
    return token


def _scoring(ids: list[int], start: int) -> Json:
    """Returns the body of a request for the log-probs of the tokens from index `start` on."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "stream": False,
    }


def _body(text: str) -> Json:
    """Parses a JSON object. A list, which some of SGLang's endpoints return, becomes the value of "data"."""
    body = parse_body(text)
    if text.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return {"data": json.loads(text)}
    return body


async def _awaited(look: Callable[[], Awaitable[None]]) -> None:
    await look()
