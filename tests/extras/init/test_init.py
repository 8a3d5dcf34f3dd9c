"""`slimx init` writes a file that passes `slimx plan`, for this machine and for others, and never overwrites one."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slimx import cli
from slimx.config.load import load_config
from slimx.errors import SlimxError
from slimx.extras.init import machine, run
from slimx.extras.init.prompts import examine
from slimx.extras.init.settings import Setting, file_of
from slimx.extras.planner.plan.report import plan_report
from slimx.extras.quickstart.make_model import make_model
from slimx.extras.quickstart.make_task import make_task
from slimx.preflight.hardware import DRIVER, GIB, GPUS
from tests.documents import ROOT

MODELS = ROOT / "configs/moe/models"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quickstart")
    make_model(directory / "model")
    make_task(directory / "data")
    return directory


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: ("", 0, 0.0))


def rows(file: Path, *rows: dict) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def typed(monkeypatch: pytest.MonkeyPatch, *words: object) -> SlimxError | None:
    monkeypatch.setattr(sys, "argv", ["slimx", "init", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    refusal = end.value.__context__
    assert end.value.code == (2 if isinstance(refusal, SlimxError) else 0)
    return refusal if isinstance(refusal, SlimxError) else None


def test_the_quickstarts_task_is_configured_for_this_machine(monkeypatch, tmp_path, quickstart) -> None:
    data, out = quickstart / "data", tmp_path / "first.yaml"
    refusal = typed(
        monkeypatch, "--model", quickstart / "model", "--prompts", data / "train.jsonl",
        "--eval", data / "heldout.jsonl", "--steps", 2, "--out", out,
    )  # fmt: skip
    config = load_config(out)
    assert refusal is None and plan_report(config).report.violations == ()
    assert (config.cluster.device, config.numerics.dtype, config.trainer.world_size) == ("cpu", "float32", 1)
    assert (config.reward.function, config.schedule.steps, config.run.dir) == ("exact", 2, "runs/first")
    assert config.rollout.sampling.max_new_tokens < 10 and config.rollout.max_prompt_tokens == 8
    assert config.eval.files == {"heldout": str(data / "heldout.jsonl")}


def test_each_line_has_a_comment_and_each_page_exists(monkeypatch, tmp_path, quickstart) -> None:
    out = tmp_path / "run.yaml"
    typed(monkeypatch, "--model", quickstart / "model", "--prompts", quickstart / "data/train.jsonl", "--out", out)
    lines = [line for line in out.read_text().splitlines() if line]
    assert [line for line in lines if not re.search("# .", line)] == []
    pages = {page for line in lines for page in re.findall(r"docs/[\w./-]+\.md", line)}
    assert len(pages) > 8 and [page for page in pages if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize(
    ("model", "gpu", "nodes"),
    [
        ("Qwen3-30B-A3B", "h100", 4),
        ("Qwen3-30B-A3B", "h200", 3),
        ("Qwen3-30B-A3B", "gb300", 18),
        pytest.param("Qwen3-30B-A3B", "gb300", 16, marks=pytest.mark.slow("the same search for fewer GPUs")),
        pytest.param("Qwen3-235B-A22B", "h100", 8, marks=pytest.mark.slow("a search of half a minute")),
    ],
)
def test_a_layout_of_a_large_model_fits_the_machine(monkeypatch, tmp_path, model, gpu, nodes) -> None:
    prompts = rows(
        tmp_path / "p.jsonl", *[{"question": f"What is {n} plus 1?", "answer": f"a #### {n}"} for n in range(64)]
    )
    out = tmp_path / "big.yaml"
    words = ("--model", MODELS / model, "--prompts", prompts, "--gpu", gpu, "--nodes", nodes, "--out", out)
    assert typed(monkeypatch, *words) is None
    config = load_config(out)
    gpus = GPUS[gpu].per_node * nodes
    assert (config.trainer.world_size, config.cluster.nodes, config.reward.function) == (gpus, nodes, "math")
    (group,) = config.rollout.engines
    assert group.count * group.tensor == gpus
    assert plan_report(config).report.violations == ()


@pytest.mark.parametrize(
    ("words", "code", "about"),
    [
        ([], "init.missing", "--model"),
        (["--model", "MODEL"], "init.missing", "--prompts"),
        (["--model", "nowhere", "--prompts", "SUMS"], "model.directory", "nowhere"),
        (["--model", "MODEL", "--prompts", "nowhere.jsonl"], "prompts.unreadable", "nowhere.jsonl"),
        (["--model", "MODEL", "--prompts", "LONG"], "init.missing", "--reward"),
        (["--model", "MODEL", "--prompts", "SUMS", "--out", "OLD"], "out.exists", "OLD"),
        (["--model", "MODEL", "--prompts", "SUMS", "--out", "."], "out.directory", "."),
        (["--model", "MODEL", "--prompts", "SUMS", "--gpu", "a100"], "init.gpu", "a100"),
        (["--model", "MODEL", "--prompts", "SUMS", "--gpus", "8"], "init.machine", "--gpus"),
        (
            ["--model", "MODEL", "--prompts", "SUMS", "--gpu", "h100", "--gpus", "16", "--nodes", "1"],
            "init.machine",
            "--gpus",
        ),
        (
            ["--model", "MODEL", "--prompts", "SUMS", "--gpu", "h100", "--gpus", "8", "--nodes", "3"],
            "init.machine",
            "--gpus",
        ),
        (["--model", "LARGE", "--prompts", "SUMS"], "init.memory", "LARGE"),
        (["--model", "LARGE", "--prompts", "SUMS", "--gpu", "h100", "--gpus", "4"], "init.memory", "--gpus"),
        (["--model", "MODEL", "--prompts", "SUMS", "--algorithm", "grop"], "config.value", "algorithm.name"),
        (["--model", "MODEL", "--prompts", "SUMS", "--algorithm", "sft"], "init.algorithm", "--algorithm"),
        (["--model", "MODEL", "--prompts", "SUMS", "--algorithm", "dpo"], "init.algorithm", "--algorithm"),
        (["--model", "MODEL", "--prompts", "SUMS", "--reward", "nothing"], "dotted.name", "reward.function"),
    ],
)
def test_what_is_missing_or_impossible_is_refused(monkeypatch, tmp_path, quickstart, words, code, about) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text("kept")
    long = {"messages": [{"role": "user", "content": "Why?"}], "answer": "because " * 20}
    places = {
        "MODEL": str(quickstart / "model"),
        "LARGE": str(MODELS / "Qwen3-235B-A22B"),
        "SUMS": str(quickstart / "data/train.jsonl"),
        "LONG": rows(tmp_path / "long.jsonl", long),
        "OLD": "old.yaml",
    }
    refusal = typed(monkeypatch, *[places.get(word, word) for word in words])
    assert refusal is not None
    assert (refusal.code, refusal.about) == (code, places.get(about, about))
    assert (tmp_path / "old.yaml").read_text() == "kept" and not (tmp_path / "run.yaml").exists()


def asked(text: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": text}], "answer": answer}


@pytest.mark.parametrize(
    ("row", "reward", "columns"),
    [
        ({"question": "How many legs?", "answer": "Four times two. #### 8"}, "math", ["question", "answer", "####"]),
        ({"problem": "What is the sine?", "solution": "\\frac{1}{2}"}, "math", ["problem", "solution"]),
        (asked("A, B or C?", "C"), "choice", []),
        (asked("Which capital?", "Rome"), "exact", []),
        (asked("1+1=", "2"), "exact", []),
        (asked("Follow.", "") | {"metadata": {"dataset": "ifeval"}}, "ifeval", []),
        ({"messages": [{"role": "user", "content": "Write."}]}, None, []),
        (asked("Why?", "because " * 20), None, []),
        (asked("Why?", ""), None, []),
    ],
)
def test_a_reward_that_can_grade_the_answers_is_found(tmp_path, row, reward, columns) -> None:
    found = examine(rows(tmp_path / "p.jsonl", row), str(MODELS / "Qwen3-30B-A3B"))
    assert (found.reward, [*(found.fields or {}).values()], found.longest) == (reward, columns, None)


def test_prompts_of_most_of_the_models_positions_leave_room_to_answer(monkeypatch, tmp_path, quickstart) -> None:
    long = rows(tmp_path / "long.jsonl", asked("1" * 1500, "2"))
    assert typed(monkeypatch, "--model", quickstart / "model", "--prompts", long, "--out", tmp_path / "a.yaml") is None
    rollout = load_config(tmp_path / "a.yaml").rollout
    assert 1500 < rollout.max_prompt_tokens < 1510 and rollout.sampling.max_new_tokens >= 4


def test_the_next_commands_can_be_copied(monkeypatch, capsys, tmp_path, quickstart) -> None:
    out = tmp_path / "my first run.yaml"
    words = ("--model", quickstart / "model", "--prompts", quickstart / "data/train.jsonl", "--out", out)
    assert typed(monkeypatch, *words) is None
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert commands == [["slimx", name, str(out)] for name in ("plan", "doctor", "train")]


def test_a_held_out_set_may_have_a_number_as_its_name() -> None:
    settings = [Setting("eval.prompts", {"2024": "2024.jsonl"}), Setting("rollout.engines.0.name", "a")]
    assert yaml.safe_load(file_of(settings, "")) == {
        "eval": {"prompts": {"2024": "2024.jsonl"}},
        "rollout": {"engines": [{"name": "a"}]},
    }


def test_the_gpus_of_this_machine_are_used(monkeypatch) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: ("NVIDIA H200", 4, 140.4))
    assert machine.target(None, None, None) == machine.Target("h200", 4, 1, 4)
    monkeypatch.setattr(machine, "this_machine", lambda: ("NVIDIA A100-SXM4-40GB", 8, 40.0))
    other = machine.target(None, None, None)
    assert (other.gpu, other.gpus, other.name) == ("h100", 8, "NVIDIA A100-SXM4-40GB")
    assert other.memory_gib == round(40.0 - DRIVER / GIB, 1)


def test_gpus_are_spread_over_the_nodes_that_are_given() -> None:
    assert machine.target("h100", 8, 4) == machine.Target("h100", 8, 4, 2)
    assert machine.target("h100", 20, None) == machine.Target("h100", 20, 3, 8)
    assert machine.target("gb300", 72, None) == machine.target("gb300", None, 18)


def test_a_layout_that_the_plan_refuses_is_refused_by_its_reason(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(run, "unpublishable", lambda *_, **__: iter(()))
    prompts = rows(tmp_path / "p.jsonl", asked("1+1=", "2"))
    words = ("--model", MODELS / "Qwen3-30B-A3B", "--prompts", prompts, "--gpu", "gb300", "--out", tmp_path / "x.yaml")
    refusal = typed(monkeypatch, *words)
    assert refusal is not None and refusal.code == "init.plan" and "moe_runner_backend" in str(refusal)


def test_on_a_terminal_what_is_missing_is_asked_for(tmp_path, quickstart) -> None:
    (tmp_path / "models").symlink_to(quickstart)
    (tmp_path / "data").symlink_to(quickstart / "data")
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "slimx", "init", "--out", "asked.yaml"],
        cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(terminal)
    os.write(controller, b"\ndata/train.jsonl\ndata/heldout.jsonl\n\n")
    assert process.wait(300) == 0, process.stderr and process.stderr.read()
    os.close(controller)
    written = yaml.safe_load((tmp_path / "asked.yaml").read_text())
    assert written["model"]["path"] == "models/model"
    assert written["eval"]["prompts"] == {"heldout": "data/heldout.jsonl"}


MODEL, PROMPTS, HELD_OUT, MACHINE, NODES = "directory of the model", "file of prompts", "held-out", "machine", "nodes"


@pytest.fixture
def terminal(monkeypatch, tmp_path, quickstart):
    """Function that answers the questions of `slimx init` in order, and returns the questions that were asked, and the
    error. The input ends after the last answer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(quickstart)
    shutil.copytree(quickstart / "data", tmp_path / "data")

    def answer(answers: list[str], *words: str) -> tuple[list[str], SlimxError | None]:
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        asked: list[str] = []
        given = iter(answers)

        def ask(question: str) -> str:
            asked.append(question)
            try:
                return next(given)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", ask)
        return asked, typed(monkeypatch, *words)

    return answer


