"""The launch scripts and the Dockerfile: clean to their linters; addresses, NCCL's environment, waits and endings."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slimx.config.load import load_config
from tests.refusals import numbers

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "scripts/launch").glob("*.s*"))


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Returns what `script` prints after common.sh was sourced."""
    return subprocess.run(
        ["bash", "-c", f"source scripts/launch/common.sh\n{script}"],
        cwd=ROOT,
        env={"PATH": f"{environment.pop('FIRST', '')}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


def stub(directory: Path, name: str, prints: str) -> str:
    """Returns a folder for PATH in which the program `name` prints `prints`."""
    program = directory / name
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    program.chmod(0o755)
    return str(directory)


@pytest.mark.needs("shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_the_cuda_of_the_lock_and_apex_from_its_source():
    lock, image = (ROOT / "requirements/cu130.txt").read_text(), (ROOT / "Dockerfile").read_text()
    (toolkit,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", lock, re.MULTILINE)
    (base,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.\d+-cudnn-devel", image, re.MULTILINE)
    assert base == toolkit
    assert re.search(r"github.com/NVIDIA/apex \"\$APEX\"", image) and re.search(r"^ARG APEX=[0-9a-f]{40}$", image, re.M)
    assert not re.search(r"pip install[^\n]* apex\b", image) and not re.search(r"^apex\b", lock, re.MULTILINE)
    for version in re.findall(r"flash-attn==([\w.]+)", image):
        assert f"flash-attn=={version}" in lock, "the lock says why this version"


def test_the_kubernetes_job_fits_its_configuration():
    policy, job = yaml.safe_load_all((ROOT / "scripts/launch/kuberay.yaml").read_text())
    program, command, file, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("slimx", "train")
    config = load_config(file, overrides)
    ray = job["spec"]["rayClusterSpec"]
    head, (workers,) = ray["headGroupSpec"], ray["workerGroupSpecs"]
    pods = [head["template"], workers["template"]]
    containers = [container for pod in pods for container in pod["spec"]["containers"]]

    assert config.cluster.ray_address == "auto"
    assert {workers[key] + 1 for key in ("replicas", "minReplicas", "maxReplicas")} == {config.cluster.nodes}
    assert {c["resources"]["limits"]["nvidia.com/gpu"] for c in containers} == {
        config.trainer.world_size // config.cluster.nodes
    }
    (pinned,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements/cu130.txt").read_text(), re.MULTILINE)
    assert ray["rayVersion"] == pinned and ray["authOptions"] == {"mode": "token"}

    # KubeRay writes parameters of `ray start` into a shell command as they are.
    (settings,) = shlex.split(head["rayStartParams"]["system-config"])
    (of_node,) = re.findall(r"--system-config='(\{.*\})'", (ROOT / "scripts/launch/node.sh").read_text())
    assert json.loads(settings) == json.loads(of_node)

    assert [pod["spec"]["automountServiceAccountToken"] for pod in pods] == [False] * len(pods)
    assert [c["securityContext"]["allowPrivilegeEscalation"] for c in containers] == [False] * len(containers)

    label = policy["spec"]["podSelector"]["matchLabels"]
    assert all(pod["metadata"]["labels"] == label for pod in pods)
    inside, submission = policy["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert [port["port"] for port in submission["ports"]] == [8265]
    for path in (config.model.path, config.rollout.prompts, config.run.dir):
        assert any(str(path).startswith(mount["mountPath"] + "/") for c in containers for mount in c["volumeMounts"]), (
            path
        )


def test_every_script_stops_at_its_first_error():
    # common.sh sets it for all that source it.
    for script in SCRIPTS:
        text = script.read_text()
        assert "set -euo pipefail" in text or "source scripts/launch/" in text, script.name


@pytest.mark.parametrize(
    ("kind", "address"),
    [("4", "10.1.2.3"), ("6", "fd00::5")],
)
def test_a_node_takes_its_first_reachable_address(tmp_path, kind, address):
    first = stub(tmp_path, "hostname", "127.0.1.1 10.1.2.3 172.17.0.1 fe80::1 fd00::5 ")
    assert bash("own_address", FIRST=first, SLIMX_IP=kind).stdout.strip() == address


def test_a_named_interface_is_used_by_nccl_and_gloo(tmp_path):
    first = stub(tmp_path, "ip", "3: ib0    inet 192.168.7.9/24 brd 192.168.7.255 scope global ib0")
    done = bash(
        "prepare_environment; echo $NODE_ADDRESS $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME",
        FIRST=first,
        SLIMX_INTERFACE="ib0",
    )
    assert done.stdout.split() == ["192.168.7.9", "ib0", "ib0"]


def test_a_node_without_an_address_is_refused_with_what_to_set(tmp_path):
    done = bash("prepare_environment", FIRST=stub(tmp_path, "hostname", "127.0.1.1"))
    assert done.returncode == 1 and {"SLIMX_ADDRESS", "SLIMX_INTERFACE"} <= {*re.findall(r"SLIMX_\w+", done.stderr)}


def test_an_nvlink_domain_is_set_for_nccl_and_labelled_in_ray(tmp_path):
    fabric = "    Fabric\n        State    : Completed\n        CliqueId : 2\n        ClusterUUID : 8b3c-77"
    done = bash(
        "prepare_environment; echo $NCCL_MNNVL_ENABLE $NCCL_CUMEM_ENABLE; ray_arguments 7 | grep labels",
        FIRST=stub(tmp_path, "nvidia-smi", fabric),
        SLIMX_ADDRESS="10.0.0.1",
        SLIMX_NVLINK="1",
    )
    assert done.stdout.split() == ["1", "1", "--labels=slimx-order=00007,slimx-domain=8b3c-77.2"], done.stderr
    alone = bash("prepare_environment; echo ${NCCL_MNNVL_ENABLE:-none}", SLIMX_ADDRESS="10.0.0.1")
    assert alone.stdout.strip() == "none"


def test_ipv6_stands_in_brackets_where_a_port_follows():
    assert bash("in_url fd00::5; echo; in_url 10.0.0.1").stdout.split() == ["[fd00::5]", "10.0.0.1"]


def test_nodes_are_counted_by_what_ray_shows_as_active(tmp_path):
    status = "Node status\nActive:\n 1 node_a\n 2 node_b\nPending:\n 1 node_c\nRecent failures:\n node_d: raylet died"
    assert bash("ray_nodes 10.0.0.1:6379", FIRST=stub(tmp_path, "ray", status)).stdout.strip() == "3"


def test_a_wait_ends_at_its_deadline_and_says_what_it_waited_for():
    began = time.monotonic()
    done = bash("await 1 'the moon' false || echo gave up")
    assert done.stdout.strip() == "gave up" and "the moon" in done.stderr and numbers(done.stderr)[-1] == 1
    assert time.monotonic() - began < 120


def test_a_process_that_will_not_end_is_killed():
    done = bash("trap '' TERM; sleep 60 & end $! 1; wait $! || echo $?")  # it ignores what its parent ignored
    assert done.stdout.strip() == "137", done.stderr


def test_a_trapped_signal_does_not_hide_the_status_of_the_awaited_process():
    script = "trap 'kill -USR2 $child' USR1; bash -c 'trap \"exit 75\" USR2; while :; do sleep 0.1; done' & child=$!\n"
    done = bash(script + "(sleep 0.5; kill -USR1 $$) & status=0; collect $child || status=$?; echo $status")
    assert done.stdout.strip() == "75", done.stderr


def launch(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user calls it."""
    return subprocess.run(
        [ROOT / "scripts/launch" / name, *arguments],
        cwd=ROOT.parent,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(Path.home()),
            "PYTHONPATH": str(ROOT),
            "SLIMX_GPUS": "0",
            "SLIMX_ADDRESS": "127.0.0.2",
            "SLIMX_VENV": str(Path(sys.executable).parents[1]),
            **environment,
        },
        capture_output=True,
        text=True,
    )


def test_a_single_node_starts_a_run_only_if_it_is_healthy():
    refused = launch("single_node.sh", "absent.yaml")
    assert refused.returncode == 2 and "absent.yaml" in refused.stderr
    unfit = launch("single_node.sh", "absent.yaml", SLIMX_HEALTH="--hca none0")
    assert unfit.returncode == 1 and "none0" in unfit.stdout and "absent" not in unfit.stderr


def test_a_node_without_a_first_node_gives_up_at_the_deadline(tmp_path):
    # Other tests make such directories meanwhile: this node's is the one that its mktemp names.
    (tmp_path / "mktemp").write_text(f'#!/bin/bash\n/usr/bin/mktemp "$@" | tee {tmp_path}/made\n')
    (tmp_path / "mktemp").chmod(0o755)
    environment = {"NODE_RANK": "1", "NODES": "2", "JOB_DIR": str(tmp_path), "SLIMX_JOIN_S": "1"}
    done = launch("node.sh", "x.yaml", PATH=f"{tmp_path}:/usr/bin:/bin", **environment)
    assert done.returncode == 1 and f"{tmp_path}/head" in done.stderr and "1 s" in done.stderr
    made = Path((tmp_path / "made").read_text().strip())
    assert made.name.startswith("slimx-ray.") and not made.exists()


RAY = """#!/bin/bash
[[ $1 == start ]] || exit 1  # status: no node has joined
for argument; do [[ $argument != --port=* ]] || port=${{argument#*=}}; done
{python} -c "
import socket, time
listener = socket.create_server(('127.0.0.2', $port))
time.sleep({seconds})"
"""


@pytest.mark.parametrize("seconds", [0, 2], ids=["before its port is open", "before the others have joined"])
def test_a_first_node_whose_ray_ends_does_not_wait_for_the_others(tmp_path, seconds):
    programs, job = tmp_path / "venv/bin", tmp_path / "job"
    programs.mkdir(parents=True)
    for name, text in (("ray", RAY), ("python", '#!/bin/bash\nexec {python} "$@"\n')):
        (programs / name).write_text(text.format(python=sys.executable, seconds=seconds))
        (programs / name).chmod(0o755)
    job.mkdir()
    began = time.monotonic()
    done = launch(
        "node.sh",
        "x.yaml",
        NODE_RANK="0",
        NODES="2",
        JOB_DIR=str(job),
        SLIMX_JOIN_S="600",
        SLIMX_VENV=str(programs.parent),
    )
    assert done.returncode == 1 and time.monotonic() - began < 300, done.stderr
    assert (job / "over").read_text() == "1\n" and not (job / "token").exists()


@pytest.mark.slow("starts Ray and waits 90 s, in which a busy machine has started it")
@pytest.mark.integration
def test_a_first_node_reports_how_many_others_joined(tmp_path):
    done = launch("node.sh", "x.yaml", NODE_RANK="0", NODES="2", JOB_DIR=str(tmp_path), SLIMX_JOIN_S="90")
    assert done.returncode == 1, done.stderr
    lines = [line.split(": ", 1)[1] for line in done.stderr.splitlines()]  # without the time
    (index,) = (index for index, line in enumerate(lines) if "127.0.0.2:" in line)
    assert {90, 2} <= {*numbers(lines[index])}, "seconds, and nodes that were waited for"
    assert numbers(lines[index + 1])[0] == 1, "nodes that came"
    assert (tmp_path / "over").read_text() == "1\n" and not (tmp_path / "token").exists()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert str(tmp_path) not in (process / "environ").read_text(errors="replace"), process
        except OSError:
            continue


JOB = """
source scripts/launch/slurm.sh
export SLURM_JOB_NODELIST=n1 SLURM_JOB_NUM_NODES=1
sleep() { exit 99; }  # of requeue, during which Slurm ends the script
run_job x.yaml
"""


def slurm_job(tmp_path: Path, start: int, status: int, saved: int | None) -> tuple[int, str]:
    """Returns exit status and requests to Slurm of a job's start number `start`, whose run ends with `status` after it
    has saved step `saved`."""
    programs, calls = tmp_path / f"bin{start}", tmp_path / f"calls{start}"
    programs.mkdir()
    saving = "" if saved is None else f'echo {saved} > "$JOB_DIR/saved"; '
    for name, does in (
        ("srun", f'{saving}echo {status} > "$JOB_DIR/over"; exit {status}'),
        ("scontrol", f'echo "$@" >> {calls}'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    environment = {"SLIMX_HEALTH": "none", "SLIMX_JOBS": str(tmp_path / "jobs"), "SLURM_JOB_ID": "7"}
    done = bash(JOB, FIRST=str(programs), SLURM_RESTART_COUNT=str(start), **environment)
    return done.returncode, calls.read_text().strip() if calls.exists() else ""


def test_a_job_that_lost_a_part_returns_while_checkpoints_advance(tmp_path):
    again = (99, "requeue 7")
    starts = [slurm_job(tmp_path, start, 69, saved) for start, saved in enumerate((10, 20, 20, 30, 30, 30))]
    assert starts == [again, again, again, again, again, (69, "")]


@pytest.mark.parametrize(("status", "comes_back"), [(75, True), (138, True), (2, False), (1, False), (143, False)])
def test_other_ends_of_a_job_bring_it_back_after_a_preemption_only(tmp_path, status, comes_back):
    found = slurm_job(tmp_path, 0, status, None)
    assert found == ((99, "requeue 7") if comes_back else (status, ""))
