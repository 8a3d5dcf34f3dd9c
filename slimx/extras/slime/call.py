"""One call of a slime hook (generate or reward): its `args`, and the requests that it sends."""

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
"""Sampling parameters that change only the text of a response, not its tokens."""
PAYLOAD = frozenset(
    {"text", "input_ids", "sampling_params", "return_logprob", "return_routed_experts", "stream", "rid"}
)


@dataclass(slots=True)
class Request:
    """Completed request to the policy's engines."""

    prompt: list[int]
    completion: Any
    """Result of `ctx.engine.generate`, a Completion."""
    text: str | None
    """Text of the prompt and the response; None if the prompt was sent as token ids."""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion.token_ids.tolist()


@dataclass(slots=True)
class HookCall:
    """State of a hook that is running. The functions that slimx provides in place of slime's read this state."""

    args: Arguments
    tokenizer: Any
    engines: Mapping[str, Any]
    """Frozen engines, by name."""
    engine: Any = None
    """Engine of the policy, as in RolloutContext; None for a reward hook."""
    address: str = ""
    """URL of the policy's router; "" for a reward hook."""
    sampling: Json = field(default_factory=dict)
    """Sampling parameters under the names that slime hooks use."""
    semaphore: asyncio.Semaphore | None = None
    requests: list[Request] = field(default_factory=list)
    started: int = 0
    """Number of requests that were started. A request's seed depends on its number."""

    async def request(self, payload: Json) -> Json:
        """Sends a request to the policy's engines, and returns the response in the format of SGLang's /generate. Raises
        SlimxError for a `payload` that slimx does not support."""
        unknown = sorted(payload.keys() - PAYLOAD)
        if unknown:
            raise SlimxError(
                f"a slime hook posts the unsupported field {unknown[0]!r} to the engines; post only the fields "
                f"{', '.join(sorted(PAYLOAD))}",
                code="slime.payload",
                about=unknown[0],
            )
        if payload.get("stream"):
            raise SlimxError(
                "a slime hook posts stream=true to the engines, but slimx does not stream responses to hooks; remove "
                "stream from the request",
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
        """Returns the token ids of the prompt in `payload`. If the prompt is a string that continues an earlier
        response, that response keeps its sampled token ids, and only the rest of the prompt is tokenized."""
        ids = payload.get("input_ids")
        text = payload.get("text")
        if isinstance(ids, list) and text is None and all(isinstance(as_whole(token), int) for token in ids):
            return as_ids(ids)
        if not isinstance(text, str) or ids is not None:
            problem = f"`text` of type {type(text).__name__} without `input_ids`"
            if ids is not None:
                problem = "`input_ids` that are not integers" if text is None else "both `text` and `input_ids`"
            raise SlimxError(
                f"a slime hook posts {problem} to the engines; post either `text` as one string, or `input_ids` as one "
                "list of integers",
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
        """Returns the text of a response as SGLang would return it: without the stop sequence or stop token, unless
        no_stop_trim is set."""
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
"""State of the hook that is running. It is set while a hook runs, and visible in the tasks and threads that the hook
starts."""


def current(what: str) -> HookCall:
    """Returns the state of the hook that is running. Raises SlimxError naming `what`, the function that needs this
    state, if no hook is running."""
    try:
        return CURRENT.get()
    except LookupError:
        raise SlimxError(
            f"{what} was called outside of a slime hook; call it only in the generate hook or the reward",
        ) from None


def _listed(parameters: Json) -> Json:
    """Returns `parameters` with `stop` as a list and with empty stop conditions removed."""
    out = dict(parameters)
    for key in ("stop", "stop_token_ids"):
        if not out.get(key):
            out.pop(key, None)
    if isinstance(out.get("stop"), str):
        out["stop"] = [out["stop"]]
    return out


def _meta(prompt: list[int], completion: Any, payload: Json) -> Json:
    """Returns the `meta_info` of a response, in SGLang's format."""
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