@pytest.mark.parametrize(
    ("answers", "questions"),
    [
        (["mdoel", "", "", "", ""], [MODEL, MODEL, PROMPTS, HELD_OUT, MACHINE]),
        (["", "nowhere.jsonl", "data", "", "", ""], [MODEL, PROMPTS, PROMPTS, PROMPTS, HELD_OUT, MACHINE]),
        (["", "", "nowhere.jsonl", "", ""], [MODEL, PROMPTS, HELD_OUT, HELD_OUT, MACHINE]),
        (["", "", "", "a100", "h100", "two", "0", "1"], [MODEL, PROMPTS, HELD_OUT, MACHINE, MACHINE, *[NODES] * 3]),
    ],
)
def test_a_wrong_answer_is_asked_for_again(capsys, terminal, answers, questions) -> None:
    asked, refusal = terminal(answers)
    assert refusal is None and Path("run.yaml").exists()
    assert len(asked) == len(questions) and all(word in said for word, said in zip(questions, asked, strict=True))
    assert capsys.readouterr().err.count("slimx: ") == len(answers) - len({*questions})


def test_a_machine_on_which_the_model_does_not_fit_is_asked_for_again(terminal, tmp_path) -> None:
    large = str(MODELS / "Qwen3-235B-A22B")
    asked, refusal = terminal(["", "cpu", "h100", "1", "h100", "12"], "--model", large, "--prompts", "data/train.jsonl")
    assert refusal is None and [NODES in question for question in asked] == [False] * 3 + [True, False, True]
    assert load_config(tmp_path / "run.yaml").cluster.nodes == 12


def test_a_reward_that_cannot_be_loaded_is_asked_for_again(terminal, tmp_path) -> None:
    long = {"messages": [{"role": "user", "content": "Why?"}], "answer": "because " * 20}
    answers = ["", "", "nope", "nope.nope", "math", ""]
    asked, refusal = terminal(answers, "--model", "models/model", "--prompts", rows(tmp_path / "long.jsonl", long))
    assert refusal is None and load_config(tmp_path / "run.yaml").reward.function == "math"
    assert [("reward" in question) for question in asked] == [False, True, True, True, True, False]


def test_the_end_of_the_input_ends_the_questions(terminal) -> None:
    asked, refusal = terminal(["nowhere.jsonl"], "--model", "models/model")
    assert refusal is None and [PROMPTS in question for question in asked] == [True, True, False, False]
    shutil.rmtree("data")
    asked, refusal = terminal(["nowhere.jsonl"], "--model", "models/model", "--out", "other.yaml")
    assert refusal is not None and (refusal.code, refusal.about) == ("init.missing", "--prompts") and len(asked) == 2
