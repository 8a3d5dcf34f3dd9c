"""Messages about a process that has ended: signals by name, real lines of the log alone, each on a line."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import ray

from slimx import cli
from slimx.cluster.waiting import explain
from slimx.extras.boxes.programs.enclosure import ProgramResult
from slimx.runtime.logs import begin_log, how_ended, log_end, marked, quoted


@pytest.mark.parametrize(
    ("status", "name"),
    [(137, "SIGKILL"), (-9, "SIGKILL"), (139, "SIGSEGV"), (-6, "SIGABRT"), (143, "SIGTERM")],
)
def test_a_signal_is_called_by_its_name(status: int, name: str) -> None:
    words = how_ended(status)
    assert name in words and not any(figure in words for figure in "0123456789")
    assert ("dmesg" in words) is (name == "SIGKILL")


def test_a_process_killed_because_it_was_stopped_did_not_lack_memory() -> None:
    assert "SIGSTOP" in how_ended(128 + signal.SIGSTOP) and "dmesg" not in how_ended(128 + signal.SIGSTOP)


@pytest.mark.parametrize("status", [0, 1, 128, 255])
def test_a_status_of_no_signal_stays_a_number(status: int) -> None:
    assert how_ended(status).split()[-1] == str(status)


@pytest.mark.parametrize(
    ("ended", "status", "word"), [("exit", 137, "SIGKILL"), ("exit", 3, "3"), ("memory", None, "memory")]
)
def test_a_program_in_a_sandbox_ends_in_the_same_words(ended, status, word) -> None:
    assert word in ProgramResult("", "", ended, status, 1.0).ending


def test_marks_colours_and_earlier_output_are_not_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("yesterday\n")
    begin_log(log)
    with log.open("a") as file:
        file.write(f"{marked('step 1: train')}\n\x1b[33mfirst\x1b[0m\n\n{marked('step 2: train')}\nlast\n")
        file.write("".join(f"{marked(f'step {step}: prepare')}\n" for step in range(3, 40)))
    assert log_end(log) == "first\nlast" and log_end(log, 1) == "last"
    assert log_end(log, since=len("yesterday\n")) == "first\nlast"
    assert quoted(log, log_end(log)).splitlines()[1:] == ["  first", "  last"]


def test_a_log_of_marks_alone_has_no_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{marked('step 1: train')}\n")
    assert log_end(log) == log_end(tmp_path / "missing") == ""
    assert "\n" not in quoted(log, "") and str(log) in quoted(log, "")


def test_a_run_whose_rank_died_ends_in_a_sentence_and_lines(tmp_path: Path, monkeypatch, capsys) -> None:
    log = tmp_path / "trainer-1.log"
    log.write_text(f"one\n{marked('step 80: prepare')}\ntwo\n")
    death = explain(ray.exceptions.RayActorError(), "the training step", "trainer rank 1", log)

    def dies(**options: object) -> None:
        raise death

    monkeypatch.setattr(cli, "app", dies)
    with pytest.raises(SystemExit) as end:
        cli.main()
    sentence, *lines = capsys.readouterr().err.splitlines()
    assert end.value.code == death.status and str(log) in sentence and lines == ["  one", "  two"]
    log.unlink()
    silent = ray.exceptions.RayActorError(error_msg="Worker unexpectedly exits with a connection error code 2. End ...")
    message = str(explain(silent, "the training step", "trainer rank 1", log))
    assert "SIGKILL" in message and "\n" not in message and "connection error" not in message
