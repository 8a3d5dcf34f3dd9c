"""One call of a slime hook (generate or reward): its `args`, and all requests that it makes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slimx.data.integers import as_ids, as_whole
from slimx.errors import SlimxError
from slimx.extras.slime.arguments import Arguments
from slimx.json_types import Json

TEXT_ONLY = frozenset({"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"})
"""Sampling parameters that change only an answer's text, not its tokens."""
PAYLOAD = frozenset(
    {"text", "input_ids", "sampling_params", "return_logprob", "return_routed_experts", "stream", "rid"}
)


@dataclass(slots=True)
class Request:
    """A completed request to the policy's engines."""

    prompt: list[int]
    completion: Any
    """Result of `ctx.engine.generate`."""
    text: str | None
    """Text of prompt and answer; None if the prompt was sent as ids."""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion.token_ids.tolist()


@dataclass(slots=True)
class HookCall:
    """The running call of a hook, as slime's functions find it."""

    args: Arguments
    tokenizer: Any
    engines: Mapping[str, Any]
    """Frozen engines by name."""
    engine: Any = None
    """The policy's engine, as in RolloutContext; None in a reward."""
    address: str = ""
    """URL of the policy's router."""
    sampling: Json = field(default_factory=dict)
    """Sampling parameters in the hook's form."""
    semaphore: asyncio.Semaphore | None = None
    requests: list[Request] = field(default_factory=list)
    started: int = 0
    """Number of started requests; a request's seed depends on its number."""

    async def request(self, payload: Json) -> Json:
        """Returns the response of /generate in SGLang's form. Raises SlimxError for an unsupported request."""
        unknown = sorted(payload.keys() - PAYLOAD)
        if unknown:
            raise SlimxError(
                f"a slime hook posts {unknown[0]!r} to the engines; served are {', '.join(sorted(PAYLOAD))}",
                code="slime.payload",
                about=unknown[0],
            )
        if payload.get("stream"):
            raise SlimxError(
                "a slime hook posts stream=true to the engines, but slimx does not stream responses to hooks; leave it "
                "out",
                code="slime.payload",
                about="stream",
            )
        parameters = {k: v for k, v in (payload.get("sampling_params") or {}).items() if v is not None}
        prompt = self._prompt(payload)
        turn = self.started
        self.started += 1
        sampling = {key: value for key, value in parameters.items() if key not in TEXT_ONLY}
        completion = await self.engine.generate(prompt, _listed(sampling), turn=turn)
        text = self._text(completion, parameters)
        before = payload.get("text")
        if completion.routed_experts is not None:
            _, layers, top_k = completion.routed_experts.shape
            vars(self.args).update(num_layers=layers, moe_router_topk=top_k)
        full_text = None
        if before is not None:
            full_text = before + text
        self.requests.append(Request(prompt, completion, full_text))
        return {
            "text": text,
            "output_ids": completion.token_ids.tolist(),
            "meta_info": _meta(prompt, completion, payload),
        }

    def _prompt(self, payload: Json) -> list[int]:
        """Returns the prompt's token ids. If a text continues an earlier answer, that answer keeps its sampled ids and
        only the rest is tokenized."""
        ids = payload.get("input_ids")
        text = payload.get("text")
        if isinstance(ids, list) and text is None and all(isinstance(as_whole(token), int) for token in ids):
            return as_ids(ids)
        if not isinstance(text, str) or ids is not None:
            raise SlimxError(
                "a slime hook posts to the engines neither one `text` nor one list of `input_ids`; post one",
                code="slime.payload",
                about="input_ids",
            )
        prefix: list[int] = []
        known = 0
        for request in self.requests:
            if request.text is not None and text.startswith(request.text) and len(request.text) > known:
                prefix = request.ids
                known = len(request.text)
        if known == len(text):
            return prefix
        return prefix + list(self.tokenizer(text[known:], add_special_tokens=False).input_ids)

    def _text(self, completion: Any, parameters: Json) -> str:
        """Returns the answer's text as SGLang does: without the stop sequence or token, unless no_stop_trim is set."""
        ids = completion.token_ids.tolist()
        stops = _listed(parameters).get("stop", [])
        trim = completion.finish_reason == "stop" and not parameters.get("no_stop_trim", False)
        special = parameters.get("skip_special_tokens", True)
        text = self.tokenizer.decode(ids, skip_special_tokens=special)
        if not trim:
            return text
        positions = [text.find(stop) for stop in stops if stop in text]
        if positions:
            return text[: min(positions)]
        return self.tokenizer.decode(ids[:-1], skip_special_tokens=special)


CURRENT: ContextVar[HookCall] = ContextVar("slime_scene")
"""The running call: set around each call of a hook, visible in the tasks and threads that it starts."""


def current(what: str) -> HookCall:
    """Returns the running call of a hook; `what` needs it."""
    try:
        return CURRENT.get()
    except LookupError:
        raise SlimxError(
            f"{what} was called outside a slime hook's call; call it from generate or from the reward",
        ) from None


def _listed(parameters: Json) -> Json:
    """Returns `parameters` with `stop` as a list; empty stop conditions are left out."""
    out = dict(parameters)
    for key in ("stop", "stop_token_ids"):
        if not out.get(key):
            out.pop(key, None)
    if isinstance(out.get("stop"), str):
        out["stop"] = [out["stop"]]
    return out


def _meta(prompt: list[int], completion: Any, payload: Json) -> Json:
    """Returns the `meta_info` of a response."""
    versions = [{"start": a, "end": b, "version": str(version)} for a, b, version in completion.versions]
    ids = completion.token_ids.tolist()
    meta = {
        "finish_reason": {"type": completion.finish_reason},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_tokens,
        "weight_version": versions[-1]["version"] if versions else "",
        "weight_versions": versions,
        "output_token_logprobs": [[p, token, None] for p, token in zip(completion.logprobs.tolist(), ids, strict=True)],
        "e2e_latency": completion.seconds,
    }
    if payload.get("return_routed_experts") and completion.routed_experts is not None:
        meta["routed_experts"] = base64.b64encode(completion.routed_experts.astype("int32").tobytes()).decode()
    return meta
