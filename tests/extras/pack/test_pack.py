"""An archive of a run has what a maintainer needs, whatever state the run is in, and nothing private."""

from __future__ import annotations

import json
import os
import re
import stat
import tarfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slimx.extras.pack import archive, contents
from slimx.extras.pack.archive import Packed, pack
from slimx.extras.pack.command import app
from slimx.extras.pack.contents import FILES, LeftOut
from slimx.observability.live.run_lock import locked
from tests.refusals import refused

SECRET = "Zx81Qw77pLm2"
UNKNOWN = "Rt55Kw81Zb4Qm3Yc"
"""A secret that no other file of the run contains."""
PRIVATE = "the private question"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out torch and the driver, which take seconds and are tested with the doctor."""
    monkeypatch.setattr("slimx.extras.pack.environment.devices", lambda: iter(()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for folder in ("logs", "checkpoints/iter_0000001", "rollouts", "hf", "tokenizer", "tensorboard", "stacks"):
        (run / folder).mkdir(parents=True)
    config = {
        "run": {"name": "r", "dir": "/home/carol/runs/r"},
        "schedule": {"steps": 3},
        "track": {"webhook": f"https://hooks.slack.com/services/{SECRET}"},
        "reward": {"options": {"api_key": SECRET, "max_tokens": 5}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    record = {"step": 1, "version": 1, "time": 1e9, "metrics": {"reward/mean": 0.5}}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "timeline.jsonl").write_text('{"name": "train", "step": 1, "track": "main", "start": 1e9, "seconds": 2.0}\n')
    dropped = {"step": 1, "prompt": PRIVATE, "rewards": [1.0], "reason": "reward failed", "detail": f"key sk-{SECRET}"}
    (run / "dropped.jsonl").write_text(json.dumps(dropped) + "\n{torn")
    (run / "samples.jsonl").write_text("".join(json.dumps({"step": n, "prompt": PRIVATE}) + "\n" for n in range(9)))
    engine = {"name": "actor-0", "url": "http://gpu07.cluster.example:1", "role": "regular", "frozen": False}
    engine |= {"standing": "member", "restarts": 0, "nodes": 1}
    (run / "engines.json").write_text(json.dumps({"engines": [engine], "routers": []}))
    (run / "logs" / "trainer-0.log").write_bytes(
        b"carol@gpu07 failed\xff\n" + b"Authorization: Bearer " + SECRET.encode()
    )
    (run / "checkpoints" / "iter_0000001" / "weights.json").write_text("weights")
    for name in ("rollouts/step-0000001.groups", "hf/model.safetensors", "tokenizer/tokenizer.json"):
        (run / name).write_text(PRIVATE)
    return run


def packed(run: Path, out: Path, rollouts: int = 0, **environment: str) -> tuple[dict[str, str], Packed]:
    """Returns the texts of the archive by their names, and what the command says about it."""
    result = pack(run, out, rollouts, environment)
    with tarfile.open(out) as opened:
        members = opened.getmembers()
        assert {(member.uid, member.uname, member.isreg()) for member in members} == {(0, "", True)}
        texts = {}
        for member in members:
            folder, _, name = member.name.partition("/")
            assert folder == "bug"
            texts[name] = opened.extractfile(member).read().decode()
    return texts, result


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "bug.tar.gz"


@pytest.mark.parametrize("running", [True, False])
def test_an_archive_has_what_is_needed_and_nothing_private(run, out, running):
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": SECRET, "HOME": "/home/carol", "UNRELATED": "x"}
    if running:
        with locked(run):
            texts, result = packed(run, out, **environment)
    else:
        texts, result = packed(run, out, **environment)
    kept = {"config.yaml", "metrics.jsonl", "timeline.jsonl", "dropped.jsonl", "engines.json", "logs/trainer-0.log"}
    assert set(texts) == kept | {"status.txt", "alerts.txt", "environment.txt"}
    whole = "\n".join(texts.values())
    for private in (SECRET, PRIVATE, "carol", "gpu07", "weights", str(run)):
        assert private not in whole, private
    assert yaml.safe_load(texts["config.yaml"])["reward"]["options"]["max_tokens"] == 5
    assert json.loads(texts["dropped.jsonl"])["reason"] == "reward failed"
    assert "torch==" in texts["environment.txt"] and "NCCL_DEBUG=INFO" in texts["environment.txt"]
    assert "UNRELATED" not in whole and ("running" if running else "not running") in texts["status.txt"]
    assert result.removed > 5 and stat.S_IMODE(out.stat().st_mode) == 0o600


def test_rollouts_are_added_only_if_asked_for(run, out):
    (run / "rollouts" / "step-0000001.groups").unlink()
    texts, result = packed(run, out, rollouts=2)
    assert [json.loads(line)["step"] for line in texts["samples.jsonl"].splitlines()] == [7, 8]
    assert [member.name for member in result.members if "private" in member.note] == ["samples.jsonl"]


def test_a_damaged_run_is_packed_with_what_can_be_read(run, out):
    for name in ("config.yaml", "engines.json", "activity.json", "metrics.jsonl"):
        (run / name).write_bytes(b"{\x00\xff: [")
    (run / "rollouts" / "step-0000001.groups").write_text("no groups")
    texts, _ = packed(run, out, rollouts=1)
    assert {"config.yaml", "engines.json", "status.txt", "environment.txt", "rollouts.json"} <= set(texts)


def test_links_and_pipes_are_not_followed(run, out, tmp_path):
    (tmp_path / "outside.log").write_text(PRIVATE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text(PRIVATE)
    (run / "logs" / "linked.log").symlink_to(tmp_path / "outside.log")
    (run / "logs" / "folder.log").mkdir()
    (run / "stacks").rmdir()
    (run / "stacks").symlink_to(tmp_path / "folder")
    (run / "summary.json").symlink_to(tmp_path / "outside.log")
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").symlink_to(tmp_path / "outside.log")
    os.mkfifo(run / "logs" / "pipe.log")
    texts, result = packed(run, out, rollouts=3)
    assert PRIVATE not in "".join(texts.values())
    left = {file.name for file in result.left_out}
    assert {"logs/linked.log", "logs/folder.log", "logs/pipe.log", "stacks", "summary.json"} <= left


def test_long_files_are_cut_to_their_last_lines(run, out, monkeypatch):
    monkeypatch.setitem(contents.LIMITS, "metrics.jsonl", 5_000)
    monkeypatch.setitem(contents.FOLDERS, "logs", 64_000)
    line = "x" * 99 + "\n"
    (run / "metrics.jsonl").write_text(line * 600)
    for number in range(FILES + 5):
        (run / "logs" / f"engine-{number}.log").write_text(line)
        os.utime(run / "logs" / f"engine-{number}.log", (number, number))
    (run / "logs" / "trainer-0.log").write_text("first\n" + line * 600 + "last\n")
    texts, result = packed(run, out)
    log = texts["logs/trainer-0.log"]
    assert log.endswith("\nlast\n") and log.startswith(line) and "first" not in log and len(log) <= 1000
    assert len(texts["metrics.jsonl"]) <= 5_000
    assert sum(name.startswith("logs/") for name in texts) == FILES and len(result.left_out) == 6
    cut = [member.name for member in result.members if "last lines" in member.note]
    assert cut == ["metrics.jsonl", "logs/trainer-0.log"]


def test_a_cut_between_a_key_and_its_value_keeps_no_secret(run, out, monkeypatch):
    monkeypatch.setattr(archive, "environment_lines", lambda environment: iter(()))  # takes 0.2 s
    monkeypatch.setitem(contents.FOLDERS, "logs", 4_000)  # 1,000 bytes for each of the four
    lines = "".join(f"step {number}\n" for number in range(200))
    block = "-----BEGIN RSA PRIVATE KEY-----\n" + f"{UNKNOWN * 4}\n" * 20
    values = {"block": block, "list": f"--password\n- {UNKNOWN}\n", "yaml": f"password: |\n  {UNKNOWN}\n  {UNKNOWN}\n"}
    for cut in range(0, len(block), 48):
        for name, value in values.items():
            tail = lines[len(lines) - (1000 - max(0, len(value) - cut)) :]
            (run / "logs" / f"{name}.log").write_text("first\n" * 300 + value + tail)
        texts, _ = packed(run, out)
        out.unlink()
        assert UNKNOWN not in "".join(texts.values()), cut
    (run / "logs" / "block.log").write_text("password=" + f"{UNKNOWN} " * 99_000)
    texts, _ = packed(run, out)
    assert texts["logs/block.log"] == ""


def test_names_and_secrets_that_one_file_shows_are_removed_from_all(run, out):
    (run / "logs" / "a.log").write_text("login of dorothy at node17x with hunter2-Pass\n")
    (run / "logs" / "b.log").write_text("cache /data/home/dorothy/x, PASSWORD=hunter2-Pass MASTER_ADDR=node17x\n")
    texts, _ = packed(run, out)
    assert re.fullmatch(r"login of USER at host-\d with \[removed\]\n", texts["logs/a.log"])


def test_a_user_named_like_a_key_is_replaced_only_where_the_name_stands_alone(run, out):
    (run / "summary.json").write_text(json.dumps({"adamw_beta": 0.9}))
    (run / "logs" / "a.log").write_text("/home/adamw/x adamw adamw_beta /home/dorothy/dorothy_run\n")
    texts, _ = packed(run, out)
    assert texts["logs/a.log"] == "~/x USER adamw_beta ~/USER_run\n" and "adamw_beta" in texts["summary.json"]


def test_names_of_files_are_redacted_and_stay_different(run, tmp_path):
    for name in ("gpu07.log", "gpu08.log", "carol-hf_Aa81Qw77pLm2.log", "carol-hf_Aa81Qw77pLm3.log"):
        (run / "logs" / name).write_text("http://gpu08:1 x\n")
    out = tmp_path / "carol.tar.gz"
    pack(run, out, 0, {"MASTER_ADDR": "gpu08"})
    with tarfile.open(out) as opened:
        names = opened.getnames()
    assert len({*names}) == len(names) == len({*names} & {name for name in names if name.startswith("USER/")})
    assert not [name for name in names if "carol" in name or "gpu0" in name or "Aa81" in name]
    assert "USER/logs/USER-[removed]-2.log" in names


def test_values_of_all_types_are_removed_from_json_and_yaml(run, out):
    values = {"password": 12345, "db": {"passwd": 1.5, "user": "x"}, "text": 'said "password": "a \\" b"', "token": 17}
    (run / "summary.json").write_text(json.dumps(values | {"steps": 3}))
    (run / "config.yaml").write_text(yaml.safe_dump(values | {"max_tokens": 1024, "token_level": True}))
    texts, _ = packed(run, out)
    for name in ("summary.json", "config.yaml"):
        loaded = yaml.safe_load(texts[name])
        assert loaded["password"] == loaded["db"]["passwd"] == "[removed]" and loaded["token"] == 17
        assert loaded["text"].startswith('said "password": "[removed]') and " b" not in loaded["text"]
    assert yaml.safe_load(texts["config.yaml"])["max_tokens"] == 1024


def test_files_with_whole_mappings_under_secret_names_stay_readable(run, out):
    values = {"secrets": {"hf": UNKNOWN, "n": {"deep": f"{UNKNOWN}2"}}, "auth": [["bob", UNKNOWN]], "cookies": {}}
    values |= {"tokens": [1, 2], "hf_Aa81Qw77pLm2": "said {'secrets': {'a': [x", "path": "hf_Aa81Qw77pLm2.x"}
    (run / "summary.json").write_text(json.dumps(values))
    (run / "alerts.jsonl").write_text(json.dumps(values) + "\n")
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    texts, _ = packed(run, out)
    for name in ("summary.json", "alerts.jsonl", "config.yaml"):
        loaded = yaml.safe_load(texts[name])
        assert loaded["secrets"] == loaded["auth"] == "[removed]" and loaded["tokens"] == [1, 2]
        assert loaded["cookies"] == {} and loaded["path"] == "[removed].x" and UNKNOWN not in texts[name]


def test_values_after_secret_names_in_lists_are_removed(run, out):
    values = {
        "pairs": [["api_key", UNKNOWN]],
        "words": ["--api-key", f"{UNKNOWN}3", "--port", "1"],
        "by": ["token", "a"],
    }
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    texts, _ = packed(run, out)
    shown = yaml.safe_load(texts["config.yaml"])
    assert shown["pairs"] == [["api_key", "[removed]"]] and shown["by"] == ["token", "a"]
    assert shown["words"] == ["--api-key", "[removed]", "--port", "1"]


def test_addresses_in_settings_are_replaced(run, out, monkeypatch):
    hosts = {
        "MASTER_ADDR": "trainhost",
        "RAY_ADDRESS": "ray://gpuhead.corp:1",
        "HF_ENDPOINT": "https://hub.corp.example",
    }
    (run / "logs" / "a.log").write_text("dorothy is refused by gate7\n")
    hosts |= {"HTTP_PROXY": "http://gate7:3128", "USER": "dorothy"}
    texts, _ = packed(run, out, **hosts, HF_HOME="/home/carol/hf", SGLANG_HOST_IP="10.1.2.3")
    shown = texts["environment.txt"] + texts["logs/a.log"]
    for private in ("trainhost", "gpuhead", "corp.example", "carol", "10.1.2.3", "dorothy", "gate7"):
        assert private not in shown, private
    assert "MASTER_ADDR=host-" in shown and "HF_HOME=~/hf" in shown


def test_a_log_that_vanishes_meanwhile_is_skipped(run, out, monkeypatch):
    (run / "logs" / "gone.log").write_text("x")
    (run / "stacks").chmod(0)
    real = os.scandir

    def scandir(path):
        entries = list(real(path))
        (run / "logs" / "gone.log").unlink(missing_ok=True)
        return iter(entries)

    monkeypatch.setattr(os, "scandir", scandir)
    texts, _ = packed(run, out)
    assert "logs/trainer-0.log" in texts and "logs/gone.log" not in texts


def test_an_unfinished_archive_is_private_and_does_not_stay(run, out, monkeypatch):
    modes = []

    def fails(self, entry, data):
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in out.parent.glob("*.partial"))
        raise OSError(28, "No space left on device")

    out.with_name(f"{out.name}.partial").write_text("of somebody else")
    monkeypatch.setattr(tarfile.TarFile, "addfile", fails)
    with refused("pack.out", about=str(out)):
        pack(run, out, 0, {})
    assert 0o600 in modes and len(list(out.parent.glob("*.partial"))) == 1 and not out.exists()


def test_the_archive_is_bounded_even_if_a_text_grows(run, out, monkeypatch):
    monkeypatch.setattr(archive, "WHOLE", 600)
    texts, result = packed(run, out)
    assert sum(map(len, texts.values())) <= 600 and any(isinstance(file, LeftOut) for file in result.left_out)
    assert sum(contents.LIMITS.values()) + sum(contents.FOLDERS.values()) <= contents.WHOLE


@pytest.mark.parametrize(
    "text",
    [
        "run: {dir: d}\nmodel: {path: m}\nrollout: {promts: p, api_key: %s}\n",
        "run: {dir: [\nreward:\n  api_key: %s\n",
    ],
)
def test_a_refused_run_is_packed_by_its_file(text, out, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text % SECRET)
    texts, _ = packed(file, out)
    assert set(texts) == {"run.yaml", "environment.txt"} and "api_key" in texts["run.yaml"]
    assert SECRET not in texts["run.yaml"]


def test_a_file_of_a_run_that_has_a_directory_packs_both(run, out, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"run: {{dir: {run}}}\nmodel: {{path: m}}\nrollout: {{prompts: p}}\n")
    texts, _ = packed(file, out)
    assert {"run.yaml", "metrics.jsonl"} <= set(texts)


def test_no_run_and_an_archive_that_exists_are_refused(run, out, tmp_path):
    with refused("run.none", about=str(tmp_path)):
        pack(tmp_path, out, 0, {})
    assert not out.exists()
    out.write_text("mine")
    with refused("pack.out", about=str(out)):
        pack(run, out, 0, {})
    assert out.read_text() == "mine"
    with refused("pack.out"):
        pack(run, tmp_path / "absent" / "a.tar.gz", 0, {})


def test_the_command_prints_what_the_archive_contains(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run.rename(tmp_path / "run-v1.2")
    done = CliRunner().invoke(app, [str(run)])
    (file,) = tmp_path.glob("slimx-run-v1.2-*.tar.gz")
    assert done.exit_code == 0 and file.name in done.output and f"{file.stat().st_size:,}" in done.output
    assert all(name in done.output for name in ("config.yaml", "logs/trainer-0.log", "--rollouts"))
