"""Lines are cut out of chunks with any boundaries, and no byte of a long one is touched again for later chunks."""

from __future__ import annotations

import random

import pytest

from slimx.rollout.client.stream import Lines

TEXT = b"data: {}\n\ndata: a longer one\n\n\ndata: [DONE]\n\nbegun"


@pytest.mark.parametrize("size", [1, 2, 7, len(TEXT)])
def test_lines_are_those_of_the_whole_wherever_the_chunks_end(size):
    lines = Lines()
    found = [line for at in range(0, len(TEXT), size) for line in lines.feed(TEXT[at : at + size])]
    assert found == TEXT.split(b"\n")[:-1], "what has not ended is no line yet"
    assert lines.feed(b"\n") == [b"begun"]


def test_lines_of_chunks_cut_at_random_are_those_of_the_whole():
    rng = random.Random(0)
    for _ in range(200):
        text = bytes(rng.choice(b"ab\n") for _ in range(rng.randrange(60)))
        cuts = [0, *sorted(rng.randrange(len(text) + 1) for _ in range(5)), len(text)]
        lines = Lines()
        found = [line for start, stop in zip(cuts, cuts[1:], strict=False) for line in lines.feed(text[start:stop])]
        assert found == text.split(b"\n")[:-1]


class CountedChunk(bytes):
    """A chunk that counts the bytes which concatenations and searches of it touch."""

    touched = 0

    def split(self, *arguments):
        CountedChunk.touched += len(self)
        return [CountedChunk(part) for part in super().split(*arguments)]

    def __radd__(self, before):
        CountedChunk.touched += len(before) + len(self)
        return CountedChunk(bytes(before) + bytes(self))

    def __add__(self, after):
        CountedChunk.touched += len(self) + len(after)
        return CountedChunk(bytes(self) + bytes(after))


def test_bytes_touched_by_a_long_line_grow_as_the_line_does(monkeypatch):
    monkeypatch.setattr(CountedChunk, "touched", 0)
    lines, chunks, size = Lines(), 1000, 100
    for _ in range(chunks):
        assert lines.feed(CountedChunk(b"x" * size)) == []
    assert [len(line) for line in lines.feed(CountedChunk(b"\n"))] == [chunks * size]
    assert CountedChunk.touched <= chunks * size + 1, "a search of what had come before would be 500 times that"
