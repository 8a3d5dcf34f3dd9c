"""Functions and classes of slime's modules that slimx provides for hooks. They use the state of the hook that is
running (`slimx.extras.slime.call.HookCall`)."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slimx.data.chat.tokens import load_tokenizer as load_from_directory
from slimx.dotted import imported
from slimx.errors import SlimxError
from slimx.extras.rewards.shared import http
from slimx.extras.slime.call import current
from slimx.extras.slime.sample import Sample
from slimx.json_types import Json
from slimx.runtime.tasks import start_thread

TIMEOUT_S = 120.0
"""Timeout in seconds for a request to an external server."""
RETRIES = 5
"""Maximum number of retries of a request to an external server; slime's default is 60."""


async def post(url: str, payload: Any, max_retries: int = RETRIES, headers: dict[str, str] | None = None) -> Any:
    """Implements `http_utils.post`.

    A request to the endpoint /generate of the policy's router is recorded as a request of this rollout; slimx's
    deadline, retries on other engines, and weight versions apply to it. Requests to frozen engines and external servers
    are plain HTTP with a timeout and at most `RETRIES` retries. `headers` are sent only with plain HTTP, because
    `rollout.affinity` chooses the engine of a rollout."""
    call = current("slime.utils.http_utils.post")
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}"
    if call.address and base == call.address:
        if parts.path != "/generate":
            raise SlimxError(
                f"a slime hook posts to {parts.path} of the policy's router, but slimx can train only tokens that "
                "/generate returns; post to /generate instead",
                code="slime.path",
                about=parts.path,
            )
        return await call.request(payload)
    for frozen in call.engines.values():
        if base == frozen.url:
            return await frozen.post(parts.path, payload)
    return await http.post(url, payload, timeout_s=TIMEOUT_S, retries=min(max_retries, RETRIES), headers=headers)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Implements `sglang_rollout.get_model_url`: returns the URL of the frozen engine `model_name`, or of the policy's
    router if there is no such engine."""
    call = current("slime.rollout.sglang_rollout.get_model_url")
    frozen = call.engines.get(model_name)
    return (call.address if frozen is None else frozen.url) + endpoint


class GenerateState:
    """Implements `sglang_rollout.GenerateState`: state that all rollouts of a run share."""

    processor = None
    aborted = False

    def __init__(self, args: Any) -> None:
        call = current("slime.rollout.sglang_rollout.GenerateState")
        self.args = args
        self.tokenizer = call.tokenizer
        self.sampling_params = dict(call.sampling)
        self.semaphore = call.semaphore
        """Semaphore with slimx's limit on concurrent rollouts. Requests obey this limit even if the hook does not use
        the semaphore."""


async def generate(args: Any, sample: Sample, sampling_params: Json) -> Sample:
    """Implements `sglang_rollout.generate`: sends one request for `sample` and appends its response."""
    call = current("slime.rollout.sglang_rollout.generate")
    if not sample.tokens:
        sample.tokens = list(call.tokenizer(sample.prompt, add_special_tokens=False).input_ids)
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_routed_experts": True}
    output = await call.request(payload)
    meta = output["meta_info"]
    sample.append_response_tokens(
        args,
        tokens=output["output_ids"],
        log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
        meta_info=meta,
        text=output["text"],
    )
    return sample


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Implements `async_utils.run`: runs a coroutine from a thread without an event loop, such as one started by
    `asyncio.to_thread`, and returns its result."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coroutine.close()
        raise SlimxError(
            "slime.utils.async_utils.run was called in a running event loop, which the call would block; await the "
            "coroutine instead",
            code="slime.async",
            about="slime.utils.async_utils.run",
        )
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:
            result.set_exception(error)

    start_thread(work, "async_utils.run")
    return result.result()


def load_function(path: str) -> Any:
    """Implements `misc.load_function`: returns the object at a dotted path."""
    return imported("slime.utils.misc.load_function", path)


def load_tokenizer(name_or_path: str, **_: Any) -> Any:
    """Implements `processing_utils.load_tokenizer`: loads the tokenizer of a local Hugging Face directory."""
    return load_from_directory(name_or_path)


class SingletonMeta(type):
    """Implements `misc.SingletonMeta`: metaclass for classes that have a single instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_instance" not in cls.__dict__:
            cls._instance = super().__call__(*args, **kwargs)
        return cls._instance


@dataclass
class DynamicFilterOutput:
    """Dynamic filter's verdict on a group; implements slime's `filter_hub.base_types.DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Implements `dynamic_sampling_filters.check_reward_nonzero_std`: drops groups whose rewards are all equal, because
    such groups contribute no gradient."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")
