"""A wheel contains all that the commands without trainers and engines need, and they import only what it requires."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slimx import cli
from tests.documents import ROOT
from tests.extras.watch.run_stand import write_run

SOURCES = (
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "csrc",
    "configs/moe",
    "pyproject.toml",
    "requirements",
    "setup.py",
    "slimx",
)
"""Files and folders of the repository that a build reads."""
HEAVY = {"torch", "megatron-core", "sglang", "ray", "transformers"}
LIBRARIES = {f"slimx/_lib/libslimx_{name}.so" for name in ("cpu", "exact", "int4")}
CONFIGS = {f"slimx/extras/quickstart/configs/{name}.yaml" for name in ("quickstart", "quickstart-sft")}

COMMANDS = [
    (["--help"], 0, "quickstart"),
    (["keys", "temperature"], 0, "eval.temperature"),
    (
        ["init", "--model", "configs/moe/models/Qwen3-30B-A3B", "--prompts", "prompts.jsonl", "--gpu", "h100"],
        0,
        "run.yaml",
    ),
    (["data", "check", "prompts.jsonl"], 0, "1 prompt"),
    (["plan", str(ROOT / "configs/moe/qwen3-30b-a3b.yaml")], 0, "proven"),
    (["status", "run"], 0, "step 2"),
    (["report", "run"], 0, "report report.html"),
    (["alerts", "run"], 0, "no alerts"),
    (["pack", "run"], 0, "archive "),
    (["rollouts", "run", "--step", "2"], 0, "2+2="),
    (["watch", "nothing"], 2, "nothing"),
    (["stacks", "run"], 2, "process"),
    (["from-slime", "slime.sh"], 0, "prompts_per_step: 8"),
    (["from-verl", "verl.sh"], 0, "prompts_per_step: 8"),
    (["from-trl", "trl.yaml", "trainer=grpo"], 0, "group_size: 4"),
    (["health", "--disk", "0", "--shm", "0"], 0, ""),
    (["doctor"], 1, "missing  torch"),
    (["train", str(ROOT / "configs/moe/quickstart-sft.yaml")], 2, "slimx setup"),
    (["doctor", str(ROOT / "configs/moe/quickstart-sft.yaml")], 1, "is not checked"),
    (["generate", str(ROOT / "configs/moe/quickstart.yaml"), "trainer.load=null"], 2, "slimx setup"),
    (["eval", str(ROOT / "configs/moe/quickstart.yaml"), "trainer.load=null"], 2, "slimx setup"),
    (["convert", "hf-to-megatron", "configs/moe/models/Qwen3-30B-A3B", "out"], 2, "slimx setup"),
    (["quickstart"], 2, "slimx setup"),
    (["setup"], 2, "--system"),
]
"""Arguments of commands, their exit status, and a part of their output."""
SCRIPTS = {
    "slime.sh": "python train.py --hf-checkpoint model --rollout-batch-size 8 --n-samples-per-prompt 4\n",
    "verl.sh": "python -m verl.trainer.main_ppo data.train_batch_size=8\n",
    "trl.yaml": "model_name_or_path: model\nnum_generations: 4\n",
}


def copy_of_sources(directory: Path) -> Path:
    """Copies the sources, so that a build leaves nothing in the repository."""
    for name in SOURCES:
        directory.mkdir(exist_ok=True)
        ignored = "--exclude=__pycache__", "--exclude=_lib"
        subprocess.run(["tar", "-cf", directory / "part.tar", *ignored, name], cwd=ROOT, check=True)
        subprocess.run(["tar", "-xf", directory / "part.tar"], cwd=directory, check=True)
    (directory / "part.tar").unlink()
    return directory


def build(sources: Path, *command: str, compiler: str) -> None:
    environment = {"PATH": os.environ["PATH"], "SLIMX_CUDA": "0", "CXX": compiler}
    arguments = [sys.executable, "setup.py", "--quiet", *command]
    done = subprocess.run(arguments, cwd=sources, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel whose libraries are empty files: compiling them takes seconds, and these tests call none."""
    sources = copy_of_sources(tmp_path_factory.mktemp("sources"))
    compiler = sources / "no-compiler"
    compiler.write_text('#!/bin/sh\nfor target; do :; done\ntouch "$target"\n')
    compiler.chmod(0o755)
    build(sources, "bdist_wheel", compiler=str(compiler))
    (built,) = (sources / "dist").glob("*.whl")
    return built


