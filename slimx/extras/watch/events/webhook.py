"""A webhook: every event of a run is posted as JSON in a background thread, and no failure stops the run."""

from __future__ import annotations

import threading
from dataclasses import asdict
from functools import partial

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from slimx.errors import SlimxError
from slimx.extras.watch.background import InOrder
from slimx.extras.watch.events.event import Event

TIMEOUT_S = 10.0
"""Deadline of one attempt to connect, and of one response, in seconds."""
ATTEMPTS = 3
"""Number of attempts to post an event, with pauses of 1 s and 2 s."""
CLOSE_S = 60.0
"""Seconds for the last events at the end of a run."""


class Webhook:
    """Posts events to one URL in order, and counts undelivered ones."""

    def __init__(self, url: str, *, close_s: float = CLOSE_S) -> None:
        self.lost: list[str] = []
        """Kinds of the events that were not delivered."""
        self._url = url
        self._lock = threading.Lock()
        self._calls = InOrder("track.webhook", close_s=close_s)
        self._session = requests.Session()
        retry = Retry(
            total=ATTEMPTS - 1,
            backoff_factor=1.0,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=("POST",),
        )
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=retry))

    def send(self, event: Event) -> None:
        """Posts `event` after all earlier ones."""
        try:
            self._calls.add(partial(self._post, event))
        except SlimxError:
            self._lose(event)

    def close(self) -> list[str]:
        """Waits for the last events, `close_s` seconds at most, and returns the kinds of all undelivered ones."""
        sent = threading.Event()
        try:
            self._calls.close(sent.set)
        except SlimxError:
            if not sent.is_set():
                with self._lock:
                    self.lost.append("those that still waited")
        self._session.close()
        return self.lost

    def _post(self, event: Event) -> None:
        try:
            response = self._session.post(self._url, json=asdict(event), timeout=TIMEOUT_S)
            delivered = response.ok
        except requests.RequestException:
            delivered = False  # the error's text contains the URL, which may contain a secret
        if not delivered:
            self._lose(event)

    def _lose(self, event: Event) -> None:
        with self._lock:
            self.lost.append(event.event)
