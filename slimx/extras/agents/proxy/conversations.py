"""The conversations of one rollout as a tree of sampled answers, in which every path from a root is a trajectory.

An agent sends all messages with every request. If they start with an earlier conversation, word for word, the request
continues from that conversation's tokens, and only the new messages are tokenized. Otherwise a new branch starts:
another agent's conversation, a summary in place of earlier messages, or an answer that the agent rewrote.

    prompt -> answer -> tool's result -> answer      trajectory g/0
                     -> other question -> answer     trajectory g/0-1: does not train on the first answer again
    summary -> answer                                trajectory g/0-2
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slimx.data.chat.tokens import encode_chat, encode_turns
from slimx.data.records import Image, Trajectory
from slimx.extras.agents.proxy.bodies import identity
from slimx.extras.agents.proxy.request import Json, Message
from slimx.extras.vision.prompts.prepare import without_sources
from slimx.rollout.client.completion import Completion

if TYPE_CHECKING:
    from slimx.rollout.hooks import RolloutContext

Starts = dict[bytes, "array[int]"]
"""Token ids of first requests by the digest of their messages and tools."""
STARTS = 8
"""Maximum number of first requests of which a group shares the token ids."""


@dataclass(eq=False, slots=True)
class Answer:
    """One sampled answer (an assistant message), and the tokens between the previous answer and this one."""

    parent: Answer | None
    before: array[int]
    """Token ids between the parent answer and this one; for a first answer, the whole prompt. An array saves memory
    while thousands of agents wait for their tools."""
    completion: Completion
    continued: bool = False
    """True if a later answer continues the conversation after this one."""
    train: bool = True
    """False for an answer that is excluded from the loss, because a grammar constrained its tokens."""
    stopped: bool = False
    """True if the agent tried to continue the conversation after a limit was reached."""
    calls: list[Json] = field(default_factory=list)
    """Tool calls of the answer, with the ids that the agent received."""
    images: Sequence[Image] = ()
    """Images in `before`, with indices counted from its first token."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a request in the tree of a rollout's conversations, whose new messages are not tokenized yet."""

    parent: Answer | None
    """Answer that the request continues; None for a new conversation."""
    messages: list[Message]
    """Messages that follow `parent`, with a placeholder for each image."""
    tools: list[Json] | None
    digest: bytes
    """See `Position`."""
    sources: list[object]
    """Images of `messages`."""

    @property
    def characters(self) -> int:
        """Number of characters of the messages' text."""
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a request in the tree of a rollout's conversations."""

    parent: Answer | None
    before: array[int]
    token_ids: array[int]
    """Ids of all tokens that precede the answer."""
    digest: bytes
    """Digest of the request's tools and messages. The answer is stored under a digest that extends this one; with that
    digest, later requests find the conversation that they continue."""
    sources: Sequence[object] = ()
    """Images that have one placeholder each in `before`; () once `placed` has replaced these placeholders."""
    images: Sequence[Image] = ()
    """Images in `before`, with indices counted from its first token."""

    @property
    def shown(self) -> list[Image]:
        """All images in `token_ids`."""
        out: list[Image] = []
        start = 0
        for answer in _path(self.parent):
            out += _moved(answer.images, start)
            start += len(answer.before) + len(answer.completion.token_ids)
        return out + _moved(self.images, start)

    def placed(self, before: Sequence[int], images: Sequence[Image]) -> Position:
        """Returns this position with the ids `before`, in which every embedding of `images` has a placeholder."""
        ids = array("i", before)
        past = self.token_ids[: len(self.token_ids) - len(self.before)]
        return replace(self, before=ids, token_ids=past + ids, sources=(), images=images)


