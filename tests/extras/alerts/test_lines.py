"""Files that a run appends to are parsed once, line by line."""

from __future__ import annotations

from slimx.extras.alerts.lines import Growing


def test_a_growing_file_is_parsed_once_and_a_cut_file_again(tmp_path):
    parsed: list[int] = []
    file = tmp_path / "lines.jsonl"
    growing = Growing(file, lambda values: parsed.append(values["step"]) or values["step"], keep=3)
    assert growing.refresh() == (False, []) and not growing.records, "the run has not begun"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert growing.refresh() == (True, [1, 2])
    with file.open("a") as more:
        more.write('ep": 3}\nnonsense\n{"step": 4}\n')
    assert growing.refresh() == (False, [3, 4]) and growing.refresh() == (False, [])
    assert list(growing.records) == [2, 3, 4] and parsed == [1, 2, 3, 4]
    file.write_text('{"step": 1}\n')
    assert growing.refresh() == (True, [1]) and list(growing.records) == [1]
