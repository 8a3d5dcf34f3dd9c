"""A webhook: every event of a run is posted as JSON, in a thread of its own, and no failure stops the run."""

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
"""Seconds for one attempt to connect, and for one to be answered."""
ATTEMPTS = 3
"""Times that an event is posted until it is taken, with pauses of 1 s and 2 s."""
CLOSE_S = 60.0
"""Seconds for the last events at the end of a run."""


class Webhook:
    """Posts events to one URL in their order, and counts those that it did not take."""

    def __init__(self, url: str, *, close_s: float = CLOSE_S) -> None:
        self.lost: list[str] = []
        """Kinds of the events that were not delivered."""
        self._url, self._told = url, threading.Lock()
        self._calls = InOrder("track.webhook", close_s=close_s)
        self._session = requests.Session()
        again = Retry(
            total=ATTEMPTS - 1,
            backoff_factor=1.0,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=("POST",),
        )
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))

    def send(self, event: Event) -> None:
        """Post `event` when those before it have been."""
        try:
            self._calls.add(partial(self._post, event))
        except SlimxError:
            self._lose(event)

    def close(self) -> list[str]:
        """Wait for the last events, `close_s` seconds at most; returns the kinds of all that were not delivered."""
        sent = threading.Event()
        try:
            self._calls.close(sent.set)
        except SlimxError:
            with self._told:
                self.lost += ["those that still waited"] if not sent.is_set() else []
        self._session.close()
        return self.lost

    def _post(self, event: Event) -> None:
        try:
            answer = self._session.post(self._url, json=asdict(event), timeout=TIMEOUT_S)
            delivered = answer.ok
        except requests.RequestException:
            delivered = False  # the error's words hold the URL, which may hold a secret
        if not delivered:
            self._lose(event)

    def _lose(self, event: Event) -> None:
        with self._told:
            self.lost.append(event.event)
