"""Cuts the lines of a streamed answer out of the chunks in which it comes."""

from __future__ import annotations


class Lines:
    """Lines of a stream of bytes. Every byte is searched once and joined once, however long its line is: the last event
    of an answer brings the experts of all its tokens, tens of megabytes, in one line."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Chunks of the line that has not ended."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in `chunk`, without their ends."""
        *ended, rest = chunk.split(b"\n")
        if ended:
            self._begun.append(ended[0])
            ended[0] = b"".join(self._begun)
            self._begun.clear()
        if rest:
            self._begun.append(rest)
        return ended
