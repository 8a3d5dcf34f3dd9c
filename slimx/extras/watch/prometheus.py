"""Prometheus endpoint of the driver: metrics of the newest step, and the engines' own metrics, which are requested at
each scrape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from slimx.errors import SlimxError
from slimx.extras.http.blocking import fetch
from slimx.extras.http.responses import MAX_RESPONSE
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.samples import RecordedSample

FETCH_S = 2.0
"""Timeout in seconds for connecting to an engine during a scrape, and for periods without progress after that. If the
timeout expires, the engine's metrics are omitted and `slimx_engine_up` is 0."""
AT_ONCE = 16
REQUEST_S = 10.0
"""Timeout in seconds after which an idle connection is closed. This frees a thread, because the server uses one per
connection."""


class PrometheusSink:
    """Tracker that serves the metrics of a run at http://HOST:PORT/metrics. For example, the metric `reward/mean` is
    named `slimx_reward_mean`."""

    name = "prometheus"

    def __init__(self, run: str, directory: Path, host: str, port: int) -> None:
        """Starts the server. `run`: name of the run, a label of every metric. `directory`: run directory, whose
        engines.json contains the URLs of the engines. Raises SlimxError if it cannot listen on the port."""
        self._steps = StepCollector(run)
        registry = CollectorRegistry()
        registry.register(self._steps)
        registry.register(EngineCollector(run, directory / "engines.json"))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
            self._server.RequestHandlerClass = _bounded(self._server.RequestHandlerClass, REQUEST_S)
        except OSError as error:
            raise SlimxError(
                f"track.prometheus: slimx cannot listen on {host}:{port} ({error.strerror}); set "
                "track.prometheus.host to an address of this machine, and track.prometheus.port to a free port",
                code="track.prometheus",
                about="track.prometheus.port",
            ) from error

    @property
    def port(self) -> int:
        return self._server.server_port

    def log(self, record: StepRecord) -> None:
        newest = self._steps.record
        if newest is not None and record.step < newest.step:  # the result of an evaluation during training
            record = replace(newest, metrics=newest.metrics | record.metrics)
        self._steps.record = record

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Does nothing, because Prometheus does not store text."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class StepCollector(Collector):
    """Collector of the metrics of the newest step."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.record: StepRecord | None = None

    def collect(self) -> Iterator[Metric]:
        record = self.record
        if record is None:
            return
        values = {"step": float(record.step), "step_time_seconds": record.time, **record.metrics}
        if record.version is not None:
            values["version"] = float(record.version)
        families: dict[str, GaugeMetricFamily] = {}
        for key, value in values.items():
            if value is None:
                continue
            name = prometheus_name(key)
            family = families.setdefault(name, GaugeMetricFamily(name, f"slimx metric {key}", labels=["run", "metric"]))
            # The label distinguishes metrics whose names differ only in punctuation.
            family.add_metric([self._run, key], value)
        yield from families.values()


class EngineCollector(Collector):
    """Collector of the metrics that the engines serve, with the engine's name as a label."""

    def __init__(self, run: str, roster: Path) -> None:
        self._run = run
        self._roster = roster

    def collect(self) -> Iterator[Metric]:
        engines = [engine for engine in self._read() if engine["url"]]
        up = GaugeMetricFamily("slimx_engine_up", "1 if the engine responded, else 0", labels=["run", "engine"])
        families: dict[str, Metric] = {}
        if engines:
            with ThreadPoolExecutor(min(AT_ONCE, len(engines))) as pool:
                texts = list(pool.map(_fetch, [engine["url"] for engine in engines]))
            for engine, text in zip(engines, texts, strict=True):
                up.add_metric([self._run, engine["name"]], float(text is not None))
                for family in text_string_to_metric_families(text or ""):
                    _add(families, family, {"run": self._run, "engine": engine["name"]})
        yield up
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, because the metrics of the engines are unknown before a scrape."""
        return []

    def _read(self) -> list[dict[str, Any]]:
        try:
            return json.loads(self._roster.read_text())["engines"]
        except FileNotFoundError:
            return []


def _bounded(handler: Any, seconds: float) -> Any:
    """Returns a subclass of the server's `handler` class that closes connections after `seconds` without a request, and
    ignores broken connections."""

    class Bounded(handler):
        timeout = seconds

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    return Bounded


def prometheus_name(key: str) -> str:
    """Returns the Prometheus name of slimx's metric `key`: the prefix slimx_ and the key, with `_` for all characters
    except ASCII letters and digits."""
    return "slimx_" + re.sub(r"\W", "_", key, flags=re.ASCII)


def _fetch(url: str) -> str | None:
    """Returns as text the metrics that an engine serves under `url`; None if the request fails or the response is too
    large. The environment's proxy settings are ignored."""
    try:
        response = fetch("GET", f"{url}/metrics/", connect_s=FETCH_S, read_s=FETCH_S, proxies=False, redirects=True)
    except (aiohttp.ClientError, TimeoutError):
        return None
    if response.status != 200 or len(response.content) == MAX_RESPONSE:
        return None
    return response.content.decode(errors="replace")


def _add(families: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
    """Adds the samples of one engine's metric family to the family of the same name in `families`. `labels`: labels to
    add to each sample."""
    merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        merged.add_sample(sample.name, {**sample.labels, **labels}, sample.value, sample.timestamp, sample.exemplar)
