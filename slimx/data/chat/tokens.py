"""Token ids of prompts: loads tokenizers, applies chat templates, and checks prompts before a run starts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, cast

from slimx.data.chat.messages import unseen
from slimx.data.chat.template import check_arguments, with_template
from slimx.data.records import Image, Prompt
from slimx.durable import replace_synced
from slimx.errors import SlimxError, not_installed, one_line
from slimx.json_types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model")
"""Names of vocabulary files; a Hugging Face tokenizer directory contains at least one of them."""
COMPANIONS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Names of files that a Hugging Face tokenizer directory may contain in addition to a vocabulary file, including those
of a processor of images."""

MARKER = "(the answer 8d1f)"
"""Placeholder for the assistant's answer in a short conversation; its position in the rendered text shows what the chat
template puts after an answer."""
BATCH = 512
"""Number of prompts per tokenizer call. A batched call uses all cores, and takes a third less work than one call per
prompt."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in a local Hugging Face directory.

    Raises SlimxError naming the directory and what is missing or unreadable.
    """
    path = Path(path)
    if not path.is_dir():
        raise SlimxError(
            f"{path} is not a local directory; use a directory with the files of a Hugging Face tokenizer",
            code="tokenizer.missing",
            about=str(path),
        )
    # Checked here, because transformers creates an empty tokenizer for a directory with only a config.json.
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise SlimxError(
            f"{path}: the directory has no tokenizer (none of {', '.join(VOCABULARIES)}); copy the model's tokenizer "
            "files into this directory",
            code="tokenizer.missing",
            about=str(path),
        )
    try:
        from transformers import AutoTokenizer  # a slow import, which `encode_prompt` does not need
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "transformers") from None
    try:
        # Without this argument transformers asks on the terminal whether to run the code of a directory.
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # missing companion files, invalid JSON, an unknown tokenizer class
        raise SlimxError(
            f"{path}: the tokenizer cannot be loaded ({one_line(error)}); copy the tokenizer's files into this "
            "directory again",
            code="tokenizer.broken",
            about=str(path),
        ) from error


def copy_tokenizer(path: str | Path, into: Path) -> None:
    """Copies the tokenizer files of directory `path` to directory `into`, except files that are already there, and
    removes the files of an earlier tokenizer from `into`. Raises SlimxError if they cannot be written."""
    into.mkdir(parents=True, exist_ok=True)
    for name in (*VOCABULARIES, *COMPANIONS):
        file = Path(path) / name
        target = into / name
        if not file.is_file():
            target.unlink(missing_ok=True)
        elif not target.is_file() or target.read_bytes() != file.read_bytes():
            replace_synced(target, file.read_bytes())


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Returns the token ids that an engine continues: the prompt's `token_ids`, or its `messages` rendered by the chat
    template up to the start of the reply.

    Raises SlimxError naming the prompt if the template or the tokenizer refuses it.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    prompt_tokenizer = templated(tokenizer, prompt)
    try:
        return encode_chat(prompt_tokenizer, prompt.messages or [], prompt.tools)
    except SlimxError as error:
        raise _refused(prompt, str(error)) from error


def rendered_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Returns a prompt as the text that the model reads, including special tokens. Raises SlimxError as `encode_prompt`
    does."""
    return str(tokenizer.decode(encode_prompt(tokenizer, prompt), skip_special_tokens=False))


class PromptIds:
    """Cache of `encode_prompt` for the rollouts of a group, most of which have the same prompt. For a short request,
    rendering the template is the driver's largest cost."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._rendered: tuple[object, ...] | None = None
        """Messages, tools and template arguments of the cached ids. They are copies, because hooks may change the
        prompt's own objects."""
        self._ids: list[int] = []
        self.images: list[Image] = []
        """Images of the prompt, which `prepare` sets."""

    async def prepare(self, prompt: Prompt) -> None:
        """Prepares the prompt's images. Called before `of`, possibly several times; does nothing, because only runs
        with `trainer.vision` have images."""

    async def turn(self, content: Sequence[Json], role: str, after: Sequence[int]) -> tuple[list[int], list[Image]]:
        """Returns `RolloutContext.turn_with_images`. Raises SlimxError, because only runs with `trainer.vision` have
        images."""
        raise SlimxError("the run cannot show images in turns; set trainer.vision", code="tokenizer.image")

    def of(self, prompt: Prompt) -> list[int]:
        """Returns a new list of the prompt's token ids. Raises SlimxError as `encode_prompt` does."""
        if prompt.token_ids is not None or not prompt.messages:
            return encode_prompt(self.tokenizer, prompt)
        rendered = (prompt.messages, prompt.tools, prompt.template)
        if rendered != self._rendered:
            self._ids = encode_prompt(self.tokenizer, prompt)
            self._rendered = copy.deepcopy(rendered)
        return list(self._ids)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Json], tools: list[Json] | None = None
) -> list[int]:
    """Returns the token ids of `messages` and `tools` rendered by the chat template, up to the start of the assistant's
    reply. Raises SlimxError if the template refuses them."""
    try:
        # return_dict=False: transformers 5 returns a BatchEncoding by default, transformers 4 a list.
        ids = tokenizer.apply_chat_template(list(messages), **_arguments(tools), return_dict=False)
    except Exception as error:  # templates may raise any exception, tokenizers a bare Exception
        raise SlimxError(
            f"the conversation cannot be encoded with the chat template ({one_line(error)}); use "
            "only roles and fields that the template supports",
            code="tokenizer.template",
        ) from error
    return [int(token) for token in cast(list[int], ids)]


