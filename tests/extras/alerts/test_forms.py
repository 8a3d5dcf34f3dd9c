"""A webhook gets an event as JSON, or in the form of Slack, Feishu or Lark, by a key or by the URL's host."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from slimx.config.load import load_config
from slimx.errors import SlimxError
from slimx.extras.alerts import webhook
from slimx.extras.alerts.event import Event
from slimx.extras.alerts.forms import BUSY_S, MOST, body_of, form_of, refusal_of
from slimx.extras.alerts.receiver import Alerts, alerting
from slimx.extras.alerts.section import AlertSettings, settings_of
from tests.webhook_server import webhook_server

FORMS = ("json", "slack", "feishu")
TEXT = "loss <1 & rising"


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("https://hooks.slack.com/services/T/B/X", "slack"),
        ("https://open.feishu.cn/open-apis/bot/v2/hook/X", "feishu"),
        ("https://open.larksuite.com/open-apis/bot/v2/hook/X", "feishu"),
        ("https://hooks.slack.com.example.org/", "json"),
        ("https://mattermost.example.org/hooks/X", "json"),
    ],
)
def test_the_host_of_the_url_decides_unless_a_key_does(url, form):
    assert form_of(url, "auto") == form
    assert [form_of(url, chosen) for chosen in FORMS] == [*FORMS]


@pytest.mark.parametrize("form", FORMS)
def test_a_server_receives_each_form(form, tmp_path):
    notes: list[str] = []
    alerts = Alerts("r", tmp_path, notes.append, factor=10, at_least=5)
    with webhook_server() as server:
        server.body = b'{"code":0,"msg":"success"}'
        with alerting(alerts, server.url, AlertSettings(webhook_form=form)):
            alerts.tell("restarted", TEXT)
        (body,) = server.events
    assert not notes
    if form == "json":
        assert body["event"] == "restarted" and body["text"].endswith(TEXT) and "alert" not in body
    elif form == "slack":
        assert body["text"].endswith("loss &lt;1 &amp; rising")
        assert body["blocks"][0]["text"] == {"type": "mrkdwn", "text": body["text"]}
    else:
        assert body["msg_type"] == "text" and body["content"]["text"].endswith(TEXT)


@pytest.mark.parametrize(
    "answer", [b'{"code":19024,"msg":"Key Words Not Found"}', b'{"code":19021}', b"<html>", b"[]", b'{"StatusCode":9}']
)
def test_a_refusal_of_feishu_with_the_status_200_counts(answer, tmp_path):
    notes: list[str] = []
    alerts = Alerts("r", tmp_path, notes.append, factor=10, at_least=5)
    with webhook_server() as server:
        server.body = answer
        with alerting(alerts, server.url, AlertSettings(webhook_form="feishu")):
            alerts.tell("restarted", TEXT)
    (note,) = notes
    assert "restarted" in note and server.posts == 1


@pytest.mark.parametrize(("refusals", "arrives"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize(("code", "status"), [(9499, 200), (9499, 400), (11232, 200), (2200, 200), (2200, 500)])
def test_a_message_that_feishu_has_no_time_for_is_posted_again(code, status, refusals, arrives, tmp_path, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(webhook, "time", SimpleNamespace(sleep=pauses.append))
    notes: list[str] = []
    alerts = Alerts("r", tmp_path, notes.append, factor=10, at_least=5)
    with webhook_server() as server:
        server.body, server.bodies = b'{"code":0}', [b'{"code":%d}' % code] * refusals
        server.statuses = [status] * refusals
        with alerting(alerts, server.url, AlertSettings(webhook_form="feishu")):
            alerts.tell("restarted", TEXT)
    assert server.posts == min(refusals + 1, 3) and pauses == [0.0, *[BUSY_S] * (server.posts - 1)]
    assert [str(code) in note for note in notes] == ([] if arrives else [True])


@pytest.mark.parametrize(
    ("status", "content", "form", "refusal"),
    [
        (400, b'{"code":19024}', "feishu", ("code 19024", False)),
        (400, b"", "feishu", ("HTTP status 400", False)),
        (502, b"<html>", "feishu", ("HTTP status 502", True)),
        (500, b'{"code":0}', "feishu", ("HTTP status 500", True)),
        (429, b'{"code":9499}', "json", ("HTTP status 429", True)),
        (404, b'{"code":9499}', "json", ("HTTP status 404", False)),
    ],
)
def test_a_status_that_is_a_refusal_counts_with_or_without_a_code(status, content, form, refusal):
    found = refusal_of(status, content, form)
    assert found is not None and (found.reason, found.again) == refusal


@pytest.mark.parametrize(("form", "text"), [("slack", "x" * 9000), ("slack", "<a>" * 3000), ("feishu", "x" * 9000)])
def test_a_long_text_is_cut_to_what_services_accept(form, text):
    event = Event(event="failed", text=text, run="r", directory="/r", host="h", step=None, about="", time=0.0)
    body = body_of(event, form)
    text = body["text"] if form == "slack" else body["content"]["text"]
    assert MOST - 5 <= len(text) - 3 <= MOST and re.fullmatch(r"([xa]|&[lg]t;)+\.\.\.", text)


@pytest.mark.parametrize(
    ("lines", "about"),
    [
        ("webhook_form: teams", "alerts.webhook_form"),
        ("disabled: [gaps]", "alerts.disabled.0"),
        ("disable: [gap]", "alerts.disable"),
    ],
)
def test_a_wrong_setting_is_refused(lines, about, tmp_path):
    file = tmp_path / "run.yaml"
    text = "run: {dir: d}\nmodel: {path: m}\nrollout: {prompts: p}\nalerts: {%s}\n"
    file.write_text(text % lines)
    with pytest.raises(SlimxError) as error:
        load_config(file)
    assert error.value.about == about
    file.write_text(text % "disabled: [gap], webhook_form: feishu")
    assert settings_of(load_config(file)).disabled == ("gap",)
