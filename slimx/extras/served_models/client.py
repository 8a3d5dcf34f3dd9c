"""A frozen model as hooks see it: requests to its router, from any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from slimx.data.whole import as_ids
from slimx.engines.outage import Elsewhere, Outage
from slimx.engines.server.keys import bearer
from slimx.engines.server.wire import message_of, parse_body
from slimx.errors import SlimxError
from slimx.rollout.client.sending import Answer, Resending, failed, input_logprobs, input_top_logprobs, send


class FrozenEngine:
    """A group of `rollout.engines` with `frozen: true`; `ctx.engines[NAME]` in hooks.

    Made in the run's event loop; its methods may be awaited in any other one, such as that of a reward's thread. A copy
    in another process asks the same router, but does not have the run look for servers that it lost.
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
    ) -> None:
        """`url`: of the group's router, which asks for `api_key`. `deadline_s`: seconds for one request. One that is
        lost with its server is sent again `retries` times, after `look` has looked for lost servers. `failure`: why the
        group is lost for good. While `outage` lasts, requests wait, and their deadline does not run."""
        self.name, self.url, self.deadline_s, self.retries = name, url.rstrip("/"), deadline_s, retries
        self._look, self._failure, self._key = look, failure, api_key
        self._loop = asyncio.get_running_loop() if look is not None else None
        self._absence = None if outage is None else Elsewhere(outage, lambda: failure() is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"deadline_s": self.deadline_s, "retries": self.retries, "api_key": self._key}
        return partial(FrozenEngine, **options), (self.name, self.url)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers without which its servers answer nobody."""
        return bearer(self._key)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of one of SGLang's own paths, such as /v1/chat/completions, /v1/rerank or /v1/embeddings."""
        url = self.url + path
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as session:

            async def attempt() -> Answer:
                if (failure := self._failure()) is not None:
                    raise SlimxError(f"frozen engines {self.name}: {failure}", code="frozen.lost", about=self.name)
                try:
                    async with session.post(url, json=body) as response:
                        return response.status, _body(await response.text())
                except aiohttp.ClientError as error:
                    return failed(error)

            rule = Resending(self.retries, self.deadline_s, self._lost, self._absence)
            return await send(attempt, url, self.deadline_s, rule)

    async def chat(self, messages: Sequence[dict[str, Any]], **parameters: Any) -> str:
        """The model's answer to a conversation. `parameters`: of /v1/chat/completions, such as temperature."""
        answer = await self.post("/v1/chat/completions", {"model": "default", "messages": list(messages), **parameters})
        try:
            return answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise SlimxError(
                f"frozen engines {self.name} gave no chat answer: {message_of(answer)}",
            ) from None

    async def logprobs(self, token_ids: Sequence[int], *, start: int = 1) -> list[float]:
        """Log-probs of `token_ids` [L] under this model at temperature 1: of the tokens `start` to L - 1, [L - start].

        Of the tokens before `start` the server may have the KV in its cache, and it computes no logits for them."""
        ids = as_ids(token_ids)
        answer = await self.post("/generate", _scoring(ids, start))
        return input_logprobs(answer.get("meta_info", {}), ids[start - 1 :], f"frozen engines {self.name}")

    async def top_logprobs(
        self, token_ids: Sequence[int], *, top: int, start: int = 1
    ) -> tuple[list[float], np.ndarray, np.ndarray]:
        """As `logprobs`, and in the place of each of these tokens the `top` likeliest ones: int32 [L - start, top], and
        their log-probs, float32."""
        ids = as_ids(token_ids)
        body = {**_scoring(ids, start), "top_logprobs_num": top}
        meta, who = (await self.post("/generate", body)).get("meta_info", {}), f"frozen engines {self.name}"
        return input_logprobs(meta, ids[start - 1 :], who), *input_top_logprobs(meta, len(ids) - start, top, who)

    async def _lost(self) -> None:
        """Have the run look for lost servers, in its own event loop."""
        if self._look is not None and self._loop is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(self._look), self._loop))


def _scoring(ids: list[int], start: int) -> dict[str, Any]:
    """The request for the log-probs of the tokens from `start` on."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "stream": False,
    }


def _body(text: str) -> dict[str, Any]:
    """A JSON object as it is; a list, which some of SGLang's paths answer, under "data"."""
    answer = parse_body(text)
    if text.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return {"data": json.loads(text)}
    return answer


async def _awaited(look: Callable[[], Awaitable[None]]) -> None:
    await look()
