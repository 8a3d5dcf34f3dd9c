"""A start that is refused leaves the run's directory as it was, and a part that has begun leaves its logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimx.errors import PartLost, SlimxError
from slimx.observability.live.activity import FILE
from slimx.observability.live.run_lock import is_locked
from slimx.orchestration.state.directory import begun
from tests.refusals import refused

REFUSAL = SlimxError("no GPUs", code="cluster.resources")


def start(directory: Path, error: Exception | None, *, log: bool = False) -> None:
    """As a run begins, up to `error`."""
    with begun(directory):
        assert is_locked(directory)
        (directory / FILE).unlink(missing_ok=True)
        (directory / "config.yaml").write_text("new")
        (directory / "logs").mkdir(exist_ok=True)
        (directory / "timeline.jsonl").touch()
        if log:
            (directory / "logs" / "trainer-0.log").open("a").write("x")
        if error is not None:
            raise error


def contents(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


def test_a_refused_start_leaves_no_new_directory(tmp_path):
    with refused("cluster.resources"):
        start(tmp_path / "runs" / "a", REFUSAL)
    assert not contents(tmp_path)


def test_a_refused_start_keeps_files_of_others(tmp_path):
    with refused("cluster.resources"), begun(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "b").mkdir()
        raise REFUSAL
    assert contents(tmp_path) == {"runs": None, "runs/b": None}


@pytest.mark.parametrize("old", [{}, {"config.yaml": b"old", FILE: b"1", "metrics.jsonl": b"{}", "logs/e.log": b"e"}])
def test_a_refused_start_leaves_an_old_directory_as_it_was(tmp_path, old):
    (tmp_path / "logs").mkdir()
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    with refused("cluster.resources"):
        start(tmp_path, REFUSAL)
    assert contents(tmp_path) == {"logs": None} | old


@pytest.mark.parametrize(
    ("error", "log"), [(REFUSAL, True), (PartLost("Ray", code="ray.start"), False), (KeyError("x"), False)]
)
def test_files_of_a_failed_start_that_may_be_retried_are_kept(tmp_path, error, log):
    with pytest.raises(type(error)):
        start(tmp_path / "a", error, log=log)
    assert (tmp_path / "a" / "config.yaml").read_text() == "new"


def test_a_run_that_ends_well_keeps_its_directory(tmp_path):
    start(tmp_path / "a", None)
    assert contents(tmp_path / "a").keys() == {"config.yaml", "lock", "logs", "timeline.jsonl"}