def required(names: list[Requirement]) -> set[str]:
    """Returns the distributions that `names` bring, by their names in this environment."""
    found: set[tuple[str, frozenset[str]]] = set()
    left = [(name.name, frozenset(name.extras)) for name in names]
    while left:
        name, extras = left.pop()
        if (canonicalize_name(name), extras) in found:
            continue
        found.add((canonicalize_name(name), extras))
        for requirement in map(Requirement, distribution(name).requires or []):
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
                left.append((requirement.name, frozenset(requirement.extras)))
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the wheel and, as links, the distributions that it requires, and no others."""
    directory = tmp_path_factory.mktemp("light")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    (about,) = directory.glob("*.dist-info/METADATA")
    lines = re.findall(r"^Requires-Dist: (.*)$", about.read_text(), re.MULTILINE)
    names = required([Requirement(line) for line in lines if "extra ==" not in line])
    assert not names & HEAVY
    for name in names:
        package = distribution(name)
        for part in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            link = directory / part
            if not link.exists():
                link.symlink_to(package.locate_file(part))
    return directory


def slimx(light: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of the wheel with the packages in `light` alone."""
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(light), "HOME": str(cwd)}
    command = [python, "-S", "-P", "-m", "slimx", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_wheel_has_libraries_data_and_a_platform(wheel: Path) -> None:
    assert re.fullmatch(r"slimx-[\d.]+-py3-none-(many)?linux\w+\.whl", wheel.name)
    files = {path for path in (ROOT / "slimx").rglob("*.*") if path.is_file() and "_lib" not in path.parts}
    data = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".md", ".pyc")}
    locks = {f"slimx/extras/install/locks/{path.name}" for path in (ROOT / "requirements").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("slimx/")}
        assert archive.read(max(CONFIGS)) == (ROOT / "configs/moe/quickstart.yaml").read_bytes()
    assert names == data | LIBRARIES | CONFIGS | locks
    assert any(name.endswith("page.html") for name in data)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Returns a directory with prompts, a run, and the model and configuration of another."""
    write_run(tmp_path)
    model = tmp_path / "configs/moe/models/Qwen3-30B-A3B"
    model.mkdir(parents=True)
    shutil.copy(ROOT / "configs/moe/models/Qwen3-30B-A3B/config.json", model)
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    COMMANDS,
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_need_only_what_the_wheel_requires(
    light: Path, desk: Path, arguments: list[str], status: int, says: str
) -> None:
    done = slimx(light, *arguments, cwd=desk)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_names_the_packages_that_each_command_needs() -> None:
    section = (ROOT / "docs/install.md").read_text().partition("## What each command needs")[2].partition("\n## ")[0]
    wheel, setup = ([*re.findall(r"`([^`]+)`", row)] for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE))
    program = typer.main.get_command(cli.app)
    commands = program.list_commands(typer.Context(program))
    assert sorted(wheel + [name for name in setup if " " not in name]) == sorted(commands)
    refused = {arguments[0] for arguments, _, says in COMMANDS if says == "slimx setup"}
    run = {arguments[0] for arguments, _, _ in COMMANDS} - {"--help"}
    assert run - refused == {*wheel} and refused == {*setup} - {"doctor FILE"}


@pytest.mark.slow("compiles the libraries, and installs 20 packages from the package index")
def test_a_source_archive_becomes_a_wheel_that_pip_installs(
    desk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sources = copy_of_sources(tmp_path_factory.mktemp("sources"))
    build(sources, "sdist", compiler="g++")
    (archive,) = (sources / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "csrc").iterdir()} <= inside
    venv, wheels = desk / "venv", desk / "wheels"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"SLIMX_CUDA": "0"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True)

    options = ("--quiet", "--no-deps", "--no-build-isolation")
    done = run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", wheels, archive)
    assert done.returncode == 0, done.stderr
    assert run(sys.executable, "-m", "venv", venv).returncode == 0
    done = run(venv / "bin/python", "-m", "pip", "install", "--quiet", *wheels.glob("*.whl"))
    assert done.returncode == 0, done.stderr
    installed = {line.split("==")[0].lower() for line in run(venv / "bin/pip", "freeze").stdout.splitlines()}
    assert "slimx" in " ".join(installed) and not installed & HEAVY
    loaded = "import slimx, pathlib, ctypes\n"
    loaded += "[ctypes.CDLL(str(p)) for p in pathlib.Path(slimx.__file__).parent.glob('_lib/*.so')]"
    assert run(venv / "bin/python", "-c", loaded).returncode == 0
    for arguments, status, says in COMMANDS[:-1]:  # setup would install
        done = run(venv / "bin/slimx", *arguments)
        assert (done.returncode, says in done.stdout + done.stderr) == (status, True), (arguments, done)
