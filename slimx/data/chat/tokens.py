"""From prompts to token ids: loads a tokenizer, applies its chat template, refuses prompts before a run starts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.data.chat.messages import unseen
from slimx.data.chat.template import check_arguments, with_template
from slimx.data.records import Prompt
from slimx.durable import replace_synced
from slimx.errors import SlimxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model")
"""Files of which a Hugging Face tokenizer has at least one."""
COMPANIONS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Further files that a tokenizer is made of, where it has them."""

MARKER = "(the answer 8d1f)"
"""Stands for an answer where its place in a rendering is to be found."""
BATCH = 512
"""Prompts that a tokenizer is given together: it splits them over the cores, and a third of the work goes."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory; never looks anywhere else.

    Raises SlimxError naming the directory and what is missing or unreadable in it.
    """
    path = Path(path)
    if not path.is_dir():
        raise SlimxError(
            f"{path}: no such directory; give a local Hugging Face directory with a tokenizer",
            code="tokenizer.missing",
            about=str(path),
        )
    # Checked here because transformers makes an empty tokenizer out of a directory that only has a config.json.
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise SlimxError(
            f"{path}: holds no tokenizer (none of {', '.join(VOCABULARIES)}); copy its files there",
            code="tokenizer.missing",
            about=str(path),
        )
    from transformers import AutoTokenizer  # imported late: it takes seconds, and `encode_prompt` does not need it

    try:
        # Without trust_remote_code transformers asks on the terminal whether to run the code of a directory.
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: missing companion files, bad JSON, an unknown tokenizer class
        raise SlimxError(
            f"{path}: its tokenizer cannot be loaded ({_first_line(error)}); check its files",
            code="tokenizer.broken",
            about=str(path),
        ) from error


def copy_tokenizer(path: str | Path, into: Path) -> None:
    """Copy the files of the tokenizer in `path` into a directory, in place of one that is there. Raises SlimxError
    where they cannot be written."""
    into.mkdir(exist_ok=True)
    for name in (*VOCABULARIES, *COMPANIONS):
        if (file := Path(path) / name).is_file():
            replace_synced(into / name, file.read_bytes())
        else:
            (into / name).unlink(missing_ok=True)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids that an engine continues: `token_ids` as they are, or `messages` in the chat template up to the reply.

    Raises SlimxError naming the prompt if the template or the tokenizer refuses it.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    own = templated(tokenizer, prompt)
    try:
        return encode_chat(own, prompt.messages or [], prompt.tools)
    except SlimxError as error:
        raise _refused(prompt, str(error)) from error


def rendered_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Text that the model is given of a prompt, special tokens included. Errors are those of `encode_prompt`."""
    return tokenizer.decode(encode_prompt(tokenizer, prompt), skip_special_tokens=False)


class PromptIds:
    """`encode_prompt` for the rollouts of a group, most of which begin with the same prompt: rendering its template
    takes longer than all else that the driver does for a short request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._rendered: tuple[Any, ...] | None = None
        """Messages, tools and template arguments, copied: hooks may change a prompt's own."""
        self._ids: list[int] = []

    def of(self, prompt: Prompt) -> list[int]:
        """A list of the caller's own. Errors are those of `encode_prompt`."""
        if prompt.token_ids is not None or not prompt.messages:
            return encode_prompt(self.tokenizer, prompt)
        rendered = (prompt.messages, prompt.tools, prompt.template)
        if rendered != self._rendered:
            self._ids = encode_prompt(self.tokenizer, prompt)
            self._rendered = copy.deepcopy(rendered)
        return list(self._ids)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of a conversation and of `tools` in the chat template, up to the reply. Raises SlimxError if the
    template refuses it."""
    try:
        # return_dict=False: transformers 5 returns a BatchEncoding by default, transformers 4 a list.
        ids = tokenizer.apply_chat_template(list(messages), **_given(tools), return_dict=False)
    except Exception as error:  # templates raise what they like, tokenizers raise bare Exception
        raise SlimxError(
            f"the tokenizer or its chat template refuses it ({_first_line(error)})", code="tokenizer.template"
        ) from error
    return [int(token) for token in ids]


def encode_turn(tokenizer: PreTrainedTokenizerBase, content: str, *, role: str, after: Sequence[int]) -> list[int]:
    """`encode_turns` for one turn of text. Raises SlimxError if the template refuses the role."""
    try:
        return encode_turns(tokenizer, [{"role": role, "content": content}], after=after)
    except SlimxError as error:
        raise SlimxError(f"a turn of role {role!r}: {error}; use role user", code=error.code, about=role) from error


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    after: Sequence[int],
    tools: list[dict[str, Any]] | None = None,
    calls: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Token ids that end the assistant's turn, hold `messages` and open the assistant's next, for any chat template.

    The template renders a short conversation whose assistant says a marker; all that it writes behind the marker
    stands between an answer and the next one. The end token is left out if `after`, the tokens so far, ends with it:
    the model sampled it itself. `calls`: tool calls of the assistant's turn, by whose names and ids a template may
    write their results. Raises SlimxError if the template refuses the messages."""

    def behind(later: Sequence[dict[str, Any]]) -> list[int]:
        if calls and (ids := _behind_calls(tokenizer, later, after, tools, calls)):
            return ids
        rendered = _rendered(tokenizer, [*answered(content=MARKER), *later], tools)
        return tokenizer(rendered.partition(MARKER)[2], add_special_tokens=False).input_ids

    try:
        ids = behind(messages)
        lost = unseen(messages, tokenizer.decode(ids), lambda marked: tokenizer.decode(behind(marked)))
    except Exception as error:  # templates raise what they like
        raise SlimxError(
            f"the chat template refuses it after an answer ({_first_line(error)})", code="tokenizer.template"
        ) from error
    if lost is not None:
        raise SlimxError(
            f"the chat template leaves a turn of role {messages[lost]['role']!r} out behind an answer",
            code="tokenizer.template",
        )
    return ids[1:] if ids[:1] == list(after[-1:]) else ids


