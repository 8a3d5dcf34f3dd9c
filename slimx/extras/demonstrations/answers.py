"""Encodes an answer of a data set, a demonstration or one of a pair, as the chat template writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slimx.data.chat.responses import THOUGHT_BEGINS, THOUGHT_ENDS
from slimx.data.chat.tokens import MARKER, answered, special_ids, templated
from slimx.data.records import Prompt
from slimx.errors import SlimxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer behind `encode_prompt`, end token included: all that the chat template writes there, such
    as an empty thinking or the name of a channel. Behind token ids the answer stands as it is.

    Raises SlimxError naming the prompt if the template does not continue its own generation prompt with the answer, or
    leaves a part of it out, and if neither template nor tokenizer has an end token."""
    text, end = _written(tokenizer, prompt, answer)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    behind = tokenizer(text[end:], add_special_tokens=False).input_ids
    special = special_ids(tokenizer)
    at = next((at for at, token in enumerate(behind) if token in special), None)
    if at is not None:  # what stands behind the end token, such as a line break, is no part of an answer
        return ids[: len(ids) - len(behind) + at + 1]
    return [*tokenizer(text.rstrip() if end < len(text) else text, add_special_tokens=False).input_ids, _end(tokenizer)]


def check_answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> None:
    """Raise SlimxError where `encode_answer` would, at less cost."""
    text, end = _written(tokenizer, prompt, answer)
    if not text[end:].strip():
        _end(tokenizer)


def _written(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> tuple[str, int]:
    """The text behind a prompt, and where in it the answer ends."""
    if prompt.token_ids is not None:
        return answer, len(answer)
    own, messages = templated(tokenizer, prompt), prompt.messages or []
    try:
        before = own.apply_chat_template(messages, tools=prompt.tools, add_generation_prompt=True, tokenize=False)
        behind = own.apply_chat_template(answered(content=MARKER), tokenize=False).rpartition(MARKER)[2]
        for turn in _turns(answer, apart=before.rstrip().endswith((THOUGHT_BEGINS, THOUGHT_ENDS))):
            whole = own.apply_chat_template([*messages, turn], tools=prompt.tools, tokenize=False)
            if whole.startswith(before) and whole.endswith(behind):
                text, end = whole[len(before) :], len(whole) - len(before) - len(behind)
                if _shows(text[:end], answer):
                    return text, end
    except Exception as error:  # templates raise what they like
        raise _refused(prompt, f"refuses its answer ({' '.join(str(error).split())[:300]})") from error
    if THOUGHT_ENDS in answer and before.rstrip().endswith(
        THOUGHT_BEGINS
    ):  # the prompt opens the thinking, the answer ends it
        text = answer.strip().removeprefix(THOUGHT_BEGINS).lstrip("\n")
        return text, len(text)
    raise _refused(prompt, f"begins replies with {before[-30:]!r} and writes its answer otherwise, or leaves some out")


def _turns(answer: str, *, apart: bool) -> Iterator[dict[str, Any]]:
    """The ways in which templates take an answer: its thinking apart, by the names in use, or all of it as one text.
    `apart`: only the first, as the prompt has begun or ended the thinking."""
    thought, ends, rest = answer.partition(THOUGHT_ENDS)
    if ends:
        thought = thought.strip().removeprefix(THOUGHT_BEGINS).strip()
        yield {"role": "assistant", "content": rest.strip(), "reasoning_content": thought, "thinking": thought}
    if not (ends and apart):
        yield {"role": "assistant", "content": answer}


def _shows(text: str, answer: str) -> bool:
    """Returns True if `text` ends with the answer, and has all of its thinking."""
    *thought, last = (part.strip() for part in re.split(f"{THOUGHT_BEGINS}|{THOUGHT_ENDS}", answer))
    at = 0
    for part in thought:
        if (at := text.find(part, at)) < 0:
            return False
        at += len(part)
    return text[at:].rstrip().endswith(last)


def _refused(prompt: Prompt, why: str) -> SlimxError:
    return SlimxError(
        f"prompt {prompt.id!r}: the chat template {why}; choose its form of thinking in rollout.template, give the "
        "answer with its thinking, or give token_ids",
        code="prompts.demonstration",
        about=prompt.id,
    )


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise SlimxError(
            "the tokenizer has no end token (eos_token), with which answers are to end; name one in its "
            "tokenizer_config.json",
            code="tokenizer.end",
            about="eos_token",
        )
    return tokenizer.eos_token_id
