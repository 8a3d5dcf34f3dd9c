"""Times that slimx shows are in UTC, in each view of a run: machines of a cluster and its users share no time zone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from slimx.cluster.restarts import Restart
from slimx.extras.alerts.finding import Finding
from slimx.extras.alerts.log import alert_lines, opened
from slimx.extras.watch.status import describe_status
from tests.documents import ROOT

AT = 1e9
"""2001-09-09 01:46:40 UTC."""
LOCAL = re.compile(
    r"\b(localtime|ctime)\(|datetime\.(now|today)\(\)|\bfromtimestamp\([^,()]+\)|\bstrftime\((?!.%Y%m%d)[^,()]+\)"
    r"|\.astimezone\(\)|\.get(Hours|Minutes|Date|Day)\(|\.to(Locale)?(Time|Date)String\(|Date\(\S*\)\.toLocaleString\("
)
"""Calls in Python and JavaScript that give the local time, except in the name of a file for the user."""


@pytest.fixture(autouse=True)
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_alerts_and_restarts_show_utc() -> None:
    finding = Finding(name="gap", bad=True, good=False, text="t")
    (line,) = alert_lines([opened(finding, 3, AT)])
    assert "2001-09-09 01:46 UTC" in line
    restart = {"part": "router", "at": AT, "seconds": 9.0, "reason": "a stop", "error": ""}
    assert str(Restart(**restart)).startswith("01:46:40 UTC")
    router = {"name": "router", "url": "http://h:2", "up": False, "restarts": 1, "history": [restart]}
    status = {"name": "r", "state": "running", "step": 3, "steps": 9, "seconds_ago": None, "phase": None}
    status |= {"finished": False, "running": True, "metrics": {}, "alerts": [], "activity": None, "engines": []}
    assert "01:46:40 UTC" in describe_status(status | {"routers": [router]})[-1]


def test_no_part_of_slimx_asks_for_the_local_time() -> None:
    found = []
    for ending in ("py", "js", "html"):
        for file in sorted((ROOT / "slimx").rglob(f"*.{ending}")):
            found += [f"{file.relative_to(ROOT)}: {match[0]}" for match in LOCAL.finditer(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "call",
    [
        "datetime.now().astimezone()",
        "datetime.fromtimestamp(at, UTC).astimezone():%H",
        "datetime.today()",
        'time.strftime("%H:%M")',
        "new Date(at).toLocaleString()",
        "new Date(1000 * at).toLocaleTimeString()",
        "then.getHours()",
        "then.toTimeString()",
    ],
)
def test_calls_that_give_the_local_time_are_found(call: str) -> None:
    assert LOCAL.search(call)
