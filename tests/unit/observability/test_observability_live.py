"""The live table: one line per step where there is no terminal, a display where there is, an honest time left."""

import io

from rich.console import Console

from slimx.observability.live.table import (
    HEADER_EVERY,
    LEGEND,
    RL_COLUMNS,
    SFT_COLUMNS,
    SHOWN_STEPS,
    LiveTable,
    TableColumn,
    with_policies,
)

METRICS = {
    "reward/mean": 0.25,
    "loss/policy": -0.0123,
    "kl/reference": 1.5e-4,
    "gap/mean": 0.0,
    "staleness/max": 1.0,
    "perf/tokens_per_second": 123456.7,
    "time/generate": 12.34,
    "time/train": 8.0,
    "time/publish": 0.5,
}


class Clock:
    """Seconds that pass when a test advances them."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain(width=40) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def terminal(height=40) -> Console:
    return Console(file=io.StringIO(), width=110, height=height, force_terminal=True, color_system=None)


def shown(table: LiveTable, height: int = 40) -> list[str]:
    """Returns the lines of the display now."""
    console = Console(file=io.StringIO(), width=110, height=height, force_terminal=False)
    console.print(table._render())
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_start_is_shown_with_its_seconds_until_the_first_phase():
    clock = Clock()
    with LiveTable(100, 0, terminal(), RL_COLUMNS, clock=clock) as table:
        clock.now = 30.0
        table.start("starting 2 trainers, 1 engine", since=18.0)
        assert shown(table)[-1].split() == ["now", "starting", "2", "trainers,", "1", "engine,", "12", "s"]
        table.phase("generate")
        assert "starting" not in "".join(shown(table))


def test_without_a_terminal_a_start_accounts_for_its_seconds():
    clock = Clock()
    console = plain()
    with LiveTable(100, 0, console, RL_COLUMNS, clock=clock) as table:
        table.start("starting 1 engine", since=0.0)
        clock.now = 12.0
        table.milestone("engines ready")
        clock.now = 12.5
        table.phase("publish")
        clock.now = 13.0
        table.phase("generate")
        table.row(1, METRICS)
        table.phase("generate")
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[:3] == [["12.0", "s", "engines", "ready"], ["12.5", "s", "publish"], ["13.0", "s", "generate"]]
    assert " ".join(lines[3]) == LEGEND and lines[4][0] == "step", "the words are next to the titles"
    assert lines[-1][0] == "1"  # later phases have no line


def test_a_phase_that_is_resumed_is_announced_once():
    console = plain()
    with LiveTable(100, 0, console, SFT_COLUMNS) as table:
        for phase in ("publish", "prepare", "prepare", "train", "publish"):
            table.phase(phase)
    phases = [line.split()[-1] for line in console.file.getvalue().splitlines()]
    assert phases == ["publish", "prepare", "train", "publish"]


def test_without_a_terminal_each_step_is_one_line():
    console = plain()
    with LiveTable(100, 0, console, RL_COLUMNS) as table:
        for step in range(HEADER_EVERY + 1):
            table.phase("generate")
            table.phase("train")
            table.row(step, METRICS)
    _, _, legend, *printed = console.file.getvalue().splitlines()  # after the phases of the first step
    assert legend == LEGEND and len(printed) == HEADER_EVERY + 1 + 2
    headers = [number for number, line in enumerate(printed) if "reward" in line]
    assert headers == [0, HEADER_EVERY + 1]
    assert len({len(line) for line in printed}) == 1  # aligned
    assert printed[1].split() == ["0", "0.250", "-0.0123", "1.5e-04", "0", "1", "123,457", "12.3", "8.0", "0.5", "-"]


def test_a_metric_that_is_missing_shows_as_a_dash():
    console = plain()
    with LiveTable(10, 0, console, SFT_COLUMNS) as table:
        table.row(3, {"loss/sft": float("nan")})
    assert console.file.getvalue().splitlines()[1].split() == ["3", "nan", "-", "-", "-", "-", "-"]


def test_a_loss_that_rounds_to_zero_has_no_sign():
    console = plain()
    with LiveTable(10, 0, console, RL_COLUMNS) as table:
        table.row(1, {"loss/policy": -6.5e-8})
    assert console.file.getvalue().splitlines()[-1].split()[2] == "0.0000"


def test_a_wide_number_keeps_the_columns_apart():
    console = plain()
    with LiveTable(10, 0, console, [TableColumn(title="a", key="a/a", format=",.0f")] * 2) as table:
        table.row(0, {"a/a": 1.0})
        table.row(1, {"a/a": 123_456_789_012.0})
    assert console.file.getvalue().splitlines()[2].split()[:2] == ["123,456,789,012"] * 2


def test_the_time_left_follows_the_pace_of_this_process():
    clock, console = Clock(), plain()
    with LiveTable(100, 50, console, SFT_COLUMNS, clock=clock) as table:
        clock.now = 1000.0  # start-up does not count
        for step in range(50, 54):
            clock.now += 600.0
            table.row(step, {})
    assert [line[-8:].strip() for line in console.file.getvalue().splitlines()[1:]] == ["-", "8 h", "7.83 h", "7.67 h"]


def test_notes_are_printed_as_they_are():
    console = plain()
    with LiveTable(10, 0, console, RL_COLUMNS) as table:
        table.note("checkpoint [5] written to /a/very/long/path/that/is/wider/than/the/console")
    assert console.file.getvalue().strip().endswith("than/the/console") and "[5]" in console.file.getvalue()
    assert len(console.file.getvalue().splitlines()) == 1


def test_the_display_shows_steps_phase_and_progress():
    clock = Clock()
    with LiveTable(200, 100, terminal(), RL_COLUMNS, clock=clock) as table:
        for step in range(100, 120):
            clock.now += 10
            table.row(step, METRICS)
        table.phase("generate")
        clock.now += 7
        table.phase("train")
        clock.now += 2
        display = shown(table)
    assert "120/200" in display[0] and "0:13:20" in display[0] and display[0].endswith("train")
    steps = [int(line.split()[0]) for line in display if line.split()[0].isdigit()]
    assert steps == list(range(120 - SHOWN_STEPS, 120))
    assert display[-1].split() == ["now", "7.0", "2.0"]


def test_an_ended_run_shows_no_step_in_progress():
    table = LiveTable(4, 0, terminal(), RL_COLUMNS)
    with table:
        table.row(4, METRICS)
        table.phase("save")
        assert shown(table)[-1].split() == ["now"]
    assert shown(table)[-1].split()[:2] == ["4", "0.250"]


def test_the_display_fits_a_low_terminal():
    with LiveTable(200, 0, terminal(height=14), RL_COLUMNS) as table:
        for step in range(30):
            table.row(step, METRICS)
        table.phase("generate")
        assert len(shown(table)) < 14
        assert "29" in shown(table)[-2].split()[0]


def test_a_step_shown_again_counts_once():
    with LiveTable(10, 0, terminal(), RL_COLUMNS) as table:
        table.row(0, {})
        table.row(0, METRICS)
        display = shown(table)
    assert "1/10" in display[0] and "0.250" in display[-1]


def test_the_terminal_is_restored_after_an_error():
    console = terminal()
    try:
        with LiveTable(10, 0, console, RL_COLUMNS) as table:
            table.phase("train")
            raise RuntimeError
    except RuntimeError:
        pass
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is visible again


def test_each_further_policy_adds_columns_to_the_live_table():
    columns = with_policies(RL_COLUMNS, ["judge"])
    keys = [column.key for column in columns]
    at = keys.index("gap/mean") + 1
    assert keys[at : at + 3] == ["policy/judge/reward/mean", "policy/judge/loss/policy", "policy/judge/gap/mean"]
    assert len({column.title for column in columns}) == len(columns) == len(RL_COLUMNS) + 3
    assert with_policies(RL_COLUMNS, []) == RL_COLUMNS
