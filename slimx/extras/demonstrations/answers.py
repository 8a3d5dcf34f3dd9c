"""Encodes an answer of a data set (a demonstration, or one answer of a preference pair) as the chat template renders
it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slimx.data.chat.responses import THOUGHT_BEGINS, THOUGHT_ENDS
from slimx.data.chat.tokens import MARKER, answered, special_ids, templated
from slimx.data.records import Prompt
from slimx.errors import SlimxError, one_line
from slimx.json_types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> list[int]:
    """Returns the token ids of an answer that follow those of `encode_prompt`, up to and including the end token. They
    contain everything that the chat template renders there, such as an empty thinking block or the name of a channel.
    After a prompt of token ids, the answer is encoded unchanged.

    Raises SlimxError naming the prompt if the template does not render the answer after its own generation prompt or
    omits a part of it, and if neither template nor tokenizer has an end token."""
    text, end = _rendered(tokenizer, prompt, answer)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    suffix = tokenizer(text[end:], add_special_tokens=False).input_ids
    special = special_ids(tokenizer)
    for index, token in enumerate(suffix):
        if token in special:  # text after the end token, such as a line break, is not part of the answer
            return ids[: len(ids) - len(suffix) + index + 1]
    if end < len(text):
        ids = tokenizer(text.rstrip(), add_special_tokens=False).input_ids
    return [*ids, _end(tokenizer)]


def check_answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> None:
    """Raises SlimxError for an answer that `encode_answer` refuses. The check is faster than encoding the answer."""
    text, end = _rendered(tokenizer, prompt, answer)
    if not text[end:].strip():
        _end(tokenizer)


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> tuple[str, int]:
    """Returns the text that the template renders after a prompt, and the index in that text at which the answer
    ends."""
    if prompt.token_ids is not None:
        return answer, len(answer)
    template = templated(tokenizer, prompt)
    messages = prompt.messages or []

    def render(messages: list[Json], *, generation_prompt: bool = False, tools: Sequence[Json] | None = None) -> str:
        text = template.apply_chat_template(
            messages,
            tools=None if tools is None else list(tools),
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        return str(text)

    try:
        before = render(messages, generation_prompt=True, tools=prompt.tools)
        suffix = render(answered(content=MARKER)).rpartition(MARKER)[2]
        opened = before.rstrip()
        for turn in _turns(answer, apart=opened.endswith((THOUGHT_BEGINS, THOUGHT_ENDS))):
            conversation = render([*messages, turn], tools=prompt.tools)
            if conversation.startswith(before) and conversation.endswith(suffix):
                text = conversation[len(before) :]
                end = len(text) - len(suffix)
                if _shows(text[:end], answer):
                    return text, end
    except Exception as error:  # templates may raise any exception
        raise _refused(prompt, f"refuses the answer ({one_line(error)})") from error
    if THOUGHT_ENDS in answer and opened.endswith(THOUGHT_BEGINS):  # the prompt opens the thinking, the answer ends it
        text = answer.strip().removeprefix(THOUGHT_BEGINS).lstrip("\n")
        return text, len(text)
    raise _refused(prompt, f"does not render the complete answer directly after {before[-30:]!r}")


def _turns(answer: str, *, apart: bool) -> Iterator[Json]:
    """Yields assistant messages with the answer in formats that templates accept: with the thinking as a separate field
    under its usual names, or with everything in one string. `apart`: True to yield only the first format, because the
    prompt has started or ended the thinking."""
    thought, ends, rest = answer.partition(THOUGHT_ENDS)
    if ends:
        thought = thought.strip().removeprefix(THOUGHT_BEGINS).strip()
        yield {"role": "assistant", "content": rest.strip(), "reasoning_content": thought, "thinking": thought}
    if not (ends and apart):
        yield {"role": "assistant", "content": answer}


def _shows(text: str, answer: str) -> bool:
    """Returns True if `text` ends with the answer and contains all of its thinking."""
    *thought, last = (part.strip() for part in re.split(f"{THOUGHT_BEGINS}|{THOUGHT_ENDS}", answer))
    at = 0
    for part in thought:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return text[at:].rstrip().endswith(last)


def _refused(prompt: Prompt, reason: str) -> SlimxError:
    return SlimxError(
        f"prompt {prompt.id!r}: the chat template {reason}; set the template's thinking mode in rollout.template, "
        "include the thinking in the answer, or give the prompt as token_ids",
        code="prompts.demonstration",
        about=prompt.id,
    )


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise SlimxError(
            "the tokenizer has no eos_token, but every answer must end with this token; set eos_token in the "
            "tokenizer's tokenizer_config.json",
            code="tokenizer.end",
            about="eos_token",
        )
    return tokenizer.eos_token_id
