"""make finds its interpreter on PATH, in pyenv or in uv, and takes the CPU build of torch where there is one."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slimx.extras.install.packages import DRIVER

ROOT = Path(__file__).parents[3]
SYSTEM = "/usr/bin:/bin"
TORCH = re.search(r"^torch==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)[1]
"""Version of the locks, with which the last of make's installs compares what is there."""


def make(*arguments: str, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `make` in the repository, with nothing of this process's environment but the arguments."""
    env = {"PATH": path, "HOME": "/nonexistent"} | variables
    return subprocess.run(["make", "--file=Makefile", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("place", ["PATH", "pyenv", "uv", None])
def test_make_finds_the_interpreter_wherever_it_is(tmp_path: Path, place: str | None):
    """A program of that name that does not run, as pyenv puts on PATH, is passed by. The stand-ins say where it is."""
    bin, hidden = tmp_path / "bin", tmp_path / "hidden"
    python = hidden / "bin/python3.12"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    program(bin / "python3", "exit 127")
    if place == "PATH":
        (bin / "python3.12").symlink_to(python)
        python = bin / "python3.12"
    else:
        program(bin / "python3.12", "exit 127")
    if place == "pyenv":
        program(bin / "pyenv", '[ "$*" = "prefix 3.12" ] && echo ' + str(hidden))
    if place == "uv":
        program(bin / "uv", '[ "$*" = "python find --system 3.12" ] && echo ' + str(python))
    path = f"{bin}:{SYSTEM}"
    done = make("--eval", "show: ; @command -v '$(PYTHON)'", "show", path=path)
    if place is not None:
        assert done.stdout.strip() == str(python), done.stderr
        return
    assert done.returncode == 2 and not done.stdout
    refused = make("venv", f"VENV={tmp_path / 'none'}", path=path)
    assert refused.returncode == 2 and not (tmp_path / "none").exists()
    assert len(refused.stdout.splitlines()) == 1 and "PYTHON=" in refused.stdout


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["test"], "tools.rings test"),
        (["test", "SEED=7"], "tools.rings test --seed 7"),
        (["test-all", "PART=3/10", "SEED=7"], "tools.rings all --part 3/10 --seed 7"),
        (["test-record"], "tools.rings record"),
    ],
)
def test_make_hands_part_and_seed_to_the_runner(words: list[str], runs: str):
    done = make("--dry-run", *words, path=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].replace("'", "").split()[2:] == runs.split(), done.stdout


@pytest.fixture
def indices(tmp_path: Path) -> Iterator[str]:
    """A server of two package indices, /cpu and /own, with a package that is named torch."""
    for index, version in (("cpu", f"{TORCH}+cpu"), ("own", TORCH)):
        write_wheel(tmp_path / "indices" / index / "torch", version)
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "indices"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def write_wheel(directory: Path, version: str) -> None:
    directory.mkdir(parents=True)
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(directory / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", f"__version__ = '{version}'\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.slow("creates an environment")
@pytest.mark.skipif(DRIVER.exists(), reason="a machine with a GPU gets a CUDA build of torch")
@pytest.mark.parametrize(
    ("reachable", "version"), [(True, f"{TORCH}+cpu"), (False, TORCH)], ids=["an index of CPU builds", "none"]
)
def test_torch_is_the_cpu_build_if_an_index_has_it_else_the_default(
    tmp_path: Path, indices: str, reachable: bool, version: str
):
    """Both builds count as the lock's version: what is installed first stays."""
    lock, venv = tmp_path / "lock.txt", tmp_path / "venv"
    (wheel,) = (tmp_path / "indices/own/torch").iterdir()
    lock.write_text(f"torch=={TORCH} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    index = f"{indices}/cpu" if reachable else "http://127.0.0.1:1/whl/cpu"
    variables = [f"REQUIREMENTS={lock}", f"VENV={venv}", f"TORCH_CPU_INDEX={index}", f"PYTHON={sys.executable}"]
    path = os.environ["PATH"]
    done = make("venv", *variables, path=path, PIP_INDEX_URL=f"{indices}/own", PIP_CONFIG_FILE="/dev/null")
    assert done.returncode == 0, done.stderr
    result = subprocess.run([venv / "bin/python", "-c", "import torch; print(torch.__version__)"], capture_output=True)
    assert result.stdout.decode().strip() == version
    assert (index in done.stdout) is not reachable, "said where it was not"


@pytest.mark.slow("creates an environment")
@pytest.mark.parametrize("hashes", ["", f" --hash=sha256:{'0' * 64}"], ids=["no hash", "another file"])
def test_nothing_is_installed_that_is_not_the_file_of_the_lock(tmp_path: Path, indices: str, hashes: str):
    lock, venv = tmp_path / "lock.txt", tmp_path / "venv"
    lock.write_text(f"torch=={TORCH}{hashes}\n")
    variables = [f"REQUIREMENTS={lock}", f"VENV={venv}", f"PYTHON={sys.executable}"]
    done = make(
        *("venv", *variables, "TORCH_CPU_INDEX="),
        path=os.environ["PATH"],
        PIP_INDEX_URL=f"{indices}/own",
        PIP_CONFIG_FILE="/dev/null",
    )
    assert done.returncode and not list(venv.glob("lib/*/site-packages/torch*"))
