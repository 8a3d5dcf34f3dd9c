"""No text of a model, an agent or a file commands a terminal."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from rich.console import Console

from slimx import cli
from slimx.observability.live.safe_text import one_line, plain, visible
from slimx.observability.live.table import LiveTable

HOSTILE = "a\x1b[31mred\x1b]0;title\x07\x9b2J\x85\x7f\r\b\u202eevil\u2066\u200b\ufeff\ud800[bold]b[/bold]</script>\tc\n"


def commands(text: str) -> list[str]:
    """Returns the characters that a terminal would act upon, except line feeds and tabs."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"]


def test_control_and_format_characters_are_shown_by_code():
    for number in range(0x10000):
        letter = chr(number)
        if letter not in "\n\t\u00ad\u200c\u200d" and unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp"):
            assert visible(letter) == f"\\u{number:04x}"
    assert commands(HOSTILE) and not commands(visible(HOSTILE))
    assert "[bold]b[/bold]</script>\tc\n" in visible(HOSTILE), "what is harmless on a terminal stays as it is"
    assert "\n" not in one_line(HOSTILE) and "\t" not in one_line(HOSTILE)
    for harmless in ("Grüße", "你好", "👩\u200d🔬", "\u0641\u0627\u0631\u0633\u06cc"):
        assert visible(harmless) == harmless


def test_escaped_json_is_valid_json():
    text = json.dumps({"text": HOSTILE.replace("\ud800", "")}, ensure_ascii=False)
    assert json.loads(visible(text))["text"] == HOSTILE.replace("\ud800", "")


def test_rich_reads_no_markup_of_others():
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=400).print(plain(HOSTILE))
    assert "[bold]b[/bold]" in out.getvalue() and not commands(out.getvalue())


def test_lines_printed_next_to_the_live_table_are_harmless():
    out = io.StringIO()
    with LiveTable(3, 0, console=Console(file=out, width=200)) as table:
        table.note(HOSTILE)
    assert "[bold]b[/bold]" in out.getvalue() and not commands(out.getvalue())


def test_a_refusal_that_quotes_a_file_is_one_harmless_line(tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.yaml"
    file.write_text('run: {dir: x, "na\\e[31mme\\n\\u202e": 1}\nmodel: {path: x}\nrollout: {prompts: x}\n')
    monkeypatch.setattr(sys, "argv", ["slimx", "plan", str(file)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    message = capsys.readouterr().err
    assert end.value.code == 2 and len(message.splitlines()) == 1 and not commands(message)
    assert "\\u001b" in message
