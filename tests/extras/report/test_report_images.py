"""The report shows small previews of the images of prompts, and counts those that it cannot show."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from slimx.extras.report import previews
from slimx.extras.report.previews import BYTES, PER_PROMPT, SIDE
from slimx.extras.report.report import write_report
from slimx.extras.vision.images.store import ImageStore
from tests.extras.report.test_observability_report import sample, write_lines
from tests.extras.vision.picture_stand import picture


@pytest.fixture
def names(run: Path, tmp_path: Path) -> list[str]:
    """Images as a file, in the run's store, and missing."""
    (tmp_path / "a.png").write_bytes(picture(900, 300))
    stored = ImageStore(run / "images").keep(picture(20, 40))
    return [str(tmp_path / "a.png"), f"stored:{stored}", str(tmp_path / "absent.png")]


def reported(run: Path, *samples) -> str:
    write_lines(run / "samples.jsonl", [asdict(each) for each in samples])
    write_report([run], run / "report.html", "Pictures")
    return (run / "report.html").read_text()


def shown(html: str) -> list[Image.Image]:
    files = re.findall(r'<img src="data:image/png;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(file))) for file in files]


def test_prompts_have_previews_of_their_images(run, names):
    held = [sample(step, "<image>1+1=", "2", 1.0) for step in (1, 2)]
    training = sample(1, "<image>2+2=", "4", 1.0, evaluation=False)
    for each in (*held, training):
        each.images = names
    html = reported(run, *held, training, sample(2, "3+3=", "6", 1.0))
    sizes = [(SIDE, round(SIDE / 3)), (20, 40)]
    assert [image.size for image in shown(html)] == sizes * 2  # of the comparison, and of training
    assert html.count("1 image not shown") == 2


def test_samples_without_images_are_shown_as_before(run):
    lines = asdict(sample(1, "1+1=", "2", 1.0))
    del lines["images"]  # a run of an earlier version
    write_lines(run / "samples.jsonl", [lines])
    write_report([run], run / "report.html", "Text")
    html = (run / "report.html").read_text()
    assert "1+1=" in html and not shown(html) and "not shown" not in html


def test_previews_are_bounded_for_a_prompt_and_for_the_page(run, names, monkeypatch):
    many = sample(1, "<image>1", "2", 1.0)
    many.images = names[1:2] * (PER_PROMPT + 3)
    html = reported(run, many)
    assert len(shown(html)) == PER_PROMPT and "3 images not shown" in html
    rows = [sample(1, f"<image>{number}", "2", 1.0) for number in range(12)]
    for row in rows:
        row.images = names[:1] * PER_PROMPT
    html = reported(run, *rows)
    taken = sum(map(len, re.findall(r'src="(data:image[^"]+)"', html)))
    assert 0.9 * BYTES < taken <= BYTES
    monkeypatch.setattr(previews, "SIDE", 8)
    assert len(shown(reported(run, *rows))) == 12 * PER_PROMPT
