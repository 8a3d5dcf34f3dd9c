"""CPU time of one answer of an engine, in the driver and in the server: SGLang's JSON against packed columns.

    python benchmarks/answers.py [--tokens 1000 10000] [--routed 18000] [--rounds 7] [--json FILE]

driver  from the body of the response to a completion with arrays: `parse_body` and `Reader`, as in a run
server  from the lists and tensors of SGLang's scheduler to the body: tuples and JSON as SGLang builds them, or hooks
        of slimx.extras.packed_answers. Routed experts pass three processes, whose times are added up: pickled by the
        scheduler, encoded in base64 by the detokenizer, and written into the body by the server

Routed experts are those of DeepSeek-V3: 61 layers, 8 of 256 experts. Each figure is the least of `--rounds` rounds, in
which the forms take turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pybase64
import torch
from machine import surroundings
from quantities import positive

from slimx.engines.server.http_calls import parse_body
from slimx.extras.packed_answers.adapters import sglang
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.reader import Reader
from slimx.rollout.client.request import GenerationRequest

SHAPE = ModelShape(vocab_size=129280, layers=61, top_k=8, experts=256)
PROMPT = 1000
"""Tokens of the prompt of an answer with routed experts."""
FORMS = ("json", "packed")


def tuples(manager: object, meta: dict[str, Any], state: Any) -> None:
    """Builds SGLang's lists, as `TokenizerManager.add_logprob_to_meta_info` does."""
    pairs = zip(state.output_token_logprobs_val, state.output_token_logprobs_idx, strict=True)
    meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]


class Answer:
    """One answer, which both forms build from the same lists and tensors."""

    def __init__(self, tokens: int, routed: bool):
        random = np.random.default_rng(1)
        self.request = GenerationRequest([1] * PROMPT, {}, seed=1, routed_experts=routed)
        self._ids = random.integers(0, SHAPE.vocab_size, tokens).tolist()
        self._logprobs = (-random.exponential(1.0, tokens).astype(np.float32)).astype(float).tolist()
        self._experts = None
        if routed:
            rows = (PROMPT + tokens - 1, SHAPE.layers, SHAPE.top_k)
            self._experts = torch.from_numpy(random.integers(0, SHAPE.experts, rows, np.int32))

    def body(self, form: str) -> bytes:
        """Builds the body of the response."""
        request = SimpleNamespace(stream=False, bootstrap_room=None, sampling_params={})
        if form == "packed":
            sglang.take_dtype(request, "uint8")
        meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "weight_version": "1", "cached_tokens": 0}
        if self._experts is not None:
            sampling = SimpleNamespace(custom_params=request.sampling_params.get("custom_params"))
            req = SimpleNamespace(sampling_params=sampling, routed_experts=self._experts)
            sglang.narrow_experts(None, None, req)
            received = pickle.loads(pickle.dumps(req.routed_experts))
            meta["routed_experts"] = pybase64.b64encode(received.numpy().tobytes()).decode()
        state = SimpleNamespace(
            obj=request, output_token_logprobs_val=self._logprobs, output_token_logprobs_idx=self._ids
        )
        sglang.keep_columns(tuples, None, meta, state)
        answer = {"text": "word" * len(self._ids), "output_ids": self._ids, "meta_info": meta}
        return sglang.respond(lambda content: SimpleNamespace(body=orjson.dumps(content)), answer).body

    def parse(self, body: bytes) -> bytes:
        """Parses a response as the driver does; returns the bytes of its arrays."""
        completion = asyncio.run(Reader("", SHAPE).completion(parse_body(body)["meta_info"], self.request, 0.0))
        arrays = [completion.token_ids, completion.logprobs, completion.routed_experts]
        return b"".join(array.tobytes() for array in arrays if array is not None)


async def parse_often(answer: Answer, body: bytes, times: int) -> float:
    """Returns the CPU time of parsing `body`, in ms."""
    reader = Reader("", SHAPE)
    began = time.process_time()
    for _ in range(times):
        await reader.completion(parse_body(body)["meta_info"], answer.request, 0.0)
    return 1e3 * (time.process_time() - began) / times


def build_often(answer: Answer, form: str, times: int) -> float:
    """Returns the CPU time of building a body, in ms."""
    began = time.process_time()
    for _ in range(times):
        answer.body(form)
    return 1e3 * (time.process_time() - began) / times


def measure(tokens: int, routed: bool, rounds: int) -> dict[str, Any]:
    """Returns the least CPU times of both forms, in ms, and the bytes of their bodies."""
    answer = Answer(tokens - PROMPT if routed else tokens, routed)
    bodies = {form: answer.body(form) for form in FORMS}
    if answer.parse(bodies["json"]) != answer.parse(bodies["packed"]):
        raise SystemExit("the two forms of an answer have different arrays")
    times = 1 if routed else max(1, 100_000 // tokens)
    parts: dict[str, Callable[[str], float]] = {
        "driver_ms": lambda form: asyncio.run(parse_often(answer, bodies[form], times)),
        "server_ms": lambda form: build_often(answer, form, times),
    }
    row: dict[str, Any] = {"tokens": tokens, "routed": routed}
    for name, part in parts.items():
        found = [{form: part(form) for form in FORMS} for _ in range(rounds)]
        row[name] = {form: min(times[form] for times in found) for form in FORMS}
    return row | {"bytes": {form: len(body) for form, body in bodies.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time of one answer of an engine")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1000, 10_000], help="sampled tokens")
    parser.add_argument("--routed", type=positive, default=18_000, help="tokens with routes, 1,000 of them a prompt's")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--json", type=Path, help="file that gets every single figure")
    arguments = parser.parse_args()
    if arguments.routed <= PROMPT:
        parser.error(f"argument --routed: {arguments.routed} is not more than the {PROMPT} tokens of the prompt")
    rows = []
    for tokens, routed in [*((tokens, False) for tokens in arguments.tokens), (arguments.routed, True)]:
        rows.append(measure(tokens, routed, arguments.rounds))
        print(json.dumps(rows[-1]), flush=True)
    where = surroundings("slimx", "msgspec", "orjson", "numpy", "torch")
    print(where)
    if arguments.json:
        arguments.json.write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
