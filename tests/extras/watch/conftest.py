"""Fixtures of the tests in this room: a run, with images or without, and its live page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slimx.config.schema import Config
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.watch.page.content import Content
from slimx.observability.tracking.run_files import read_config
from tests.extras.vision.picture_stand import picture
from tests.extras.watch.page_stand import Page, group, served
from tests.extras.watch.run_stand import write_run
from tests.unit.rollout.rollout_stand import the_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def page(run: Path) -> Iterator[Page]:
    with served(Content(run)) as page:
        page.get("/?token=secret")
        yield page


@pytest.fixture
def shown(run, tmp_path):
    """Adds a step whose prompt has images as a file, in the run's store, missing, and in the prompt file."""
    (tmp_path / "a.png").write_bytes(picture(900, 300))
    stored = ImageStore(run / "images").keep(picture(20, 40))
    names = [str(tmp_path / "a.png"), f"stored:{stored}", str(tmp_path / "absent.png"), "data:image/png;base64,"]
    added = group(3, [1.0], text="<image>2+2=", dataset="pictures")
    added.prompt.metadata["images"] = names
    config = Config.model_validate(read_config(run))
    files = StepFiles(run / DIRECTORY, origin_of(config, the_tokenizer()), every=1, keep=0, resume_step=2)
    files.write(3, 3, [added], {})
    return names[:3]