def _behind_calls(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    after: Sequence[int],
    tools: list[dict[str, Any]] | None,
    calls: Sequence[dict[str, Any]],
) -> list[int]:
    """Token ids from the end token on, where the assistant's turn made `calls`; [] if the template shows no calls."""
    # Not the model's arguments, which have been sampled: they only have to be found again.
    made = [{**call, "function": {**call["function"], "arguments": {"answer": MARKER}}} for call in calls]
    try:
        rendered = _rendered(tokenizer, [*answered(content="", tool_calls=made), *messages], tools)
    except Exception:  # the same messages behind an answer of text show whether they are what it refuses
        return []
    ids = tokenizer(rendered.rpartition(MARKER)[2], add_special_tokens=False).input_ids if MARKER in rendered else []
    ends = special_ids(tokenizer)
    if after[-1] in ends and after[-1] in ids:
        ends = {after[-1]}
    return next((ids[at:] for at, token in enumerate(ids) if token in ends), [])


def answered(**answer: Any) -> list[dict[str, Any]]:
    """Returns a short conversation with this answer."""
    return [{"role": "user", "content": "(the question)"}, {"role": "assistant", **answer}]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens that text never becomes, such as those that end a turn."""
    added = {token for token, written in tokenizer.added_tokens_decoder.items() if written.special}
    return added | set(tokenizer.all_special_ids)


def check_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    path: str | Path,
    max_prompt_tokens: int,
    vocab_size: int,
) -> None:
    """Raise SlimxError on the first prompt of file `path` that has too many tokens, an id outside [0, vocab_size), or
    a turn that the chat template leaves out."""
    for prompt, ids in _encoded(tokenizer, prompts, path):
        if len(ids) > max_prompt_tokens:
            raise SlimxError(
                f"{path}: prompt {prompt.id!r} has {len(ids)} tokens, the limit is {max_prompt_tokens}; "
                "shorten it or raise rollout.max_prompt_tokens",
                code="prompts.length",
                about=prompt.id,
            )
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise SlimxError(
                f"{path}: prompt {prompt.id!r} ({len(ids)} tokens) holds token id {outside[0]}, outside the model's "
                f"vocabulary of {vocab_size}; use the model's own tokenizer",
                code="prompts.token_id",
                about=prompt.id,
            )


def _encoded(
    tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], path: str | Path
) -> Iterator[tuple[Prompt, list[int]]]:
    """Each prompt of file `path` with its `encode_prompt`, once all of its turns are found in it."""
    for several in batched(prompts, BATCH):
        texts = [_whole_text(tokenizer, prompt) if prompt.token_ids is None else None for prompt in several]
        chats = [text for text in texts if isinstance(text, str)]
        try:
            ids = iter(tokenizer(chats, add_special_tokens=False).input_ids if chats else [])
        except Exception:  # whose prompt it is, and what it lacks, is found for one alone
            ids = None
        for prompt, text in zip(several, texts, strict=True):
            try:
                if isinstance(text, SlimxError):
                    raise text
                yield prompt, encode_prompt(tokenizer, prompt) if ids is None or text is None else next(ids)
            except SlimxError as error:
                raise SlimxError(f"{path}: {error}", code=error.code, about=prompt.id) from error


def _whole_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | SlimxError:
    """A prompt in the chat template, or the refusal of one of which a turn is not in it."""

    def render(turns: Sequence[dict[str, Any]]) -> str:
        return _rendered(own, turns, prompt.tools)

    try:
        own, messages = templated(tokenizer, prompt), prompt.messages or []
        text = render(messages)
        lost = unseen(messages, text, render)
    except SlimxError as error:
        return error
    except Exception as error:  # templates raise what they like
        return _refused(prompt, f"the tokenizer or its chat template refuses it ({_first_line(error)})")
    if lost is not None:
        return _refused(prompt, f"the chat template leaves messages[{lost}] of role {messages[lost]['role']!r} out")
    return text


def templated(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> PreTrainedTokenizerBase:
    """The tokenizer that renders with a prompt's template arguments. Raises SlimxError naming the prompt and an
    argument that the chat template never reads."""
    try:
        check_arguments(tokenizer, prompt.template, "its template")
    except SlimxError as error:
        raise _refused(prompt, str(error)) from error
    return with_template(tokenizer, prompt.template)


def _refused(prompt: Prompt, why: str) -> SlimxError:
    return SlimxError(
        f"prompt {prompt.id!r}: {why}; change its messages or give token_ids", code="prompts.template", about=prompt.id
    )


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    return tokenizer.apply_chat_template(list(messages), **_given(tools), tokenize=False)


def _given(tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Arguments of the chat template for everything up to the reply."""
    return {"add_generation_prompt": True} | ({"tools": tools} if tools else {})


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
