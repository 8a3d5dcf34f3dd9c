"""Images that several rollouts show at once are prepared by one process."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimx.extras.vision.images import processing
from slimx.extras.vision.images.store import Grid, ImageStore
from slimx.extras.vision.prompts.prepare import Preparation
from tests.extras.vision.picture_stand import TOKEN, picture, write_model
from tests.extras.vision.vision_stand import run, seeing
from tests.refusals import refused


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Files that are prepared, in a thread instead of processes and slowly enough that others ask for them meanwhile. A
    file without pixels is refused."""
    calls: list[bytes] = []
    pool = ThreadPoolExecutor(1)

    def prepare(data: bytes, digest: str) -> Grid | str:
        calls.append(data)
        time.sleep(0.1)
        if not data.startswith(b"\x89PNG"):
            return "it has no pixels"
        store.save(digest, np.zeros((4, 8), np.float32), (1, 2, 2))
        return (1, 2, 2)

    store: Any = None

    def workers(preparation: Preparation) -> ThreadPoolExecutor:
        nonlocal store
        store = ImageStore(preparation._store.directory)
        return pool

    monkeypatch.setattr(processing, "prepare", prepare)
    monkeypatch.setattr(Preparation, "_workers", workers)
    return calls


def preparation(directory: Path) -> Preparation:
    write_model(directory)
    config = run(directory)
    return Preparation(config, seeing(config))


async def test_an_image_that_is_shown_at_once_is_prepared_once(tmp_path, prepared):
    images = preparation(tmp_path)
    one, other = picture(seed=1), picture(seed=2)
    found = await asyncio.gather(*(images.expand([TOKEN], [data]) for data in [one, other, one, one]))
    assert sorted(prepared) == sorted([one, other])
    assert found[0] == found[2] == found[3] != found[1]
    assert await images.expand([TOKEN], [one]) == found[0] and len(prepared) == 2


async def test_a_cancelled_rollout_leaves_the_image_to_the_others(tmp_path, prepared):
    images = preparation(tmp_path)
    before = asyncio.create_task(images.expand([TOKEN], [picture(seed=1)]))
    while not prepared:
        await asyncio.sleep(0.01)
    first, second = (asyncio.create_task(images.expand([TOKEN], [picture(seed=2)])) for _ in range(2))
    while len(images._running) < 2:
        await asyncio.sleep(0.01)
    first.cancel()  # while its image waits for the other
    await before
    assert len((await second)[1]) == 1 and len(prepared) == 2


async def test_an_image_that_was_refused_is_tried_again(tmp_path, prepared):
    images = preparation(tmp_path)
    for _ in range(2):
        with refused("vision.image", about="image 0"):
            await images.expand([TOKEN], [b"GIF89a"])
    assert len(prepared) == 2
