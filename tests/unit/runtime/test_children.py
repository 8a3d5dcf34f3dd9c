"""The search path and the environment of processes that a run starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from slimx.runtime.children import bypass_proxies, child_environment, clean_environment, python_argv

ROOT = Path(__file__).parents[3]
PATHS = """
import json, sys
from slimx.runtime.children import search_working_directory
search_working_directory()
import own
import colorsys
import slimx.errors
print(json.dumps([own.__file__, colorsys.__file__, slimx.errors.__file__, sys.path[0]]))
"""


def test_a_child_gets_neither_proxies_nor_a_place_among_others() -> None:
    kept = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "no_proxy": "example.com", "RANKING": "1"}
    misleading = {
        **dict.fromkeys(("http_proxy", "HTTPS_PROXY", "All_Proxy"), "http://127.0.0.1:9"),
        **{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere", "TORCHELASTIC_RUN_ID": "x"},
        "PYTHONINSPECT": "1",
    }
    assert child_environment(kept | misleading) == kept
    environment = kept | misleading
    clean_environment(environment)
    assert environment == kept


@pytest.mark.parametrize("before", [{}, {"no_proxy": "a.com, 127.0.0.1"}, {"NO_PROXY": "a.com,127.0.0.1"}])
def test_both_spellings_of_no_proxy_name_this_machine(before: dict[str, str]) -> None:
    environment = dict(before)
    bypass_proxies(environment, ["10.0.0.1"])
    assert environment["no_proxy"] == environment["NO_PROXY"]
    names = environment["no_proxy"].split(",")
    assert len(names) == len(set(names))
    assert {*names} == {"127.0.0.1", "localhost", "::1", "10.0.0.1"} | ({"a.com"} if before else set())


def test_clients_of_others_reach_this_machine_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    bypass_proxies(os.environ)
    with httpx.Client() as client:
        chosen = {host: client._transport_for_url(httpx.URL(f"http://{host}:1/")) for host in ("127.0.0.1", "[::1]")}
        assert all(transport is client._transport for transport in chosen.values())
        assert client._transport_for_url(httpx.URL("http://example.com/")) is not client._transport


def test_modules_of_the_working_directory_come_last(tmp_path: Path) -> None:
    (tmp_path / "slimx").mkdir()
    for name in ("own.py", "colorsys.py"):
        (tmp_path / name).write_text("")
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{PATHS}"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT).stdout)
    assert found[0] == str(tmp_path / "own.py")
    assert found[1] != str(tmp_path / "colorsys.py")
    assert found[2] == str(ROOT / "slimx" / "errors.py")
    assert found[3] not in ("", str(tmp_path))


def test_a_module_is_not_searched_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "slimx").mkdir()
    for name in ("torch.py", "json.py", "argparse.py", "psutil.py"):
        (tmp_path / name).write_text("raise SystemExit(7)")
    command = python_argv("slimx.runtime.process", "--help")
    assert subprocess.run(command, capture_output=True, cwd=tmp_path).returncode == 0
