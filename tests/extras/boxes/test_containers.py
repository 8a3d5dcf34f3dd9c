"""The commands that a container engine gets, engines that fail, and what killed runs leave with podman."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.extras.boxes.containers import ContainerBox
from slimx.extras.boxes.engines import OWNER, ContainerEngine, has_died, owner
from slimx.extras.boxes.programs import seccomp
from slimx.extras.boxes.programs.sandbox import Limits
from slimx.extras.boxes.protocol import BoxLost, BoxRefusal
from tests.extras.boxes.box_stand import SMALL, image, needed_engine
from tests.refusals import refused

STAND_IN = """#!{python}
import json, sys
words = sys.argv[1:]
kept = ""
for word in words:
    if word.startswith("seccomp="):
        kept = open(word.removeprefix("seccomp=")).read()
with open("{log}", "a") as log:
    log.write(json.dumps([words, kept]) + "\\n")
answers = {answers}
status, said = answers.get(words[0], (0, ""))
print(said, file=sys.stderr if status else sys.stdout)
sys.exit(status)
"""


@pytest.fixture
def stand_in(tmp_path):
    """Makes a program that replaces a container engine and logs its calls."""

    def make(**answers: tuple[int, str]) -> ContainerEngine:
        usual = {"image": (0, "0"), "create": (0, "c0ffee"), "container": (0, "4096"), "inspect": (0, "0")}
        program = tmp_path / "docker"
        program.write_text(STAND_IN.format(python=sys.executable, log=tmp_path / "log", answers=usual | answers))
        program.chmod(0o755)
        return ContainerEngine((str(program),))

    return make


def engine_calls(directory: Path) -> list[tuple[list[str], str]]:
    return [json.loads(line) for line in (directory / "log").read_text().splitlines()]


def test_a_container_has_no_network_no_capabilities_and_every_limit(stand_in, tmp_path):
    limits = Limits(seconds=5, memory_mib=256, processes=8, disk_mib=16)
    ContainerBox("python:3.12", limits, engine=stand_in(), user="1000:1000", cpus=0.5).end()
    (words, profile), *_ = [call for call in engine_calls(tmp_path) if call[0][0] == "create"]
    options = {(first, second) for first, second in zip(words, words[1:], strict=False) if first.startswith("--")}
    assert options >= {
        ("--network", "none"),
        ("--cap-drop", "all"),
        ("--security-opt", "no-new-privileges"),
        ("--memory", "256m"),
        ("--memory-swap", "256m"),
        ("--pids-limit", "24"),
        ("--cpus", "0.5"),
        ("--shm-size", "1m"),
        ("--user", "1000:1000"),
        ("--pull", "never"),
        ("--ulimit", f"fsize={16 * 2**20}:{16 * 2**20}"),
        ("--label", f"{OWNER}={owner()}"),
    }
    assert json.loads(profile) == seccomp.profile() and "--privileged" not in words and "--volume" not in words
    assert engine_calls(tmp_path)[-1][0] == ["rm", "--force", "--volumes", "c0ffee"]


def test_the_profile_of_a_container_denies_what_the_sandboxs_filter_does():
    rules = seccomp.profile()["syscalls"]
    plain = {name for rule in rules if not rule["args"] for name in rule["names"]}
    assert plain >= {"mount", "unshare", "setns", "bpf", "keyctl", "io_uring_setup", "memfd_create", "clone3"}
    bits = [rule["args"][0] for rule in rules if rule["names"] == ["clone"]]
    assert sum(bit["value"] for bit in bits) == 0x7E020000 and all(bit["value"] == bit["valueTwo"] for bit in bits)
    families = [rule["args"][0] for rule in rules if rule["names"] == ["socket"]]
    denied = {family["value"] for family in families if family["op"] == "SCMP_CMP_EQ"}
    assert denied == {0, 3, 4, 5, 6, 7, 8, 9} and {"SCMP_CMP_GT"} == {e["op"] for e in families if e["value"] == 10}


@pytest.mark.parametrize(
    ("answers", "code", "about"),
    [
        ({"image": (1, "no such image")}, "box.source", "python:3.12"),
        ({"image": (0, "2")}, "box.volume", "python:3.12"),
        ({"create": (125, "no space")}, "box.lost", None),
    ],
)
def test_an_image_that_is_not_there_or_has_volumes_begins_no_box(stand_in, answers, code, about):
    with refused(code, about=about):
        ContainerBox("python:3.12", SMALL, engine=stand_in(**answers))


def test_an_engine_that_fails_is_a_lost_box_and_not_the_programs_failure(stand_in):
    box = ContainerBox("python:3.12", SMALL, engine=stand_in(start=(125, "cgroups in hybrid mode not supported")))
    with refused("box.lost", kind=BoxLost):
        box.run(["true"])
    box.end()


def test_engines_that_do_not_answer_are_named(stand_in, tmp_path):
    broken = stand_in(ps=(1, "Cannot connect to the Docker daemon"))
    with refused("box.engine", about=broken.words[0]) as refusal:
        ContainerEngine.find(broken.words)
    assert "Cannot connect" in str(refusal.value)
    with refused("box.engine", about=str(tmp_path / "none")):
        ContainerEngine.find([str(tmp_path / "none")])


def test_a_label_says_whether_its_process_has_died():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    place, mine, began = owner().split("/")
    assert not has_died(owner())
    assert has_died(f"{place}/{gone.pid}/1") and has_died(f"{place}/{mine}/{int(began) - 1}"), "a number used again"
    assert not has_died(f"elsewhere-1/{gone.pid}/1") and not has_died("") and not has_died("x/y/z")


@pytest.mark.slow("needs podman")
def test_containers_of_a_killed_run_are_removed_and_live_ones_kept(tmp_path):
    engine = needed_engine()
    program = (
        "import os, sys; from pathlib import Path\n"
        "from slimx.extras.boxes.containers import ContainerBox\n"
        "from slimx.extras.boxes.engines import ContainerEngine\n"
        "from slimx.extras.boxes.programs.sandbox import Limits\n"
        "engine = ContainerEngine(tuple(sys.argv[2:]))\n"
        "box = ContainerBox(Path(sys.argv[1]), Limits(disk_mib=8), engine=engine, host_usr=True)\n"
        "engine.call('start', box._name); os._exit(0)"
    )
    box = ContainerBox(image(tmp_path / "image.tar"), SMALL, engine=engine, host_usr=True)
    try:
        subprocess.run([sys.executable, "-c", program, tmp_path / "image.tar", *engine.words], check=True, timeout=600)
        assert engine.sweep() >= 2, "its container, which runs, and its image"
        assert box.run(["true"]).ok
        assert len(engine.call("ps", "--all", "--quiet", "--filter", f"label={OWNER}").split()) == 1
    finally:
        box.end()


def test_a_snapshot_is_read_up_to_its_bound_and_a_failed_one_is_lost(tmp_path):
    """The holes of a sparse file come as zeros, without end."""
    engine = ContainerEngine(("sh", "-c"))
    archive = tmp_path / "root.tar"
    assert engine.save("head -c 1000 /dev/zero", to=archive, most=1000, seconds=60) and archive.stat().st_size == 1000
    assert not engine.save("cat /dev/zero", to=archive, most=3 * 2**20, seconds=60)
    assert archive.stat().st_size <= 3 * 2**20
    for words in ("exit 3", "sleep 600"):
        with pytest.raises(BoxLost):
            engine.save(words, to=archive, most=10, seconds=0.2 if "sleep" in words else 60)


def test_a_box_refuses_a_snapshot_beyond_what_it_may_take(stand_in, tmp_path):
    box = ContainerBox("python:3.12", Limits(disk_mib=1), engine=stand_in(export=(0, "0" * 2**21)), image_mib=1)
    with pytest.raises(BoxRefusal) as caught:
        box.snapshot(tmp_path / "to")
    assert caught.value.code.endswith("large") and not (tmp_path / "to").exists()
    box.end()
