"""The report: one file that needs nothing else, shows what the run directories hold and says what they lack."""

import gzip
import json
import math
import random
import re
import subprocess
from base64 import b64decode
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import plotly
import pytest

from slimx.extras.report.report import PLOTLY, write_comparison, write_report
from slimx.observability.tracking.metrics import StepRecord
from slimx.observability.tracking.phases import Phase
from slimx.observability.tracking.samples import RecordedSample, compare, spread
from tests.refusals import refused

START = 1_760_000_000.0


def write_lines(path: Path, records: list) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def grpo_run(directory: Path, steps: int = 60) -> Path:
    """Writes a run that learns: reward and accuracy rise, the gap is zero at most steps, one loss is NaN, tracks
    overlap."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    records, phases, now = [], [Phase(name="start-up", step=None, track="main", start=START, seconds=21.0)], START + 21
    for step in range(steps):
        share = 1 / (1 + math.exp(-(step - steps / 2) / (steps / 8)))
        generate, train, publish = rng.uniform(9, 14), rng.uniform(5, 7), rng.uniform(0.6, 1.1)
        metrics = {
            "reward/mean": 0.2 + 0.55 * share + rng.gauss(0, 0.06),
            "loss/policy": math.nan if step == 17 else rng.gauss(0, 0.01),
            "kl/reference": 0.002 * step / steps + abs(rng.gauss(0, 1e-4)),
            "gap/mean": 0.0 if step % 4 else rng.uniform(1e-9, 3e-7),
            "gap/max": 0.0 if step % 4 else rng.uniform(1e-5, 3e-3),
            "gap/tokens_above_1e-5": 0 if step % 4 else 5 + step // 8,
            "gap/tokens_other_routes": 0 if step % 4 else 4 + step // 8,
            "optim/grad_norm": 0.4 + abs(rng.gauss(0, 0.1)),
            "optim/lr": 1e-6 * min(1.0, (step + 1) / 10),
            "staleness/mean": rng.uniform(0, 0.6),
            "staleness/max": rng.choice([0, 1, 1]),
            "perf/tokens_per_second": rng.uniform(9e4, 1.1e5),
            "time/generate": generate,
        }
        if step % 10 == 0 or step == steps - 1:
            metrics["eval/accuracy"] = 0.25 + 0.5 * share
        end = now + max(generate - 4, train) + publish + 1
        for name, track, offset, seconds in (
            ("step", "main", 0.0, end - now),
            ("train", "main", 0.3, train),
            ("log-probs", "main", 0.4, train * 0.25),
            ("optimizer", "main", 0.3 + train * 0.8, train * 0.15),
            ("publish", "main", end - now - publish - 0.2, publish),
            ("generate", "rollout", -3.0, generate),
            ("reward", "reward", generate - 5, 1.5),
        ):
            phases.append(Phase(name=name, step=step, track=track, start=now + offset, seconds=seconds))
        now = end
        records.append(StepRecord(step=step, version=step, time=now, metrics={k: float(v) for k, v in metrics.items()}))
    samples = []
    for step, rate in ((0, 0.3), (steps // 2, 0.6), (steps - 1, 0.9)):
        for number in range(8):
            right = rng.random() < rate
            total = 14 + number * 3
            samples.append(
                RecordedSample(
                    step=step,
                    prompt=f"A baker sells {number + 4} loaves in the morning and {total - number - 4} in the "
                    "afternoon. How many loaves does she sell that day? Put the number after ####.",
                    answer=str(total),
                    response=f"She sells {number + 4} + {total - number - 4} = {total} loaves.\n#### {total}"
                    if right
                    else f"The baker has {number + 4} loaves and then she sells them again, so <b>{total + 2}</b>.\n\n"
                    f"#### {total + 2}",
                    reward=float(right),
                    version=step,
                    evaluation=True,
                )
            )
    write_lines(directory / "metrics.jsonl", [record.to_json() for record in records])
    write_lines(directory / "timeline.jsonl", [asdict(phase) for phase in phases])
    write_lines(directory / "samples.jsonl", [asdict(sample) for sample in samples])
    (directory / "config.yaml").write_text("run:\n  name: quickstart\nalgorithm:\n  name: grpo\n  kl: 0.001\n")
    summary = {
        "held-out accuracy before": 0.2731,
        "held-out accuracy after": 0.7493,
        "steps": steps,
        "tokens trained": 7_340_032,
        "largest log-prob gap": 2.8e-3,
        "engine restarts": 0,
        "weights proven equal at every publication": True,
        "hardware": "2 CPU cores, no GPU",
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def sft_run(directory: Path, steps: int = 80) -> Path:
    """Writes a supervised warm start: losses only; no samples, no summary."""
    directory.mkdir(parents=True)
    rng = random.Random(1)
    records, phases, now = [], [], START - 400
    for step in range(steps):
        seconds = rng.uniform(1.8, 2.4)
        metrics = {
            "loss/sft": 2.4 * math.exp(-step / 25) + 0.5 + rng.gauss(0, 0.03),
            "optim/lr": 1e-4 * (1 - step / steps),
            "optim/grad_norm": 1.5 * math.exp(-step / 30) + abs(rng.gauss(0, 0.1)),
            "perf/tokens_per_second": rng.uniform(4e3, 5e3),
        }
        phases.append(Phase(name="train", step=step, track="main", start=now, seconds=seconds))
        now += seconds + 0.1
        records.append(StepRecord(step=step, version=None, time=now, metrics=metrics))
    write_lines(directory / "metrics.jsonl", [record.to_json() for record in records])
    write_lines(directory / "timeline.jsonl", [asdict(phase) for phase in phases])
    (directory / "config.yaml").write_text("algorithm:\n  name: sft\n")
    return directory


class Page(HTMLParser):
    """The tags and the visible text of a page, scripts and styles left out."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.text += data


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Writes a report of a warm start and a GRPO run with hostile text in every place that a run controls."""
    root = tmp_path_factory.mktemp("report")
    runs = [sft_run(root / "warm-start"), grpo_run(root / "grpo")]
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    write_lines(runs[0] / "samples.jsonl", [asdict(sample(0, evil, evil, 0.0))])
    write_lines(runs[0] / "timeline.jsonl", [asdict(Phase(name=evil, step=0, track=evil, start=START, seconds=1.0))])
    (runs[0] / "summary.json").write_text(json.dumps({evil: evil}))
    (runs[0] / "config.yaml").write_text(evil)
    write_report(runs, root / "out" / "report.html", f"Warm start and GRPO {evil}")
    return (root / "out" / "report.html").read_text(encoding="utf-8")


def sample(step: int, prompt: str, response: str, reward: float, evaluation: bool = True) -> RecordedSample:
    return RecordedSample(
        step=step, prompt=prompt, answer="4", response=response, reward=reward, version=step, evaluation=evaluation
    )


def test_a_report_loads_nothing_from_anywhere(report):
    for tag, attributes in Page(report).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "srcset", "data"):
            assert not attributes.get(name) or attributes[name].startswith("#"), (tag, attributes)
    policies = [tag[1]["content"] for tag in Page(report).tags if tag[1].get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'")
    assert "@import" not in report and "url(http" not in report


@pytest.mark.needs("chromium")
def test_a_browser_draws_every_chart(report, tmp_path):
    (tmp_path / "report.html").write_text(report, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    drawn = subprocess.run(
        ["chromium", *options, "--virtual-time-budget=10000", "--dump-dom", f"file://{tmp_path}/report.html"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    charts = re.split('class="plotly-graph-div js-plotly-plot"', drawn)[1:]
    assert len(charts) == report.count('class="plotly-graph-div"') > 10
    assert all('class="main-svg"' in chart and 'class="trace ' in chart for chart in charts)


def test_a_report_carries_plotly_once_and_stays_below_a_megabyte(report):
    packed = re.findall(r'<script type="application/octet-stream" id="plotly">([^<]+)</script>', report)
    assert len(packed) == 1 and len(report.encode()) < 1e6
    assert gzip.decompress(b64decode(packed[0])).startswith(b"/**\n* plotly.js (basic - minified)")


def test_the_page_draws_with_the_plotly_js_that_the_figures_are_made_for():
    def release(source: bytes) -> bytes:
        return re.search(rb"^\* plotly\.js .*?v([\d.]+)$", source, re.MULTILINE)[1]

    whole = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    assert release(gzip.decompress(PLOTLY.read_bytes())[:300]) == release(whole.read_bytes()[:300])


def test_text_from_a_run_never_becomes_markup(report):
    page = Page(report)
    assert not [attributes for tag, attributes in page.tags if tag == "img"]
    assert "<script>alert" not in report
    assert page.text.count("<script>alert(1)</script>") >= 5  # title, summary twice, sample, configuration


def test_runs_with_rollouts_come_before_supervised_ones(report):
    headings = re.findall(r"<h2>(.*?)</h2>", report)
    assert headings == ["1. grpo", "2. warm-start"]


def test_a_run_without_samples_or_rollouts_has_no_fault(tmp_path):
    run = sft_run(tmp_path / "run", steps=3)
    (run / "samples.jsonl").write_text("")
    write_report([run], tmp_path / "report.html", "supervised")
    page = Page((tmp_path / "report.html").read_text())
    assert [attributes for _, attributes in page.tags if attributes.get("class") == "problem"] == []


def test_headline_numbers_keep_the_order_of_the_summary(report):
    text = Page(report).text
    places = [text.index(label) for label in ("tokens trained", "largest log-prob gap", "engine restarts")]
    assert places == sorted(places)
    assert "held-out accuracy before" not in text, "a card has it"
    assert "7,340,032" in text and "0.0028" in text


def test_missing_or_damaged_files_are_reported(tmp_path):
    run = grpo_run(tmp_path / "run", steps=3)
    (run / "summary.json").write_text("{")
    (run / "timeline.jsonl").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "metr')
    write_report([run], tmp_path / "report.html", "damaged")
    text = Page((tmp_path / "report.html").read_text()).text
    assert "run directory: timeline.jsonl." in text and "summary.json cannot be read" in text
    assert "line 4 of metrics.jsonl" in text and "steps 0 to 2" in text


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with refused("run.none", about=str(tmp_path)):
        write_report([tmp_path], tmp_path / "report.html", "empty")
    with refused("report.runs", about=str(tmp_path / "report.html")):
        write_report([], tmp_path / "report.html", "none")
    assert not (tmp_path / "report.html").exists()


def test_a_run_given_twice_and_a_page_of_another_kind_are_refused(tmp_path):
    run = grpo_run(tmp_path / "run", steps=3)
    with refused("report.compare", about=str(run.resolve())):
        write_report([run, run], tmp_path / "report.html", "twice")
    for write in (write_report, write_comparison):
        with refused("report.out", about=str(tmp_path / "report.pdf")):
            write([run], tmp_path / "report.pdf", "no page")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    write_report([run], tmp_path / "report.HTM", "a page")


def test_samples_follow_the_same_held_out_prompt_through_the_run():
    comparison = compare(
        [
            sample(0, "training only", "a", 0, evaluation=False),
            sample(1, "p", "before", 0),
            sample(1, "gone", "x", 0),
            sample(5, "p", "between", 0),
            sample(9, "new", "y", 1),
            sample(9, "p", "after", 1),
            sample(12, "training only", "b", 1, evaluation=False),
        ],
        columns=3,
    )
    assert (comparison.steps, comparison.common) == ([1, 5, 9], 1)
    shown = [(row.prompt, *(sample and sample.response for sample in row.samples)) for row in comparison.rows]
    assert shown == [("p", "before", "between", "after"), ("gone", "x", None, None), ("new", None, None, "y")]
    assert compare([], columns=3) is None
    assert spread([0, 25, 50, 75, 100], 2) == [0, 100] and spread([1, 2], 4) == [1, 2]


def test_samples_left_out_of_the_page_are_counted(tmp_path):
    run = grpo_run(tmp_path / "run", steps=3)
    write_lines(run / "samples.jsonl", [asdict(sample(0, f"p{i}", "x" * 5000, 0)) for i in range(40)])
    write_report([run], tmp_path / "report.html", "many")
    text = Page((tmp_path / "report.html").read_text()).text
    assert "24 of 40 prompts" in text and "[2,000 more characters]" in text


def test_a_page_names_its_only_run_once(tmp_path):
    run = sft_run(tmp_path / "quickstart")
    write_report([run], tmp_path / "report.html", "quickstart")
    headings = re.findall(r"<h[12]>([^<]*)</h[12]>", (tmp_path / "report.html").read_text())
    assert headings == ["quickstart"]
    write_report([run], tmp_path / "report.html", "other")
    assert "<h2>quickstart</h2>" in (tmp_path / "report.html").read_text()
