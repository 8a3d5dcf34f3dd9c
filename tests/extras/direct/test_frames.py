"""Frames of what has changed: what they are made of, and that none is applied, whatever it holds, unless it fits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from slimx.extras.direct.ends import frames
from tests.refusals import refused

CHUNK, GROUP = frames.CHUNK, 8
SIZES = (0, 16, 4096 + 48, CHUNK, CHUNK + 16, 3 * CHUNK - 16, 5 * CHUNK)
SHARES = (0.0, 1e-5, 0.02, 0.5, 1.0)
"""Share of elements that change."""


def versions(seed: int, nbytes: int, item: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes, and the same with about `share` of the elements of `item` bytes replaced."""
    draw = np.random.default_rng(seed)
    before = draw.integers(0, 256, nbytes, dtype=np.uint8)
    after = before.view(f"u{item}").copy()
    at = np.flatnonzero(draw.random(len(after)) < share)
    after[at] ^= draw.integers(1, 256, len(at)).astype(after.dtype)
    return torch.from_numpy(before), torch.from_numpy(after.view(np.uint8))


def plain(before: torch.Tensor, after: torch.Tensor, item: int) -> bytes:
    """Encodes the frame by its definition in csrc/delta.h."""
    old, new = (t.numpy().view(f"u{item}") for t in (before, after))
    sizes, bodies, per = [], [], CHUNK // item
    for start in range(0, len(new), per):
        a, b = old[start : start + per], new[start : start + per]
        masks = np.packbits((a != b).reshape(-1, GROUP), axis=1, bitorder="little")[:, 0]
        bits = np.packbits(masks != 0, bitorder="little")
        body = bits.tobytes() + masks[masks != 0].tobytes() + b[a != b].tobytes()
        if not masks.any():
            body = b""
        elif len(body) >= b.nbytes:
            body = b.tobytes()
        sizes.append(len(body))
        bodies.append(body)
    return np.array(sizes, dtype="<u4").tobytes() + b"".join(bodies)


def encoded(before: torch.Tensor | None, after: torch.Tensor, item: int, threads: int = 2) -> torch.Tensor:
    frame = torch.full((frames.room(after.numel()),), 0xEE, dtype=torch.uint8)
    return frame[: frames.encode(before, after, frame, item=item, threads=threads)]


def cases() -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    for number, (nbytes, share) in enumerate((n, s) for n in SIZES for s in SHARES):
        for item in frames.ITEMS:
            yield *versions(number, nbytes, item, share), item


def test_a_frame_turns_old_bytes_into_new_ones_by_its_definition() -> None:
    kinds: set[str] = set()
    for before, after, item in cases():
        frame = encoded(before, after, item)
        assert frame.numpy().tobytes() == plain(before, after, item)
        chunks = -(-len(after) // CHUNK)
        for k, size in enumerate(frame[: 4 * chunks].numpy().view("<u4").tolist()):
            whole = min(CHUNK, len(after) - k * CHUNK)
            kinds.add({0: "nothing", whole: "whole"}.get(size, "changes"))
        memory = before.clone()
        frames.apply(frame, memory, item=item)
        assert torch.equal(memory, after)
    assert kinds == {"nothing", "whole", "changes"}


def test_a_frame_without_a_base_makes_the_new_bytes_of_any() -> None:
    before, after = versions(1, 2 * CHUNK + 32, 2, 0.1)
    frame = encoded(None, after, 2)
    assert len(frame) == frames.room(len(after))
    frames.apply(frame, before, item=2)
    assert torch.equal(before, after)


def test_few_changes_take_few_bytes() -> None:
    before, after = versions(2, 16 * CHUNK, 2, 0.02)
    share = len(encoded(before, after, 2)) / len(after)
    # 2% of the elements, a byte for each of 15% of the groups of 16 bytes, a bit for each group.
    assert 0.030 < share < 0.040


def test_changes_that_take_as_much_as_the_chunk_are_sent_as_the_chunk() -> None:
    before = torch.arange(16, dtype=torch.uint8)
    after = before.clone()
    after[:13] += 100  # a byte of group bits, two masks, 13 elements
    frame = encoded(before, after, 1)
    assert frame[4:].tolist() == after.tolist()
    assert frame.numpy().tobytes() == plain(before, after, 1)


def test_the_number_of_threads_does_not_matter() -> None:
    before, after = versions(3, 9 * CHUNK + 16, 1, 0.02)
    one, four = (encoded(before, after, 1, threads) for threads in (1, 4))
    assert torch.equal(one, four)


def test_no_damaged_frame_is_applied_in_part() -> None:
    """Every bit of what tells the sizes and the places of changes, and every length."""
    before, after = versions(4, 4096, 2, 0.01)
    frame = encoded(before, after, 2)
    header = 4 + 4096 // 16 // 8  # size and group bits
    refusals = 0
    for at in range(8 * header):
        bad = frame.clone()
        bad[at // 8] ^= 1 << at % 8
        memory = before.clone()
        with refused("delta.frame"):
            frames.apply(bad, memory, item=2)
        assert torch.equal(memory, before)
        refusals += 1
    for length in range(len(frame)):
        with refused("delta.frame"):
            frames.apply(frame[:length].clone(), before.clone(), item=2)
    with refused("delta.frame"):
        frames.apply(torch.cat([frame, frame[:1]]), before.clone(), item=2)
    assert refusals == 8 * header


@pytest.mark.parametrize("body", [[0b1, 0], [0b11, 1, 0, 9], [0b100, 1, 9]], ids=["none", "one none", "beyond"])
def test_a_group_without_changes_and_a_group_beyond_the_chunk_are_refused(body: list[int]) -> None:
    memory = torch.arange(16, dtype=torch.uint8)  # two groups of one-byte elements
    with refused("delta.frame"):
        frames.apply(torch.tensor([len(body), 0, 0, 0, *body], dtype=torch.uint8), memory, item=1)
    assert memory.tolist() == list(range(16))


def test_random_bytes_are_no_frames_and_leave_memory_alone() -> None:
    draw = np.random.default_rng(0)
    guarded = torch.full((3 * 4096,), 7, dtype=torch.uint8)
    memory = guarded[4096:8192]
    for _ in range(2000):
        body = draw.integers(0, 256, int(draw.integers(1, 4096)), dtype=np.uint8)
        body[: 4096 // 16 // 8] &= draw.integers(0, 256, 4096 // 16 // 8, dtype=np.uint8)[: len(body)]
        frame = torch.from_numpy(np.concatenate([np.array([len(body)], dtype="<u4").view(np.uint8), body]))
        with refused("delta.frame"):
            frames.apply(frame, memory, item=2)
    assert bool((guarded == 7).all())


@pytest.mark.parametrize(
    ("memory", "item"),
    [
        (torch.zeros(15, dtype=torch.uint8), 2),
        (torch.zeros(16, dtype=torch.uint8), 4),
        (torch.zeros(32, dtype=torch.uint8)[::2], 1),
        (torch.zeros(16, dtype=torch.int8), 1),
    ],
    ids=["size", "item", "strides", "dtype"],
)
def test_memory_that_has_no_frames_is_refused(memory: torch.Tensor, item: int) -> None:
    with refused("delta.argument"):
        frames.apply(torch.zeros(64, dtype=torch.uint8), memory, item=item)
    with refused("delta.argument"):
        frames.encode(None, memory, torch.zeros(64, dtype=torch.uint8), item=item)


def test_a_frame_needs_room() -> None:
    with refused("delta.argument"):
        frames.encode(None, torch.zeros(16, dtype=torch.uint8), torch.zeros(19, dtype=torch.uint8), item=2)
