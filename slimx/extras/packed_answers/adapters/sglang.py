"""Answers to sampling requests in MessagePack with binary columns, in place of SGLang's JSON with one list per token.

A request asks for it with the field "packed", the dtype of its routed experts. sglang-router returns the body
unchanged. Streams remain in JSON, but their routed experts have that dtype too.

Written for sglang 0.5.23.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import msgspec
import torch

from slimx.json_types import Json

ADD_LOGPROBS = "sglang.srt.managers.tokenizer_manager.TokenizerManager.add_logprob_to_meta_info"
PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
COLLECT = f"{PROCESSOR}._maybe_collect_routed_experts"
RESPOND = "sglang.srt.utils.json_response.orjson_response"
PACKED = "packed"
DTYPES = ("uint8", "uint16")


class Request(Protocol):
    """The part of SGLang's GenerateReqInput that hooks use."""

    packed: str
    stream: bool
    bootstrap_room: int | None
    sampling_params: Json


class State(Protocol):
    """The part of SGLang's ReqState that hooks read."""

    obj: Request
    output_token_logprobs_val: list[float]
    output_token_logprobs_idx: list[int]


class Sampling(Protocol):
    """The field of SGLang's SamplingParams that hooks read."""

    custom_params: Json | None


class Req(Protocol):
    """The part of SGLang's Req that hooks use."""

    sampling_params: Sampling
    routed_experts: torch.Tensor | None


def register(registry: Any, hook_type: Any, server: bool, scheduler: bool) -> None:
    """Registers the hooks; an entry point of `slimx.server_hooks`."""
    if server:
        registry.register(ADD_LOGPROBS, keep_columns, hook_type.AROUND)
        registry.register(RESPOND, respond, hook_type.AROUND)
    if scheduler:
        registry.register(COLLECT, narrow_experts, hook_type.AFTER)


def take_dtype(request: Request, dtype: str) -> None:
    """Sets the field "packed" of a request to the name of a dtype, also among the sampling parameters, which reach the
    scheduler; an entry point of `slimx.request_fields`.

    The field is empty in prefill-decode disaggregation, where the router merges two answers in JSON. Raises ValueError
    if no dtype has the name.
    """
    if dtype not in DTYPES:
        raise ValueError(f"packed is {dtype!r}; use one of {', '.join(DTYPES)}")
    request.packed = dtype if request.bootstrap_room is None else ""
    request.sampling_params["custom_params"] = {PACKED: request.packed}


def keep_columns(
    original: Callable[..., None], manager: object, meta: Json, state: State, *args: object, **kwargs: object
) -> None:
    """Wraps `TokenizerManager.add_logprob_to_meta_info`: gives a packed answer SGLang's lists of ids and log-probs as
    they are, without building a tuple per token."""
    packed = getattr(state.obj, PACKED, "")
    if packed:
        meta[PACKED] = packed
    if packed and not state.obj.stream:
        meta["token_ids"] = state.output_token_logprobs_idx
        meta["logprobs"] = state.output_token_logprobs_val
    else:
        original(manager, meta, state, *args, **kwargs)


def narrow_experts(result: None, processor: object, req: Req) -> None:
    """Converts the routed experts of a finished request to the dtype that it asks for, so that three processes copy
    fewer bytes; runs after `_maybe_collect_routed_experts`, whose ids are int32."""
    packed = (req.sampling_params.custom_params or {}).get(PACKED)
    if packed and req.routed_experts is not None:
        # As bytes, because a tensor of uint16 cannot be sent to the next process.
        req.routed_experts = torch.from_numpy(req.routed_experts.numpy().astype(packed)).view(torch.uint8)


def respond(original: Callable[..., object], content: Json, *args: object, **kwargs: object) -> object:
    """Wraps `orjson_response`: returns a packed answer in MessagePack, and any other in JSON."""
    if "meta_info" not in content or "token_ids" not in content["meta_info"]:
        return original(content, *args, **kwargs)
    from fastapi.responses import Response

    body = msgspec.msgpack.encode({"meta_info": columns(content["meta_info"])})
    return Response(body, media_type="application/msgpack")


def columns(meta: Json) -> Json:
    """Returns the `meta_info` of a packed answer, with the columns as bytes.

    `token_ids`, `support_ids` and `support_counts` are int32, `logprobs` float32, and `routed_experts` have the dtype
    that the request asks for. In a request with top-k or top-p, the log-probs are those among the candidates.
    """
    kept = ("finish_reason", "weight_version", "weight_versions", "cached_tokens")
    packed = {name: meta[name] for name in kept if name in meta}
    packed["token_ids"] = array("i", meta["token_ids"]).tobytes()
    packed["logprobs"] = array("f", meta["logprobs"]).tobytes()
    if "output_token_sampling_mask" in meta:
        candidates = meta["output_token_sampling_mask"]
        packed["logprobs"] = array("f", meta["output_token_sampling_logprobs"]).tobytes()
        packed["support_ids"] = array("i", chain.from_iterable(candidates)).tobytes()
        packed["support_counts"] = array("i", map(len, candidates)).tobytes()
    if "routed_experts" in meta:
        import pybase64

        packed["routed_experts"] = pybase64.b64decode(meta["routed_experts"])
    return packed
