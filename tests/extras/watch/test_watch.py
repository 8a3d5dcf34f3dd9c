"""The live page: data of the run's directory alone, read once, for requests with the token."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from PIL import Image

from slimx.config.schema import Config
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.data.saved.trained_tokens import SUFFIX
from slimx.extras.watch.page import server
from slimx.extras.watch.page.content import CHARACTERS, Content, cut
from slimx.extras.watch.page.server import serve
from slimx.extras.watch.rollouts import Choice, show_rollouts, step_of
from slimx.observability.live.run_lock import locked
from slimx.observability.tracking.run_files import read_config
from slimx.orchestration.state.directory import write_config
from tests.extras.watch.page_stand import Page, group, row, served
from tests.refusals import numbers, refused
from tests.unit.rollout.rollout_stand import the_tokenizer


def test_connections_that_ask_nothing_are_ended_and_bounded(run, monkeypatch):
    """Sends trickling bytes, which do not keep a connection open, and many connections, which block no others."""
    monkeypatch.setattr(server, "MOST", 2)

    def opened(page: Page, sent: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", int(page.address.rpartition(":")[2])), timeout=300)
        connection.sendall(sent)
        return connection

    def ended(connection: socket.socket) -> bool:
        with connection, suppress(ConnectionResetError):
            return connection.recv(1) == b""
        return True

    with served(Content(run)) as page:
        crowd = [opened(page, b"GET / HTTP/1.1\r\n") for _ in range(3)]
        assert ended(crowd[0]) and page.get("/?token=secret").status_code == 303 and ended(crowd[1])
        crowd[2].close()
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with served(Content(run)) as page:
        assert ended(opened(page, b"GET / HTTP/1.1\r\nX: y"))


def test_status_charts_and_rollouts_are_what_the_directory_holds(run, page):
    assert page.get("/api/status").json()["state"] == "dead"
    with locked(run):
        assert page.get("/api/status").json()["state"] == "running"
    found = page.get("/api/charts").json()
    (reward,) = (chart for chart in found["charts"] if chart["title"] == "Reward")
    assert reward["block"] == "curves" and {chart["block"] for chart in found["charts"]} == {"curves", "time"}
    assert page.get(f"/api/charts?since={found['version']}").json()["charts"] is None
    assert [item["metric"] for item in reward["about"]] == ["reward/mean"] and reward["about"][0]["good"]
    (card,) = found["cards"]
    assert (card["value"], card["more"]) == ("0.375", ["step 1: 0.25", "step 2: 0.5"])
    (about,) = card["about"]
    assert about["metric"] == "reward/mean" and about["section"] == "reward"
    assert page.get("/api/steps").json() == [1, 2]
    step = page.get("/api/steps/2").json()
    assert [item["prompt"]["dataset"] for item in step["groups"]] == ["sums", "math"]
    trained = [(item["advantage"], item["gap"], item["other_experts"]) for item in step["groups"][0]["trajectories"]]
    assert trained == [(1.0, 0.5, 1), (-1.0, 0.5, 1)]
    assert "gap" not in page.get("/api/steps/1").json()["groups"][0]["trajectories"][0], "it has not been trained"
    tokens = page.get("/api/steps/2/tokens?group=g1").json()["groups"][0]["trajectories"][0]["each_token"]
    assert [token["version"] for token in tokens] == [None, None, 1, 1, None, 2]
    assert [token["source"] for token in tokens][4] == "inserted" and tokens[3]["logprob"] == -3.0
    assert [token["trainer_logprob"] for token in tokens] == [None, -2.0, pytest.approx(-0.1), -2.5, -4.0, -0.5]
    assert [token["other_experts"] for token in tokens] == [False, False, False, True, False, False]
    for path in ("/api/steps/9", "/api/steps/2/tokens?group=g9"):
        assert page.get(path).status_code == 404 and page.get(path).json()["code"].startswith("rollouts.")


def test_responses_have_their_expected_answer_marked(page):
    step = page.get("/api/steps/2").json()
    assert step["passing"] == 1.0
    marked = [[part["marked"] for part in group["trajectories"][0]["parts"]] for group in step["groups"]]
    assert marked == [
        [[["'(", False]], [[")", False]], [["*", True]]],
        [[["'(", False]], [[")", False]], [["*", False]]],
    ]


def test_the_page_draws_several_runs_in_the_same_charts(run, tmp_path):
    other = tmp_path / "other" / "run"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text((run / "config.yaml").read_text())
    (other / "metrics.jsonl").write_text(row(1, 1.0))
    content = Content(run, other)
    first = content.charts("")
    (chart,) = (chart for chart in first["charts"] if chart["block"] == "compared")
    assert [line["name"] for line in chart["figure"]["data"]] == [f"{tmp_path.name}/run", "other/run"]
    assert content.charts(first["version"])["charts"] is None
    with (other / "metrics.jsonl").open("a") as file:
        file.write(row(2, 0.5))
    assert content.charts(first["version"])["charts"] is not None
    with refused("report.compare", about=str(run.resolve())):
        Content(run, run)
    with refused("run.none", about=str(tmp_path)):
        Content(run, tmp_path)


def test_images_of_prompts_are_listed_and_previewed(run, shown, page):
    (listed,) = page.get("/api/steps/3").json()["groups"]
    assert listed["prompt"]["images"] == [*shown, None]
    sizes = []
    for index in (0, 1):
        answer = page.get(f"/api/steps/3/image?group=g3&index={index}")
        assert answer.headers["Content-Type"] == "image/png"
        sizes.append(Image.open(io.BytesIO(answer.content)).size)
    assert sizes == [(320, 107), (20, 40)]
    codes = []
    for query in ("group=g3&index=2", "group=g3&index=3", "group=g3&index=4", "group=g3&index=-1", "group=g3", ""):
        answer = page.get(f"/api/steps/3/image?{query}")
        assert answer.status_code == 404
        codes.append(answer.json()["code"])
    assert codes == ["vision.unreadable", *["rollouts.image"] * 5]
    assert page.get("/api/steps/9/image?group=g3&index=0").json()["code"] == "rollouts.step"
    lines = list(show_rollouts(run, 3, Choice(), buffer=False, dropped=False, as_json=False))
    assert all(any(name in line for line in lines) for name in shown)


def test_a_step_that_a_resumed_run_writes_anew_is_read_anew(run):
    content, file = Content(run), run / DIRECTORY / "step-0000002.groups"
    assert [group["id"] for group in content.rollouts(2)["groups"]] == ["g1", "g2"]
    file.with_suffix(SUFFIX).unlink()
    assert "gap" not in content.rollouts(2)["groups"][0]["trajectories"][0]
    file.write_bytes((run / DIRECTORY / "step-0000001.groups").read_bytes())
    assert [group["id"] for group in content.rollouts(2)["groups"]] == ["g0"]


def test_a_long_text_is_cut_in_the_middle_and_says_how_much_is_left_out():
    assert cut("a" * CHARACTERS) == "a" * CHARACTERS
    short = cut("a" * CHARACTERS + "b" * CHARACTERS)
    assert short.startswith("a") and short.endswith("b") and numbers(short) == [CHARACTERS]


def test_only_the_pages_addresses_are_answered(page):
    for path in (
        "/%2e%2e/config.yaml",
        "/config.yaml",
        "/api/steps/..%2f..",
        "/page.py",
        "/api/steps/-1",
        f"/api/steps/{'9' * 5000}",
    ):
        assert page.get(path).status_code == 404, path
    wrong = page.session.post(page.address + "/api/status", timeout=300)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET,HEAD")
    assert page.get("//elsewhere.example/?token=secret").status_code == 404
    for path in ("/", "/page.js", "/plotly.js", "/api/status"):
        answer = page.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert page.get("/plotly.js").text[:200].count("plotly.js (basic - minified)") == 1
    for host in ("localhost:80", "[::1]:8890", "127.0.0.1", "trainer-7.cluster"):
        assert page.status_for(host) == 200, host
    for host in ("[", "127.0.0.1@evil.example", "localhost:port", "localhost:1:2", "[::1", "a b", "a/b"):
        assert page.status_for(host) == 400, host


def test_only_the_token_gives_access_and_no_cookie_outlives_the_process(run):
    with served(Content(run)) as page:
        for path in ("/", "/page.js", "/api/status", "/?token=wrong", "/?token=", "/?token=%ff"):
            assert page.get(path).status_code == 403, path
        welcome = page.get("/?token=secret&lowest=0.5&words=a%26b")
        assert welcome.status_code == 303 and welcome.headers["location"] == "/?lowest=0.5&words=a%26b"
        cookie = welcome.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and "secret" not in cookie
        assert page.get("/api/status").status_code == 200
        kept = page.session.cookies.copy()
    with served(Content(run)) as page:
        page.session.cookies.update(kept)
        assert page.get("/api/status").status_code == 403
        page.get("/?token=secret")
        assert page.get("/api/status").status_code == 200
        assert len(page.session.cookies) == 2, "pages of several runs, on ports of one host, keep their cookies"


def test_a_restarted_page_has_the_same_token_which_its_user_alone_can_read(run, tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        printed: list[str] = []

        def end(address: str) -> None:
            printed.append(address)
            raise KeyboardInterrupt

        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                serve([run], "127.0.0.1", 0, end)
            (file,) = Path(temporary).glob("slimx-*/watch-token")
            assert file.stat().st_mode & 0o777 == 0o600
        assert {address.partition("?token=")[2] for address in printed} == {file.read_text()}


def test_no_run_and_a_port_that_is_taken_are_refused(run, tmp_path):
    with refused("run.none"):
        serve([tmp_path], "127.0.0.1", 0, print)
    with socket.create_server(("127.0.0.1", 0)) as taken, refused("watch.port") as refusal:
        serve([run], "127.0.0.1", taken.getsockname()[1], print)
    assert os.strerror(errno.EADDRINUSE) in str(refusal.value)


@pytest.mark.parametrize("host", ["no host", "h..h", "192.0.2.1"])
def test_a_host_of_another_machine_is_refused_by_its_name(run, host):
    with refused("watch.host", about="--host") as refusal:
        serve([run], host, 0, print)
    assert host in str(refusal.value)


@pytest.mark.parametrize("kept", [True, False])
def test_text_is_shown_on_a_machine_that_sees_the_run_directory_alone(run, tmp_path, monkeypatch, kept):
    config = read_config(run)
    if kept:
        write_config(Config.model_validate(config), run)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    found = Content(run).rollouts(2)
    text = found["groups"][0]["trajectories"][0]["parts"][0]["text"]
    lines = list(show_rollouts(run, 2, Choice(), buffer=False, dropped=False, as_json=False))
    notes = [line for line in lines if str(tmp_path / "model") in line]
    assert len(found["problems"]) == len(notes) == (not kept)
    assert text.replace(" ", "").isdigit() is not kept
    assert notes == found["problems"]


def test_a_copy_of_a_run_without_checkpoints_shows_text_anywhere(run, tmp_path, monkeypatch):
    write_config(Config.model_validate(read_config(run)), run)
    (run / "checkpoints" / "iter_0000002").mkdir(parents=True)
    copy = tmp_path / "laptop" / "copied"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "laptop")
    found = Content(Path("copied")).rollouts(2)
    assert found["problems"] == []
    assert not found["groups"][0]["trajectories"][0]["parts"][0]["text"].replace(" ", "").isdigit()


def test_a_run_without_a_tokenizer_finds_a_model_relative_to_its_start(run, tmp_path, monkeypatch):
    config = read_config(run)
    config["run"]["dir"], config["model"]["path"] = "run", "model"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Content(Path("../run")).rollouts(2)["problems"] == []


def test_each_policy_is_decoded_with_its_own_tokenizer(run, tmp_path, monkeypatch):
    config = read_config(run)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "model", other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    tokens = vocabulary["model"]["vocab"]
    vocabulary["model"]["vocab"] = dict(zip(reversed(tokens), tokens.values(), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    config["policies"] = {"solver": {"model": {"path": str(other)}}, "twin": {}}
    full = Config.model_validate(config)
    write_config(full, run)
    made = group(4, [1.0, 1.0, 1.0], text="2+2=", dataset="sums")
    for trajectory, policy in zip(made.trajectories, ("actor", "solver", "twin"), strict=True):
        trajectory.policy = policy
    files = StepFiles(run / DIRECTORY, origin_of(full, the_tokenizer()), every=1, keep=0, resume_step=2)
    files.write(3, 3, [made], {})
    shutil.rmtree(tmp_path / "model")
    shutil.rmtree(other)

    def texts() -> list[str]:
        shown = step_of(run, 3, Choice())
        return [each["parts"][0]["text"] for each in shown["groups"][0]["trajectories"]] + shown["problems"]

    actor, solver, twin = texts()
    assert actor == twin != solver
    shutil.rmtree(run / "policy" / "solver" / "tokenizer")
    actor, solver, twin, problem = texts()
    assert actor == twin and solver.replace(" ", "").isdigit() and "solver" in problem
