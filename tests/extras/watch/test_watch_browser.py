"""A browser draws the live page and follows a run."""

from __future__ import annotations

import re

import pytest

from slimx.extras.watch.page.content import Content
from slimx.observability.live.run_lock import locked
from tests.extras.watch.page_stand import drawn, row, served


class Live(Content):
    """A run that does a step while its page is open."""

    requests = 0

    def status(self):
        self.requests += 1
        if self.requests == 2:
            with (self.directory / "metrics.jsonl").open("a") as more:
                more.write('rics": {}}\n' + row(77, 1.0))
        return super().status()


@pytest.mark.needs("chromium")
def test_a_browser_follows_a_run(run, tmp_path):
    content = Live(run)
    with served(content) as page, locked(run):
        found = drawn(f"{page.address}/?token=secret#curves", tmp_path)
    assert content.requests >= 2 and "step 77 of" in found and 'class="state running"' in found
    charts = re.split(r'class="chart js-plotly-plot"', found)[1:]
    assert charts and all('class="main-svg"' in chart for chart in charts)
    # A card and each chart have an explanation, which a click, a touch or a key opens.
    assert found.count('<details class="about"><summary>') == len(re.findall('class="card( wide)?"', found)) + 1


EVERY_COLOR = pytest.mark.slow("every color of tokens: a start of the browser for each")


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("gap", [True, False, True]),
        pytest.param("advantage", [True, True, True], marks=EVERY_COLOR),
        pytest.param("experts", [True, False, True], marks=EVERY_COLOR),
    ],
)
def test_a_browser_colors_tokens(page, tmp_path, by, expected):
    found = drawn(f"{page.address}/?token=secret&dataset=math&color={by}#rollouts", tmp_path)
    colors = re.findall(r'<span class="sampled"[^>]* style="background: (rgba?\([^)]*\))', found)
    assert [item == colors[0] for item in colors] == expected


@pytest.mark.needs("chromium")
def test_a_browser_filters_and_compares_and_text_of_a_run_is_no_markup(page, tmp_path):
    chosen = drawn(f"{page.address}/?token=secret&dataset=math#rollouts", tmp_path)
    both = drawn(f"{page.address}/?token=secret&compare=1&highest=0#rollouts", tmp_path)
    assert "g2/0" in chosen and "g1/0" not in chosen
    assert "✓ passed, reward 1" in chosen and "<mark>4</mark>" in chosen
    # The only one that is left is open: a color per version, what a tool said marked.
    assert "version 1" in chosen and "version 2" in chosen and chosen.count('class="inserted"') == 1
    assert len(set(re.findall(r"background: (rgba?\([^)]*\))", chosen))) >= 3
    assert "g0/0" in both and "g1/1" in both and "g0/1" not in both and "g2/0" not in both
    assert "&lt;img src=x" in both and "<img" not in both


@pytest.mark.needs("chromium")
def test_a_browser_shows_images(shown, page, tmp_path):
    found = drawn(f"{page.address}/?token=secret&dataset=pictures#rollouts", tmp_path)
    assert found.count('class="image"') == 4 and found.count("/api/steps/3/image?group=g3") == 3
