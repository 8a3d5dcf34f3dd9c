"""One question to another process and its answer, of which either is in time or the process is killed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from slimx.runtime.exchange import exchange


class Peer:
    """The connection to a process that answers at once, or only when it is being killed."""

    def __init__(self, *, late: bool):
        self.late, self.killed = late, threading.Event()

    def send(self, message: Any) -> None:
        """Nothing waits for it."""

    def recv(self) -> str:
        if self.late:
            assert self.killed.wait(60)
        return "answer"


def test_an_answer_that_comes_while_its_process_is_killed_is_too_late() -> None:
    """Returned, it would let the next question fail by a signal without a reason."""
    peer = Peer(late=True)
    with pytest.raises(TimeoutError):
        exchange(peer, "question", 0.01, peer.killed.set)


def test_a_process_that_answers_in_time_is_not_killed_afterwards() -> None:
    peer = Peer(late=False)
    assert exchange(peer, "question", 30, peer.killed.set) == "answer"
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join(60)
    assert not peer.killed.is_set()
