"""The conversations of one rollout as a tree of sampled answers, of which every path is a trajectory.

An agent sends all messages with every request. Where they begin with a conversation that was answered here, word for
word, the request goes on from that conversation's own tokens, and only what is new is tokenized. Where they do not,
a new branch begins: another agent's conversation, a summary instead of the past, an answer that the agent rewrote.

    prompt -> answer -> tool's result -> answer      trajectory g/0
                     -> other question -> answer     trajectory g/0-1: its first answer is context, not trained again
    summary -> answer                                trajectory g/0-2
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slimx.data.chat.tokens import encode_chat, encode_turns
from slimx.data.records import Trajectory
from slimx.extras.agents.proxy.request import Json, Message
from slimx.rollout.client.completion import Completion

if TYPE_CHECKING:
    from slimx.rollout.hooks import RolloutContext


@dataclass(eq=False, slots=True)
class Answer:
    """One sampled answer, and the tokens between it and the answer before."""

    parent: Answer | None
    before: array[int]
    """Token ids before the first answer: the whole prompt. An array, as thousands of agents wait for their tools."""
    completion: Completion
    continued: bool = False
    """True if another answer goes on from here."""
    train: bool = True
    """False for one that a grammar made, whose tokens stay out of the loss."""
    stopped: bool = False
    """True if the agent wanted to go on from here and had reached a limit."""
    calls: list[Json] = field(default_factory=list)
    """Its tool calls, with the ids that the agent got."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a request in the tree."""

    parent: Answer | None
    before: array[int]
    token_ids: array[int]
    """All tokens up to the answer."""
    digest: bytes
    """Digest of the request's messages and tools."""


class Conversations:
    """The conversations of one rollout. Errors of the chat template are SlimxErrors."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._answers: list[Answer] = []
        self._by_digest: dict[bytes, Answer] = {}

    def place(self, messages: Sequence[Message], tools: list[Json] | None) -> Position:
        """The position at which these messages are answered: after the longest conversation that they begin with."""
        digests = [_digest(b"", tools)]
        for message in messages:
            digests.append(_digest(digests[-1], _content(message)))
        for known in range(len(messages) - 1, 0, -1):
            if (parent := self._by_digest.get(digests[known])) is not None:
                so_far, new = _tokens(parent), _with_ids(parent, messages[known - 1], messages[known:])
                ids = encode_turns(self._tokenizer, new, after=so_far, tools=tools, calls=parent.calls)
                before = array("i", ids)
                return Position(parent, before, so_far + before, digests[-1])
        before = array("i", encode_chat(self._tokenizer, messages, tools))
        return Position(None, before, before, digests[-1])

    def add(self, place: Position, completion: Completion, message: Message, *, train: bool = True) -> None:
        """Keep what was sampled at `place`, and the message by which the agent knows it. `train=False` keeps its tokens
        out of the loss."""
        calls = message.get("tool_calls", [])
        answer = Answer(place.parent, place.before, completion, train=train, calls=calls)
        if place.parent is not None:
            place.parent.continued = True
        self._answers.append(answer)
        # Of two answers of the same words, but maybe other tokens, the later one is continued.
        self._by_digest[_digest(place.digest, _content(message))] = answer

    def trajectories(self, ctx: RolloutContext, metadata: Json) -> list[Trajectory]:
        """One for each answer that was not continued, in the order of these; an answer that several share is trained in
        the first."""
        out: list[Trajectory] = []
        trained: set[int] = set()
        for leaf in self._answers:
            if leaf.continued:
                continue
            path = _path(leaf)
            draft = ctx.draft(path[0].before, suffix=f"-{len(out)}" if out else "")
            for number, answer in enumerate(path):
                if number:
                    draft.add_inserted(answer.before)
                draft.add_sampled(answer.completion, train=answer.train and id(answer) not in trained)
                trained.add(id(answer))
            out.append(draft.finish(metadata=metadata | {"branch": len(out)}))
            if leaf.stopped:
                out[-1].status = "truncated"
        return out


def _path(leaf: Answer) -> list[Answer]:
    """From the first answer of the conversation to `leaf`."""
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _tokens(leaf: Answer) -> array[int]:
    out = array("i")
    for answer in _path(leaf):
        out += answer.before
        out.extend(answer.completion.token_ids.tolist())
    return out


def _with_ids(answer: Answer, sent: Message, new: Sequence[Message]) -> list[Message]:
    """`new`, the messages behind `answer`, with its own ids of calls where the agent, which sends it as `sent`, has
    others."""
    pairs = zip(sent.get("tool_calls", []), answer.calls, strict=True)
    ids = {theirs["id"]: ours["id"] for theirs, ours in pairs}
    return [
        {**each, "tool_call_id": ids[each["tool_call_id"]]} if each.get("tool_call_id") in ids else each for each in new
    ]


def _content(message: Message) -> list[Any]:
    """The content by which two messages are the same. White space around an answer, the ids of its tool calls and the
    way in which their arguments are written do not count: agents rewrite these, and the sampled tokens stand anyway."""
    if message["role"] != "assistant":
        return [message["role"], message["content"], message.get("name"), message.get("tool_call_id")]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return ["assistant", message["content"].strip(), calls]


def _digest(before: bytes, content: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(content, sort_keys=True).encode()).digest()
