"""A Prometheus endpoint of the driver: the newest step's metrics, and those of every engine, asked at each scrape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from slimx.errors import SlimxError
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.samples import RecordedSample

FETCH_S = 2.0
"""Seconds in which an engine must answer a scrape; one that does not is left out of it, and `slimx_engine_up` is 0."""
AT_ONCE = 16
REQUEST_S = 10.0
"""Seconds that a connection may send nothing; the server has a thread for each."""


class PrometheusSink:
    """Serves the metrics of a run at http://HOST:PORT/metrics. A metric `reward/mean` is called `slimx_reward_mean`."""

    name = "prometheus"

    def __init__(self, run: str, directory: Path, host: str, port: int) -> None:
        """`run`: run.name, a label of every metric. `directory`: of the run, whose engines.json says where engines are.
        Raises SlimxError if nobody can listen there."""
        self._steps, registry = Newest(run), CollectorRegistry()
        registry.register(self._steps)
        registry.register(Engines(run, directory / "engines.json"))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
            self._server.RequestHandlerClass = _bounded(self._server.RequestHandlerClass, REQUEST_S)
        except OSError as error:
            raise SlimxError(
                f"track.prometheus: {host}:{port} cannot be listened at ({error.strerror}); give another port",
                code="track.prometheus",
                about="track.prometheus.port",
            ) from error

    @property
    def port(self) -> int:
        return self._server.server_port

    def log(self, record: StepRecord) -> None:
        self._steps.record = record

    def samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Text is no metric."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Newest(Collector):
    """The metrics of the newest step."""

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
            family = families.setdefault(name, GaugeMetricFamily(name, f"of slimx's {key}", labels=["run", "metric"]))
            # Two names that differ in signs alone stay apart by their label.
            family.add_metric([self._run, key], value)
        yield from families.values()


class Engines(Collector):
    """Metrics that the engines serve themselves, with their names as a label."""

    def __init__(self, run: str, roster: Path) -> None:
        self._run, self._roster = run, roster

    def collect(self) -> Iterator[Metric]:
        engines = [each for each in self._read() if each["url"]]
        up = GaugeMetricFamily("slimx_engine_up", "1 if the engine answered this scrape", labels=["run", "engine"])
        families: dict[str, Metric] = {}
        if engines:
            with ThreadPoolExecutor(min(AT_ONCE, len(engines))) as pool:
                answers = list(pool.map(_fetch, [each["url"] for each in engines]))
            for engine, text in zip(engines, answers, strict=True):
                up.add_metric([self._run, engine["name"]], float(text is not None))
                for family in text_string_to_metric_families(text or ""):
                    _add(families, family, {"run": self._run, "engine": engine["name"]})
        yield up
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        """Nothing: what engines have is not known before they are asked."""
        return []

    def _read(self) -> list[dict[str, Any]]:
        try:
            return json.loads(self._roster.read_text())["engines"]
        except FileNotFoundError:
            return []


def _bounded(handler: Any, seconds: float) -> Any:
    """Returns the class of a server's connections with an end for those that send nothing, or break off."""

    class Bounded(handler):
        timeout = seconds

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    return Bounded


def prometheus_name(key: str) -> str:
    """The name of slimx's metric `key` in Prometheus: slimx_, and letters, digits and underscores."""
    return "slimx_" + re.sub(r"\W", "_", key, flags=re.ASCII)


def _fetch(url: str) -> str | None:
    """Text that an engine serves; None if it does not answer. A site's proxy must not be asked for it."""
    with requests.Session() as session:
        session.trust_env = False
        try:
            answer = session.get(f"{url}/metrics/", timeout=FETCH_S)
        except requests.RequestException:
            return None
    return answer.text if answer.ok else None


def _add(families: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
    """Put the samples of one engine's family beside those of others."""
    whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        whole.add_sample(sample.name, {**sample.labels, **labels}, sample.value, sample.timestamp, sample.exemplar)