class Conversations:
    """Conversations of one rollout."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.starts: Starts = {}
        """Token ids of first messages, which the rollouts of a group share."""
        self._answers: list[Answer] = []
        self._by_digest: dict[bytes, Answer] = {}

    def locate(self, messages: Sequence[Message], tools: list[Json] | None) -> Place:
        """Returns the place of the answer to `messages` in the tree. The answer continues the longest earlier
        conversation with which `messages` start, or else begins a new one."""
        digests = [_digest(b"", tools)]
        for message in messages:
            digests.append(_digest(digests[-1], _content(message)))
        for known in range(len(messages) - 1, 0, -1):
            parent = self._by_digest.get(digests[known])
            if parent is not None:
                new, sources = without_sources(_with_ids(parent, messages[known - 1], messages[known:]))
                return Place(parent, new, tools, digests[-1], sources)
        new, sources = without_sources(messages)
        return Place(None, new, tools, digests[-1], sources)

    def known(self, place: Place) -> Position | None:
        """Returns the position of a place if another rollout of the group began with the same messages and tools, whose
        tokens are then known; otherwise None."""
        before = self.starts.get(_start(place)) if place.parent is None else None
        return None if before is None else Position(None, before, before, place.digest, place.sources)

    def tokenized(self, place: Place) -> Position:
        """Returns the position of a place, after tokenizing its messages. Raises SlimxError if the chat template
        refuses them."""
        parent = place.parent
        if parent is None:
            before = array("i", encode_chat(self._tokenizer, place.messages, place.tools))
            return Position(None, before, before, place.digest, place.sources)
        past = _tokens(parent)
        ids = encode_turns(self._tokenizer, place.messages, after=past, tools=place.tools, calls=parent.calls)
        before = array("i", ids)
        return Position(parent, before, past + before, place.digest, place.sources)

    def share(self, place: Place, position: Position) -> None:
        """Shares the tokens of a first request with the other rollouts of the group."""
        if place.parent is None:
            if len(self.starts) >= STARTS:
                del self.starts[next(iter(self.starts))]
            self.starts[_start(place)] = position.before

    def add(self, position: Position, completion: Completion, message: Message, *, train: bool = True) -> None:
        """Adds a sampled answer at `position`.

        `message`: the answer as the agent receives it. `train`: False to exclude the answer's tokens from the loss.
        """
        calls = message.get("tool_calls", [])
        answer = Answer(position.parent, position.before, completion, train=train, calls=calls, images=position.images)
        if position.parent is not None:
            position.parent.continued = True
        self._answers.append(answer)
        # If two answers have the same text, perhaps with different tokens, requests continue the later one.
        self._by_digest[_digest(position.digest, _content(message))] = answer

    def trajectories(self, ctx: RolloutContext, metadata: Json) -> list[Trajectory]:
        """Returns one trajectory for each answer that no other answer continues, in the order of sampling.

        An answer that several trajectories share is trained on in the first one only.
        """
        out: list[Trajectory] = []
        trained: set[int] = set()
        for leaf in self._answers:
            if leaf.continued:
                continue
            path = _path(leaf)
            draft = ctx.draft(path[0].before, suffix=f"-{len(out)}" if out else "")
            draft.images += path[0].images
            for index, answer in enumerate(path):
                if index:
                    draft.add_inserted(answer.before, images=answer.images)
                draft.add_sampled(answer.completion, train=answer.train and id(answer) not in trained)
                trained.add(id(answer))
            out.append(draft.finish(metadata=metadata | {"branch": len(out)}))
            if leaf.stopped:
                out[-1].status = "truncated"
        return out


def _path(leaf: Answer | None) -> list[Answer]:
    """Returns the answers of the conversation, from the first one through `leaf`; [] for None."""
    path: list[Answer] = []
    while leaf is not None:
        path.append(leaf)
        leaf = leaf.parent
    return path[::-1]


def _moved(images: Sequence[Image], by: int) -> list[Image]:
    """Returns `images` with indices that count from `by` tokens earlier."""
    return [replace(image, start=image.start + by, stop=image.stop + by) for image in images]


def _tokens(leaf: Answer) -> array[int]:
    out = array("i")
    for answer in _path(leaf):
        out += answer.before
        out.frombytes(np.asarray(answer.completion.token_ids, np.int32).tobytes())
    return out


def _with_ids(answer: Answer, sent: Message, new: Sequence[Message]) -> list[Message]:
    """Returns the messages `new`, which follow `answer`, with the original ids of tool calls.

    `sent`: the answer as the agent sent it back, perhaps with other ids.
    """
    pairs = zip(sent.get("tool_calls", []), answer.calls, strict=True)
    ids = {theirs["id"]: ours["id"] for theirs, ours in pairs}
    messages = []
    for message in new:
        id = message.get("tool_call_id")
        messages.append({**message, "tool_call_id": ids[id]} if id in ids else message)
    return messages


def _content(message: Message) -> list[object]:
    """Returns the parts of a message by which it is recognized when the agent sends it again.

    Leaves out white space around an answer, ids of tool calls and the formatting of arguments, which agents may change
    although the sampled tokens stay the same.
    """
    if message["role"] != "assistant":
        return [message["role"], message["content"], message.get("name", ""), message.get("tool_call_id", "")]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return ["assistant", message["content"].strip(), calls]


def _start(place: Place) -> bytes:
    """Returns a digest of a new conversation's messages and tools, which unlike `Position.digest` covers all that the
    chat template may render, such as the order of a tool's keys."""
    return hashlib.sha256(identity([place.tools, place.messages])).digest()


def _digest(before: bytes, content: object) -> bytes:
    return hashlib.sha256(before + identity(content, "sorted")).digest()
