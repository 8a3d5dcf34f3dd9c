"""Options of boxes that are refused before a run begins boxes."""

from __future__ import annotations

import pytest

from slimx.extras.boxes.choice import BoxOptions
from tests.refusals import refused

REMOTE = {"backend": "remote", "url": "http://127.0.0.1:1", "token_env": "BOXES_TOKEN"}


@pytest.mark.parametrize("control", ["\n", "\r\n", "\x01", "\x1f", "\x7f"])
def test_a_token_that_no_header_may_contain_is_refused_without_showing_it(monkeypatch, control):
    monkeypatch.setenv("BOXES_TOKEN", f"secret{control}")
    with refused("box.option", about="key.token_env") as caught:
        BoxOptions.read(REMOTE, "key")
    assert "BOXES_TOKEN" in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["secret", "a b", "a\tb", "\u00e9\u20ac"])
def test_any_other_token_is_sent(monkeypatch, token):
    monkeypatch.setenv("BOXES_TOKEN", token)
    assert BoxOptions.read(REMOTE, "key").server().token == token
