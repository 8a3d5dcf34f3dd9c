"""Shared by the tests of the live page: groups of a run, a client of the page's server, and a browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import requests

from slimx.data.records import Group, Prompt, Span, Trajectory
from slimx.extras.watch.page.content import Content
from slimx.extras.watch.page.server import listen

MARKUP = "<img src=x onerror=alert(1)>"


def group(number: int, rewards: list[float], *, text: str, dataset: str, answer: str = "4") -> Group:
    """Makes two rollouts of two turns each with a tool's words between them, sampled by versions 1 and 2."""
    prompt = Prompt(
        id=f"p{number}",
        messages=[{"role": "user", "content": text}],
        answer=answer,
        metadata={"dataset": dataset},
    )
    spans = [
        Span(start=0, stop=2, source="prompt"),
        Span(start=2, stop=4, source="sampled", version=1),
        Span(start=4, stop=5, source="inserted", turn=1),
        Span(start=5, stop=6, source="sampled", turn=1, version=2),
    ]
    trajectories = [
        Trajectory(
            id=f"g{number}/{index}",
            rollout_id=f"g{number}/{index}",
            group_id=f"g{number}",
            index=index,
            token_ids=np.arange(10, 16, dtype=np.int32),
            loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
            logprobs=np.array([np.nan, np.nan, -0.1, -3.0, np.nan, -0.5], np.float32),
            spans=spans,
            reward=reward,
            finish_reason="stop",
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id=f"g{number}", prompt=prompt, trajectories=trajectories)


def row(step: int, reward: float) -> str:
    return json.dumps({"step": step, "version": step, "time": 1e9 + step, "metrics": {"reward/mean": reward}}) + "\n"


class Page:
    """Asks the server of a page."""

    def __init__(self, address: str) -> None:
        self.address, self.session = address, requests.Session()

    def get(self, path: str) -> requests.Response:
        return self.session.get(self.address + path, timeout=300, allow_redirects=False)

    def status_for(self, host: str) -> int:
        """Returns the status of a request with the cookies and another Host."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.session.cookies.items())
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=300)
        connection.request("GET", "/api/status", headers={"Host": host, "Cookie": cookies})
        status = connection.getresponse().status
        connection.close()
        return status


@contextmanager
def served(content: Content) -> Iterator[Page]:
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(listen(content, "secret", "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    page = Page(f"http://127.0.0.1:{listening.port}")
    try:
        yield page
    finally:
        page.session.close()
        asyncio.run_coroutine_threadsafe(listening.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def drawn(address: str, tmp_path: Path) -> str:
    """Returns the page as a browser shows it after ten seconds of virtual time."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        ["chromium", *options, "--virtual-time-budget=10000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout
