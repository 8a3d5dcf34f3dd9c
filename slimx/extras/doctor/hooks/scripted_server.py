"""A server that replaces engines when `slimx doctor --hooks` tries hooks: it returns scripted responses.

It implements the part of SGLang's HTTP API that hooks use in a run, so that they run with the same client: /generate,
streamed or not, with log-probs, versions, experts and top-p masks, and the chat, /classify and embeddings endpoints of
a frozen model. There is no model: the log-prob of every token is `LOGPROB`, and all experts have index 0."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from slimx.errors import DeadlineError
from slimx.extras.http.connections import Connections, Listening
from slimx.rollout.client.completion import ModelShape

LOGPROB = -0.5
VERSION = 1
"""Weight version that is returned with every token."""
VERDICT = "Score: 5"
"""Response that a frozen model's chat endpoint returns."""
VALUE = 0.5
"""Score that a frozen reward model returns."""
START_S = 10.0
MAX_BODY = 64 * 2**20
CONNECTIONS = 4096
IDLE_S = 600.0


class ScriptedServer:
    """Context manager that runs the scripted server in an event loop of a separate thread, so that the server responds
    even if a hook blocks the driver's event loop."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.requests: Counter[str] = Counter()
        """Number of requests by path, since the last call to `say`."""
        self.seeds: Counter[int] = Counter()
        """Number of sampling requests by seed, since the last call to `say`."""
        self.url = ""
        self._answers: list[list[int]] = [[]]
        """Token ids of the remaining responses; the last response is repeated."""
        self._ends = True
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slimx-scripted", daemon=True)

    def say(self, *answers: Sequence[int], ends: bool) -> None:
        """Sets the token ids of the next responses; the last response is then repeated. `ends`: True if the model stops
        after a response, False if the response is cut off."""
        self._answers = [list(answer) for answer in answers]
        self._ends = ends
        self.requests.clear()
        self.seeds.clear()

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        if not self._listening.wait(START_S):
            raise DeadlineError("the scripted server to listen", START_S, "this process")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._start())
        self._loop.call_soon(self._listening.set)  # runs within run_forever, which `stop` ends
        self._loop.run_forever()
        self._loop.run_until_complete(server.close())
        self._loop.close()

    async def _start(self) -> Listening:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/classify", self._classify)
        app.router.add_post("/v1/embeddings", self._embed)
        server = await Connections(most=CONNECTIONS, idle=IDLE_S).listen(app, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.port}"
        return server

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests["/generate"] += 1
        fields = {**body, **json.loads((body.get("custom_labels") or {}).get("slimx", "{}"))}
        answer = {"text": "", "meta_info": self._meta(fields)}
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
        return response

    def _meta(self, fields: dict[str, Any]) -> dict[str, Any]:
        prompt = list(fields.get("input_ids") or [])
        sampling = fields.get("sampling_params") or {}
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        ids = answer[: sampling.get("max_new_tokens", len(answer))]
        if ids:
            self.seeds[sampling.get("sampling_seed", 0)] += 1
        complete = self._ends and len(ids) == len(answer)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop" if complete else "length"},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(VERSION),
            "output_token_logprobs": [[LOGPROB, token, None] for token in ids],
        }
        if fields.get("logprob_start_len") is not None:
            meta["input_token_logprobs"] = [[LOGPROB, token, None] for token in prompt]
        if fields.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[token] for token in ids]
            meta["output_token_sampling_logprobs"] = [0.0] * len(ids)
        if fields.get("return_routed_experts"):
            rows = len(prompt) + len(ids) - 1
            experts = np.zeros((rows, self.shape.layers, self.shape.top_k), np.int32)
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return meta

    async def _chat(self, request: web.Request) -> web.Response:
        self.requests[request.path] += 1
        message = {"role": "assistant", "content": VERDICT}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def _classify(self, request: web.Request) -> web.Response:
        self.requests[request.path] += 1
        texts = (await request.json()).get("text") or [""]
        return web.json_response([{"embedding": [VALUE]} for _ in texts])

    async def _embed(self, request: web.Request) -> web.Response:
        self.requests[request.path] += 1
        return web.json_response({"data": [{"embedding": [VALUE]} for _ in (await request.json())["input"]]})
