"""Webhook that posts every event of a run in a background thread. A failed delivery never stops the run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from urllib.parse import urljoin

import aiohttp

from slimx.errors import SlimxError
from slimx.extras.alerts.event import Event
from slimx.extras.alerts.forms import Form, body_of, refusal_of
from slimx.extras.http.blocking import HttpResponse, fetch
from slimx.extras.http.in_order import InOrder
from slimx.json_types import Json

TIMEOUT_S = 10.0
"""Timeout in seconds for connecting to the server, and for periods without progress after that."""
PAUSES_S = (1.0, 2.0)
"""Pauses in seconds before the second and the third attempt to post an event."""
REDIRECTS = (307, 308)
"""HTTP statuses after which an event is posted to the URL in the response; with others, the request would lose its
body."""
MAX_REDIRECTS = 5
MAX_PAUSE_S = 30.0
"""Maximum pause in seconds that a Retry-After header of a response can request."""
CLOSE_S = 60.0
"""Timeout in seconds for posting the last events at the end of a run."""


class Webhook:
    """Webhook that posts events to one URL in order, and counts undelivered ones."""

    def __init__(self, url: str, form: Form = "json", *, close_s: float = CLOSE_S) -> None:
        """Starts the thread. `form`: form of the requests' bodies."""
        self._lost: Counter[str] = Counter()
        """Number of events that could not be delivered, by kind and reason."""
        self._url = url
        self._form = form
        self._lock = threading.Lock()
        self._calls = InOrder("track.webhook", close_s=close_s)

    def send(self, event: Event) -> None:
        """Adds `event` to the queue of events to post."""
        try:
            self._calls.add(partial(self._post, event))
        except SlimxError:
            self._lose(event, "too many events were waiting")

    def close(self) -> list[str]:
        """Waits up to `close_s` seconds for the last events to be posted, and returns descriptions of all undelivered
        events: their kind, the reason, and their number if there are several."""
        sent = threading.Event()
        try:
            self._calls.close(sent.set)
        except SlimxError:
            if not sent.is_set():
                with self._lock:
                    self._lost["all events that were still waiting"] += 1
        lost = []
        for text, count in self._lost.items():
            if count > 1:
                text = f"{count} times {text}"
            lost.append(text)
        return lost

    def _post(self, event: Event) -> None:
        retry_after_s = 0.0
        problem = ""
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(max(pause_s, retry_after_s))
            retry_after_s = 0.0
            try:
                response = self._answer(body_of(event, self._form))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: of a Location
                problem = type(error).__name__  # without its text, which contains the URL, which may be a secret
                continue
            refusal = refusal_of(response.status, response.content, self._form)
            if refusal is None:
                return
            problem = refusal.reason
            if not refusal.again:
                break
            retry_after_s = refusal.pause_s
            with suppress(KeyError, ValueError):  # Retry-After may be a date
                retry_after_s = min(float(response.headers["Retry-After"]), MAX_PAUSE_S)
        self._lose(event, problem)

    def _answer(self, body: Json) -> HttpResponse:
        """Posts `body` and returns the response, that of the last URL if there are redirects."""
        post = partial(fetch, "POST", json=body, connect_s=TIMEOUT_S, read_s=TIMEOUT_S)
        url = self._url
        response = post(url)
        for _ in range(MAX_REDIRECTS):
            target = response.headers.get("Location")
            if response.status not in REDIRECTS or target is None:
                break
            url = urljoin(url, target)
            response = post(url)
        return response

    def _lose(self, event: Event, problem: str) -> None:
        with self._lock:
            self._lost[f"{event.event} ({problem})"] += 1
