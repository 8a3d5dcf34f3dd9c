"""Rewards from another model: a judge that writes a verdict, or a reward model that scores a conversation.

Both are called over HTTP, at an SGLang server (a judge also at any server with OpenAI's chat API) or at a group of
frozen engines of the run."""

from __future__ import annotations

import re

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.http import post
from slimx.json_types import Json
from slimx.rewards.context import Context

TEMPLATE = """Question:
{question}

Reference answer:
{answer}

Response to be judged:
{text}

How good is the response? Think briefly, then write "Score: N" with N from 0 (wrong) to 10 (perfect)."""


async def reward(
    ctx: Context,
    trajectory: Trajectory,
    *,
    url: str | None = None,
    engine: str | None = None,
    model: str = "default",
    template: str = TEMPLATE,
    pattern: str = r"Score:\s*(\d+(?:\.\d+)?)",
    scale: float = 10.0,
    max_tokens: int = 512,
    timeout: float = 60.0,
    retries: int = 3,
) -> float:
    """Returns the last number that `pattern` finds in the judge's greedy response, divided by `scale`.

    `url`: base URL of the server; or `engine`: name of a frozen group of rollout.engines. `model`: model name in the
    request. `template`: prompt for the judge; it may contain {question}, {answer} (the prompt's answer) and {text} (the
    final answer of the response). `max_tokens`: maximum length of the judge's response. `timeout`: seconds per request;
    `retries`: maximum number of retries. Raises SlimxError if the judge's response contains no number, or if the server
    does not respond."""
    headers = None
    if url is None:
        url, headers = _server(ctx, engine)
    # Not str.format, because a response may contain braces.
    values = {"question": question(ctx), "answer": ctx.prompt.answer or "none", "text": ctx.final_answer}
    content = re.sub(r"\{(question|answer|text)\}", lambda match: values[match[1]], template)
    body: Json = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
    }
    address = f"{url.rstrip('/')}/v1/chat/completions"
    response = await post(address, body, timeout_s=timeout, retries=retries, headers=headers)
    try:
        verdict = response["choices"][0]["message"]["content"] or ""
    except (LookupError, TypeError) as error:
        raise SlimxError(
            f"{url} returned {str(response)[:200]}, which is not a chat completion; set reward.options.url or "
            "reward.options.engine to a server with an OpenAI-compatible chat API",
            code="reward.verdict",
            about=url,
        ) from error
    scores = re.findall(pattern, verdict)
    if not scores:
        raise SlimxError(
            f"the verdict of the judge at {url} ends with {verdict[-200:]!r} and does not match the regular expression "
            f"{pattern!r}; change reward.options.pattern, or ask for a matching verdict in reward.options.template",
            code="reward.verdict",
            about=url,
        )
    return float(scores[-1]) / scale


async def score(
    ctx: Context,
    trajectory: Trajectory,
    *,
    url: str | None = None,
    engine: str | None = None,
    ids: bool = False,
    timeout: float = 60.0,
    retries: int = 3,
) -> float:
    """Returns the score that a reward model with one output gives the conversation.

    `url`: base URL of an SGLang server, called at /classify; or `engine`: name of a frozen group of rollout.engines. A
    group is called at /v1/embeddings, the only one of the two endpoints that its router forwards; SGLang returns the
    same number there. The whole trajectory is sent as text, decoded by the policy's tokenizer; with `ids` it is sent as
    token ids, for a reward model with the policy's vocabulary. `timeout`: seconds per request; `retries`: maximum
    number of retries. Raises SlimxError if the response is not a single number, or if the server does not respond."""
    tokens = trajectory.token_ids.tolist()
    content = tokens if ids else ctx.tokenizer.decode(tokens, skip_special_tokens=False)
    headers = None
    body: Json
    if url is None:
        base, headers = _server(ctx, engine)
        address = f"{base}/v1/embeddings"
        body = {"model": engine, "input": [content]}
    else:
        address = f"{url.rstrip('/')}/classify"
        body = {"input_ids" if ids else "text": [content]}
    response = await post(address, body, timeout_s=timeout, retries=retries, headers=headers)
    try:
        row = response[0] if url else response["data"][0]
        (value,) = row["embedding"]
        return float(value)
    except (LookupError, TypeError, ValueError) as error:
        raise SlimxError(
            f"{address} returned {str(response)[:200]}, which does not contain exactly one score; set "
            "reward.options.url or reward.options.engine to a server of a reward model",
            code="reward.verdict",
            about=url or engine or "",
        ) from error


def _server(ctx: Context, engine: str | None) -> tuple[str, dict[str, str]]:
    """Returns the base URL and the request headers for the frozen group `engine`. Raises SlimxError if there is no such
    group."""
    if engine is None or engine not in ctx.engines:
        raise SlimxError(
            f"slimx.extras.rewards.judge: reward.options.engine is {engine!r}, which is not among the frozen groups of "
            f"rollout.engines ({', '.join(ctx.engines) or 'none'}); set reward.options.engine to the name of a frozen "
            "group, or reward.options.url to the URL of a server",
            code="reward.engine",
            about=engine or "",
        )
    return ctx.engines[engine].url, ctx.engines[engine].headers


def question(ctx: Context) -> str:
    """Returns the prompt as text: its last user message, or its decoded token ids if it has no messages."""
    for message in reversed(ctx.prompt.messages or []):
        if message.get("role") == "user":
            return str(message.get("content", ""))
    return str(ctx.tokenizer.decode(ctx.prompt.token_ids or []))
