"""Webhook that posts every event of a run as JSON in a background thread. A failed delivery never stops the run."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import aiohttp

from slimx.errors import SlimxError
from slimx.extras.http.blocking import fetch
from slimx.extras.watch.background import InOrder
from slimx.extras.watch.events.event import Event

TIMEOUT_S = 10.0
"""Timeout in seconds for connecting to the server, and for periods without progress after that."""
PAUSES_S = (1.0, 2.0)
"""Pauses in seconds before the second and the third attempt to post an event."""
RETRIED = (429, 500, 502, 503, 504)
"""HTTP statuses after which an event is posted again."""
MAX_PAUSE_S = 30.0
"""Maximum pause in seconds that a Retry-After header of a response can request."""
CLOSE_S = 60.0
"""Timeout in seconds for posting the last events at the end of a run."""


class Webhook:
    """Webhook that posts events to one URL in order, and records undelivered ones."""

    def __init__(self, url: str, *, close_s: float = CLOSE_S) -> None:
        self.lost: list[str] = []
        """Kinds of the events that could not be delivered."""
        self._url = url
        self._lock = threading.Lock()
        self._calls = InOrder("track.webhook", close_s=close_s)

    def send(self, event: Event) -> None:
        """Adds `event` to the queue of events to post."""
        try:
            self._calls.add(partial(self._post, event))
        except SlimxError:
            self._lose(event)

    def close(self) -> list[str]:
        """Waits up to `close_s` seconds for the last events to be posted, and returns the kinds of all undelivered
        events."""
        sent = threading.Event()
        try:
            self._calls.close(sent.set)
        except SlimxError:
            if not sent.is_set():
                with self._lock:
                    self.lost.append("all events that were still waiting")
        return self.lost

    def _post(self, event: Event) -> None:
        retry_after_s = 0.0
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(max(pause_s, retry_after_s))
            retry_after_s = 0.0
            try:
                response = fetch(
                    "POST", self._url, json=asdict(event), connect_s=TIMEOUT_S, read_s=TIMEOUT_S, redirects=True
                )
            except (aiohttp.ClientError, TimeoutError):
                continue  # the error contains the URL, which may contain a secret
            if response.status < 300:
                return
            if response.status not in RETRIED:
                break
            with suppress(ValueError):  # Retry-After may be a date
                retry_after_s = min(float(response.headers.get("Retry-After", 0)), MAX_PAUSE_S)
        self._lose(event)

    def _lose(self, event: Event) -> None:
        with self._lock:
            self.lost.append(event.event)