def encode_turn(tokenizer: PreTrainedTokenizerBase, content: str, *, role: str, after: Sequence[int]) -> list[int]:
    """Returns the token ids of one text message of `role`, as `encode_turns` does. Raises SlimxError if the template
    refuses the role."""
    try:
        return encode_turns(tokenizer, [{"role": role, "content": content}], after=after)
    except SlimxError as error:
        raise SlimxError(
            f"a message with the role {role!r} cannot be encoded ({error}); use the role `user` instead",
            code=error.code,
            about=role,
        ) from error


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Json],
    *,
    after: Sequence[int],
    tools: list[Json] | None = None,
    calls: Sequence[Json] = (),
) -> list[int]:
    """Returns the token ids that end the assistant's turn, contain `messages` and open the assistant's next turn.

    To work with any chat template, the function renders a short conversation in which a marker stands for the
    assistant's answer, and tokenizes the text after the marker. The end-of-turn token is omitted if `after`, the tokens
    so far, already ends with it because the model sampled it. `tools`: tools of the conversation. `calls`: tool calls
    of the assistant's turn, whose names and ids a template may need to render the tools' results. Raises SlimxError if
    the template refuses the messages."""

    def encode_after(later: Sequence[Json]) -> list[int]:
        if calls:
            ids = _encode_after_calls(tokenizer, later, after, tools, calls)
            if ids:
                return ids
        rendered = _rendered(tokenizer, [*answered(content=MARKER), *later], tools)
        return _encoded_text(tokenizer, rendered.partition(MARKER)[2])

    def render_after(later: Sequence[Json]) -> str:
        return str(tokenizer.decode(encode_after(later)))

    try:
        ids = encode_after(messages)
        lost = unseen(messages, str(tokenizer.decode(ids)), render_after)
    except Exception as error:  # templates may raise any exception
        raise SlimxError(
            f"the chat template rejects messages after an assistant's answer ({one_line(error)}); "
            "use only roles and fields that the template supports after an answer",
            code="tokenizer.template",
        ) from error
    if lost is not None:
        raise SlimxError(
            f"the chat template omits a message with the role {messages[lost]['role']!r} after an assistant's "
            "answer; use a role that the template renders in this place",
            code="tokenizer.template",
        )
    return ids[1:] if ids[:1] == list(after[-1:]) else ids


def _encoded_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of `text` without special tokens around it. Asks the library below transformers if it is
    set as transformers would set it, which takes two thirds of the time: no offsets are computed."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or fast.truncation or fast.padding or fast.encode_special_tokens != tokenizer.split_special_tokens:
        return tokenizer(text, add_special_tokens=False).input_ids
    return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _encode_after_calls(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Json],
    after: Sequence[int],
    tools: list[Json] | None,
    calls: Sequence[Json],
) -> list[int]:
    """Returns the token ids that `encode_turns` needs after an assistant's turn with tool `calls`, from the end-of-turn
    token on; [] if the template does not render calls."""
    # A marker instead of the sampled arguments, because only their position is needed.
    marked = []
    for call in calls:
        function = {**call["function"], "arguments": {"answer": MARKER}}
        marked.append({**call, "function": function})
    try:
        rendered = _rendered(tokenizer, [*answered(content="", tool_calls=marked), *messages], tools)
    except Exception:  # rendering the messages after an answer of text shows if they are the cause
        return []
    if MARKER not in rendered:
        return []
    ids = _encoded_text(tokenizer, rendered.rpartition(MARKER)[2])
    ends = special_ids(tokenizer)
    if after[-1] in ends and after[-1] in ids:
        ends = {after[-1]}
    for index, token in enumerate(ids):
        if token in ends:
            return ids[index:]
    return []


def answered(**answer: object) -> list[Json]:
    """Returns a short conversation that ends with an assistant message. `answer`: fields of this message, such as
    content or tool_calls."""
    return [{"role": "user", "content": "(the question)"}, {"role": "assistant", **answer}]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of all special tokens, including those that end a turn."""
    ids = set(tokenizer.all_special_ids)
    for token, properties in tokenizer.added_tokens_decoder.items():
        if properties.special:
            ids.add(token)
    return ids


def check_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    path: str | Path,
    max_prompt_tokens: int,
    vocab_size: int,
) -> None:
    """Raises SlimxError for the first prompt of file `path` that has too many tokens or a token id outside [0,
    vocab_size), or that the chat template refuses or renders without one of its messages."""
    for prompt, ids in _encoded(tokenizer, prompts, path):
        if len(ids) > max_prompt_tokens:
            raise SlimxError(
                f"{path}: prompt {prompt.id!r} has {len(ids)} tokens, more than "
                f"rollout.max_prompt_tokens={max_prompt_tokens}; shorten the prompt, or raise this limit",
                code="prompts.length",
                about=prompt.id,
            )
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise SlimxError(
                f"{path}: prompt {prompt.id!r} ({len(ids)} tokens) has token id {outside[0]}, which is outside the "
                f"model's vocabulary of {vocab_size} tokens; encode the prompt with the model's tokenizer",
                code="prompts.token_id",
                about=prompt.id,
            )


def _encoded(
    tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], path: str | Path
) -> Iterator[tuple[Prompt, list[int]]]:
    """Yields each prompt of file `path` with its token ids (`encode_prompt`), after checking that the chat template
    omits no message."""
    for batch in batched(prompts, BATCH):
        texts = [_full_text(tokenizer, prompt) if prompt.token_ids is None else None for prompt in batch]
        chats = [text for text in texts if isinstance(text, str)]
        chat_ids: Iterator[list[int]] | None = iter(())
        if chats:
            try:
                chat_ids = iter(tokenizer(chats, add_special_tokens=False).input_ids)
            except Exception:  # encoding one by one finds the prompt and the reason
                chat_ids = None
        for prompt, text in zip(batch, texts, strict=True):
            try:
                if isinstance(text, SlimxError):
                    raise text
                if chat_ids is None or text is None:
                    yield prompt, encode_prompt(tokenizer, prompt)
                else:
                    yield prompt, next(chat_ids)
            except SlimxError as error:
                raise SlimxError(f"{path}: {error}", code=error.code, about=prompt.id) from error


def _full_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | SlimxError:
    """Returns a prompt's messages rendered by the chat template. If the template omits a message or refuses the prompt,
    returns a SlimxError instead of raising it."""
    messages = prompt.messages or []
    try:
        prompt_tokenizer = templated(tokenizer, prompt)

        def render(turns: Sequence[Json]) -> str:
            return _rendered(prompt_tokenizer, turns, prompt.tools)

        text = render(messages)
        lost = unseen(messages, text, render)
    except SlimxError as error:
        return error
    except Exception as error:  # templates may raise any exception
        problem = f"the chat template cannot render the messages ({one_line(error)})"
    else:
        if lost is None:
            return text
        problem = f"the chat template omits messages[{lost}] of role {messages[lost]['role']!r}"
    return _refused(prompt, problem + "; change the prompt's messages or template, or set token_ids instead")


def templated(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> PreTrainedTokenizerBase:
    """Returns a tokenizer whose chat template has the prompt's template arguments as defaults. If the chat template
    does not use one of the arguments, raises SlimxError naming it and the prompt."""
    try:
        check_arguments(tokenizer, prompt.template, "its template")
    except SlimxError as error:
        raise _refused(prompt, str(error)) from error
    return with_template(tokenizer, prompt.template)


def _refused(prompt: Prompt, problem: str) -> SlimxError:
    return SlimxError(f"prompt {prompt.id!r}: {problem}", code="prompts.template", about=prompt.id)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Json], tools: list[Json] | None) -> str:
    return cast(str, tokenizer.apply_chat_template(list(messages), **_arguments(tools), tokenize=False))


def _arguments(tools: list[Json] | None) -> Json:
    """Returns the arguments of `apply_chat_template` for a rendering up to the start of the assistant's reply."""
    arguments: Json = {"add_generation_prompt": True}
    if tools:
        arguments["tools"] = tools
    return arguments
