"""The Prometheus endpoint has the newest step and what engines say, and the dashboard asks for nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from slimx.extras.watch import prometheus
from slimx.extras.watch.prometheus import PrometheusSink, prometheus_name
from slimx.observability.tracking.jsonl import JsonlFile
from slimx.observability.tracking.names import METRICS
from slimx.observability.tracking.tracker import Tracker
from tests.refusals import refused

DASHBOARD = Path(__file__).parents[3] / "configs" / "grafana.json"
ENGINE_METRICS = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 3.0
"""


@pytest.fixture
def engine() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.rstrip("/") == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(ENGINE_METRICS.encode())

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[PrometheusSink]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sink = PrometheusSink("r", tmp_path, "127.0.0.1", port)
    yield sink
    sink.close()
    with pytest.raises(requests.ConnectionError):
        scraped(sink)


def scraped(sink: PrometheusSink) -> dict[tuple[str, str], float]:
    """Returns values by name and, for engines, their name, else slimx's run."""
    text = requests.get(f"http://127.0.0.1:{sink.port}/metrics", timeout=300).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} <= {"r"}
    return {(s.name, s.labels.get("engine") or s.labels["metric"]): s.value for s in samples}


def test_the_newest_step_is_served_under_names_that_prometheus_takes(sink, tmp_path):
    assert scraped(sink) == {}, "before the first step there is nothing"
    tracker = Tracker(JsonlFile(tmp_path / "metrics.jsonl", resume_step=None), [sink])
    tracker.log(1, {"reward/mean": 0.25, "eval/my-data/pass@2": 1.0, "a/b-c": 1.0, "a/b_c": 2.0})
    tracker.log(2, {"reward/mean": 0.5, "a/b-c": 1.0, "a/b_c": 2.0, "gap/mean": float("nan")}, version=1)
    tracker.log(1, {"eval/late": 0.75})  # by an evaluation during training
    found = scraped(sink)
    assert found["slimx_reward_mean", "reward/mean"] == 0.5 and found["slimx_step", "step"] == 2
    assert found["slimx_eval_late", "eval/late"] == 0.75
    assert found["slimx_version", "version"] == 1 and ("slimx_eval_my_data_pass_2", "eval/my-data/pass@2") not in found
    assert (found["slimx_a_b_c", "a/b-c"], found["slimx_a_b_c", "a/b_c"]) == (1, 2)


def test_engines_are_scraped_through_and_one_that_does_not_answer_is_down(sink, engine, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        engines = [
            {"name": "actor-0", "url": engine},
            {"name": "actor-1", "url": f"http://127.0.0.1:{closed.getsockname()[1]}"},
            {"name": "actor-2", "url": None},
        ]
        (tmp_path / "engines.json").write_text(json.dumps({"engines": engines}))
        assert scraped(sink) == {
            ("slimx_engine_up", "actor-0"): 1,
            ("slimx_engine_up", "actor-1"): 0,
            ("sglang:num_running_reqs", "actor-0"): 3,
        }


def test_idle_connections_and_malformed_requests_leave_no_thread(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.2)
    sink = PrometheusSink("r", tmp_path, "127.0.0.1", 0)
    before = threading.active_count()
    sent = [
        *(b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n"),
        *(b"GET " + b"/" * 70_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n"),
        b"GET /metrics?name[]=" + b"x" * 60_000 + b" HTTP/1.0\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 99\r\n\r\nx",
        b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ]
    for data in sent:
        with socket.create_connection(("127.0.0.1", sink.port), timeout=300) as connection:
            connection.sendall(data)
            with suppress(ConnectionResetError):
                while connection.recv(2**16):
                    pass
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    sink._server.RequestHandlerClass.timeout = 60.0
    assert threading.active_count() <= before and scraped(sink) == {} and capsys.readouterr().err == ""
    sink.close()


def test_a_port_that_is_taken_is_refused_before_anything_starts(sink, tmp_path):
    with refused("track.prometheus", about="track.prometheus.port"):
        PrometheusSink("r", tmp_path, "127.0.0.1", sink.port)


def test_the_dashboard_asks_for_metrics_that_there_are():
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    names = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"((?:slimx_|sglang:)\w+)\{", target["expr"])
    }
    ours = {prometheus_name(metric.name) for metric in METRICS if "{" not in metric.name}
    ours |= {prometheus_name(f"time/{phase}") for phase in ("step", "generate", "train", "publish")}
    assert {name for name in names if name.startswith("slimx_")} <= ours | {"slimx_step", "slimx_engine_up"}
    folder = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt/observability"
    source = "".join(file.read_text() for file in folder.rglob("*.py"))
    engines = {name for name in names if name.startswith("sglang:")}
    assert len(engines) >= 4 and all(f'"{name}"' in source for name in engines)
