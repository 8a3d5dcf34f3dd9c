"""The content of slime's modules for a hook: functions of the same names, which work on the running rollout."""

from __future__ import annotations

import asyncio
import contextvars
import statistics
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slimx.data.chat.tokens import load_tokenizer as load_from_directory
from slimx.data.whole import Json
from slimx.dotted import imported
from slimx.errors import SlimxError
from slimx.extras.rewards.shared import http
from slimx.extras.slime.sample import Sample
from slimx.extras.slime.scene import current

TIMEOUT_S = 120.0
"""For one request to a server that is not the run's."""
RETRIES = 5
"""Retries of such a request. slime's own number is 60."""


async def post(url: str, payload: Any, max_retries: int = RETRIES, headers: dict[str, str] | None = None) -> Any:
    """`http_utils.post`. To the policy's /generate it is a request of this rollout, with all that slimx knows of one:
    deadline, retries on other engines, versions. To a frozen engine or elsewhere it is plain HTTP with a deadline, sent
    again at most `RETRIES` times. `headers` go with plain HTTP only: which engine serves a rollout is
    `rollout.affinity`'s."""
    scene = current("slime.utils.http_utils.post")
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}"
    if scene.address and base == scene.address:
        if parts.path != "/generate":
            raise SlimxError(
                f"a slime hook posts to {parts.path} of the policy's router; only /generate is served, whose tokens "
                "can be trained",
                code="slime.path",
                about=parts.path,
            )
        return await scene.request(payload)
    for frozen in scene.engines.values():
        if base == frozen.url:
            return await frozen.post(parts.path, payload)
    return await http.post(url, payload, timeout_s=TIMEOUT_S, retries=min(max_retries, RETRIES), headers=headers)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """`sglang_rollout.get_model_url`: of a frozen engine by its name, else of the policy's router."""
    scene = current("slime.rollout.sglang_rollout.get_model_url")
    frozen = scene.engines.get(model_name)
    return (scene.address if frozen is None else frozen.url) + endpoint


class GenerateState:
    """`sglang_rollout.GenerateState`: what the run gives to all rollouts."""

    processor = None
    aborted = False

    def __init__(self, args: Any) -> None:
        scene = current("slime.rollout.sglang_rollout.GenerateState")
        self.args, self.tokenizer = args, scene.tokenizer
        self.sampling_params = dict(scene.sampling)
        self.semaphore = scene.semaphore
        """Semaphore of slimx's own limit, which requests obey without it."""


async def generate(args: Any, sample: Sample, sampling_params: Json) -> Sample:
    """`sglang_rollout.generate`: one request."""
    scene = current("slime.rollout.sglang_rollout.generate")
    if not sample.tokens:
        sample.tokens = list(scene.tokenizer(sample.prompt, add_special_tokens=False).input_ids)
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_routed_experts": True}
    output = await scene.request(payload)
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
    """`async_utils.run`: the result of a coroutine, from a thread without an event loop (`asyncio.to_thread`)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coroutine.close()
        raise SlimxError(
            "slime.utils.async_utils.run was called in an event loop, which it would block; await instead",
            code="slime.async",
            about="slime.utils.async_utils.run",
        )
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:
            result.set_exception(error)

    # A pool's thread would keep the process alive as long as the coroutine hangs.
    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
    return result.result()


def load_function(path: str) -> Any:
    """`misc.load_function`: the object at a dotted path."""
    return imported("slime.utils.misc.load_function", path)


def load_tokenizer(name_or_path: str, **_: Any) -> Any:
    """`processing_utils.load_tokenizer`."""
    return load_from_directory(name_or_path)


class SingletonMeta(type):
    """`misc.SingletonMeta`: a class has one instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_instance" not in cls.__dict__:
            cls._instance = super().__call__(*args, **kwargs)
        return cls._instance


@dataclass
class DynamicFilterOutput:
    """`filter_hub.base_types.DynamicFilterOutput`."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """`dynamic_sampling_filters.check_reward_nonzero_std`: groups whose rewards are all equal teach nothing."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")
