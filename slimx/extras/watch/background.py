"""Makes the calls of a tracker in a background thread, so that a tracker that waits for its server does not block the
run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from slimx.extras.http.in_order import InOrder
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.samples import RecordedSample
from slimx.observability.tracking.tracker import Sink


class InBackground:
    """Tracker that forwards its method calls to `sink` in a background thread, in order. An exception raised by `sink`
    is raised again by a later call, as in `InOrder`."""

    def __init__(self, sink: Sink, *, close_s: float = 60.0, max_waiting: int = 512) -> None:
        self.name = sink.name
        self._sink = sink
        self._calls = InOrder(sink.name, close_s=close_s, max_waiting=max_waiting)

    def log(self, record: StepRecord) -> None:
        self._calls.add(partial(self._sink.log, record))

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        self._calls.add(partial(self._sink.samples, step, list(samples)))

    def close(self) -> None:
        self._calls.close(self._sink.close)
