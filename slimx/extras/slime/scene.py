"""One rollout (or one reward) while a slime hook runs: what its `args` hold, and every request that it made."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slimx.data.whole import Json, as_ids, as_whole
from slimx.errors import SlimxError
from slimx.extras.slime.arguments import Arguments

TEXT_ONLY = frozenset({"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"})
"""Sampling parameters that say how an answer's text is written; its tokens are the same."""
PAYLOAD = frozenset(
    {"text", "input_ids", "sampling_params", "return_logprob", "return_routed_experts", "stream", "rid"}
)


@dataclass(slots=True)
class Call:
    """One request to the policy's engines and what it brought."""

    prompt: list[int]
    completion: Any
    """As of `ctx.engine.generate`."""
    text: str | None
    """Text of prompt and answer; None where the prompt was sent as ids."""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion.token_ids.tolist()


@dataclass(slots=True)
class Scene:
    """The running hook, as the stand-in functions find it when it calls them."""

    args: Arguments
    tokenizer: Any
    engines: Mapping[str, Any]
    """Frozen ones, by name."""
    engine: Any = None
    """The policy's, as in RolloutContext; None in a reward."""
    address: str = ""
    """URL of the policy's router."""
    sampling: Json = field(default_factory=dict)
    """As a hook receives it."""
    semaphore: asyncio.Semaphore | None = None
    calls: list[Call] = field(default_factory=list)
    asked: int = 0
    """Requests that began: each has a number, which its seed depends on."""

    async def request(self, payload: Json) -> Json:
        """The answer of /generate, in SGLang's words. Raises SlimxError for what cannot be asked."""
        if unknown := sorted(payload.keys() - PAYLOAD):
            raise SlimxError(
                f"a slime hook posts {unknown[0]!r} to the engines; served are {', '.join(sorted(PAYLOAD))}",
                code="slime.payload",
                about=unknown[0],
            )
        if payload.get("stream"):
            raise SlimxError(
                "a slime hook posts stream=true to the engines; answers come whole here",
                code="slime.payload",
                about="stream",
            )
        parameters = {k: v for k, v in (payload.get("sampling_params") or {}).items() if v is not None}
        prompt = self._prompt(payload)
        turn, self.asked = self.asked, self.asked + 1
        asked = {key: value for key, value in parameters.items() if key not in TEXT_ONLY}
        completion = await self.engine.generate(prompt, _listed(asked), turn=turn)
        text = self._text(completion, parameters)
        before = payload.get("text")
        if completion.routed_experts is not None:
            self.args.num_layers, self.args.moe_router_topk = completion.routed_experts.shape[1:]
        self.calls.append(Call(prompt, completion, None if before is None else before + text))
        return {
            "text": text,
            "output_ids": completion.token_ids.tolist(),
            "meta_info": _meta(prompt, completion, payload),
        }

    def _prompt(self, payload: Json) -> list[int]:
        """Ids to be continued. A text that goes on where an earlier answer ended keeps that answer's ids as they were
        sampled; only the rest is tokenised."""
        ids, text = payload.get("input_ids"), payload.get("text")
        if isinstance(ids, list) and text is None and all(isinstance(as_whole(token), int) for token in ids):
            return as_ids(ids)
        if not isinstance(text, str) or ids is not None:
            raise SlimxError(
                "a slime hook posts to the engines neither one `text` nor one list of `input_ids`; post one",
                code="slime.payload",
                about="input_ids",
            )
        known = [call for call in self.calls if call.text is not None and text.startswith(call.text)]
        longest = max(known, key=lambda call: len(call.text or ""), default=None)
        begun, rest = ([], text) if longest is None else (longest.ids, text[len(longest.text or "") :])
        return begun + list(self.tokenizer(rest, add_special_tokens=False).input_ids if rest else [])

    def _text(self, completion: Any, parameters: Json) -> str:
        """The answer as SGLang writes it: without what ended it, unless no_stop_trim says otherwise."""
        ids, stops = completion.token_ids.tolist(), _listed(parameters).get("stop", [])
        trim = completion.finish_reason == "stop" and not parameters.get("no_stop_trim", False)
        special = parameters.get("skip_special_tokens", True)
        text = self.tokenizer.decode(ids, skip_special_tokens=special)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if trim and found:
            return text[: min(found)]
        return self.tokenizer.decode(ids[:-1], skip_special_tokens=special) if trim else text


CURRENT: ContextVar[Scene] = ContextVar("slime_scene")
"""Scene of the hook that runs: set around each call, and seen by the tasks and threads that it starts."""


def current(what: str) -> Scene:
    """The scene of the running hook; `what` needs it."""
    try:
        return CURRENT.get()
    except LookupError:
        raise SlimxError(
            f"{what} was called outside a slime hook's call; call it from generate or from the reward",
        ) from None


def _listed(parameters: Json) -> Json:
    """`parameters` with `stop` as a list, and left out where it is empty."""
    out = {key: value for key, value in parameters.items() if key not in ("stop", "stop_token_ids") or value}
    if isinstance(out.get("stop"), str):
        out["stop"] = [out["stop"]]
    return out


def _meta(prompt: list[int], completion: Any, payload: Json) -> Json:
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
