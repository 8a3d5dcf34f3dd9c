"""The reward that another model gives: a judge that writes its verdict, or a reward model that scores a conversation.

Both are asked over HTTP at the address of an SGLang server (or, for a judge, any server with OpenAI's chat API). A
judge may be one of the run's own frozen engines instead."""

from __future__ import annotations

import re
from typing import Any

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.http import post
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
    """The last number that `pattern` finds in the judge's greedy answer, over `scale`.

    `url`: of the server, without a path; or `engine`: the name of a frozen group of rollout.engines. `template` may
    hold {question}, {answer} and {text}, the final answer. Raises SlimxError for a verdict without a number."""
    headers = None
    if url is None:
        url, headers = _server(ctx, engine)
    # Not str.format: a response may hold braces.
    given = {"question": question(ctx), "answer": ctx.prompt.answer or "none", "text": ctx.final_answer}
    asked = re.sub(r"\{(question|answer|text)\}", lambda name: given[name[1]], template)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": asked}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
    }
    where = f"{url.rstrip('/')}/v1/chat/completions"
    said = await post(where, body, timeout_s=timeout, retries=retries, headers=headers)
    try:
        verdict = said["choices"][0]["message"]["content"] or ""
    except (LookupError, TypeError) as error:
        raise SlimxError(
            f"{url} answered {str(said)[:200]}, which is no chat completion; is it a judge?",
            code="reward.verdict",
            about=url,
        ) from error
    found = re.findall(pattern, verdict)
    if not found:
        raise SlimxError(
            f"the judge at {url} wrote no score that {pattern!r} finds, but {verdict[-200:]!r}",
            code="reward.verdict",
            about=url,
        )
    return float(found[-1]) / scale


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
    """The number that a reward model with one output gives to the conversation.

    `url`: of an SGLang server, without a path, whose /classify is asked; or `engine`: the name of a frozen group of
    rollout.engines, whose router forwards /v1/embeddings alone, where SGLang answers the same number. The whole
    trajectory is sent as text, decoded by the policy's tokenizer; with `ids` as its token ids, for a reward model with
    the policy's vocabulary. Raises SlimxError for another answer."""
    tokens = trajectory.token_ids.tolist()
    said = tokens if ids else ctx.tokenizer.decode(tokens, skip_special_tokens=False)
    if url is None:
        base, headers = _server(ctx, engine)
        address, body = f"{base}/v1/embeddings", {"model": engine, "input": [said]}
    else:
        address, headers = f"{url.rstrip('/')}/classify", None
        body = {"input_ids" if ids else "text": [said]}
    answer = await post(address, body, timeout_s=timeout, retries=retries, headers=headers)
    try:
        (value,) = (answer[0] if url else answer["data"][0])["embedding"]
        return float(value)
    except (LookupError, TypeError, ValueError) as error:
        raise SlimxError(
            f"{address} answered {str(answer)[:200]}; a reward model gives one number",
            code="reward.verdict",
            about=url or engine,
        ) from error


def _server(ctx: Context, engine: str | None) -> tuple[str, dict[str, str]]:
    """Address and headers of a frozen group."""
    if engine not in ctx.engines:
        raise SlimxError(
            f"slimx.extras.rewards.judge asks {engine!r}, and the frozen groups of rollout.engines are "
            f"{', '.join(ctx.engines) or 'none'}; name one of them in reward.options engine, or give a url",
            code="reward.engine",
            about=engine,
        )
    return ctx.engines[engine].url, ctx.engines[engine].headers


def question(ctx: Context) -> str:
    """The prompt as text: its last user message, or its decoded ids."""
    for message in reversed(ctx.prompt.messages or []):
        if message.get("role") == "user":
            return str(message.get("content", ""))
    return ctx.tokenizer.decode(ctx.prompt.token_ids or [])
