"""Images are found wherever a row has them, and what is not an image file is refused."""

from __future__ import annotations

import base64
import os

import pytest

from slimx.extras.vision.images import sources
from slimx.extras.vision.images.sources import STORED, located, read_image
from slimx.extras.vision.images.store import ImageStore
from tests.extras.vision.picture_stand import picture
from tests.refusals import refused

DATA = picture()
TEXT = base64.b64encode(DATA).decode()
URI = f"data:image/png;base64,{TEXT}"


@pytest.fixture
def read(tmp_path, monkeypatch):
    (tmp_path / "a b.png").write_bytes(DATA)
    monkeypatch.chdir(tmp_path)
    return lambda source: read_image(source, "here", ImageStore(tmp_path / "images"))


@pytest.mark.parametrize(
    "source",
    [
        DATA,
        URI,
        "a b.png",
        {"bytes": DATA, "path": "elsewhere.png"},
        {"bytes": None, "path": "a b.png"},
        {"type": "image_url", "image_url": {"url": URI, "detail": "high"}},
        {"type": "input_image", "image_url": URI},
        {"type": "image", "image": "a b.png"},
        {"type": "image", "base64": TEXT},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
    ],
)
def test_every_usual_form_of_an_image_is_read(read, source):
    assert read(source) == DATA


def test_paths_may_be_absolute_links_and_uris(read, tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "a b.png")
    for source in (
        str(tmp_path / "a b.png"),
        "link.png",
        f"file://{tmp_path}/a%20b.png",
        f"file://localhost{tmp_path}/a b.png",
    ):
        assert read(source) == DATA
    assert located("x/../y.png", tmp_path, "here") == tmp_path / "y.png"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("https://example.com/a.png", "vision.url"),
        ("s3://bucket/a.png", "vision.url"),
        ({"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}, "vision.url"),
        ("absent.png", "vision.unreadable"),
        ("folder", "vision.unreadable"),
        ("pipe", "vision.unreadable"),
        ("broken.png", "vision.unreadable"),
        ("a\0b", "vision.unreadable"),
        (TEXT * 100, "vision.unreadable"),
        ("stored:00", "vision.missing"),
        ("stored:/../../../a b.png", "vision.missing"),
        ("empty.png", "vision.size"),
        (b"", "vision.size"),
        ("data:image/png;base64,?", "vision.uri"),
        ("data:image/png,abc", "vision.uri"),
        ({"base64": "?"}, "vision.uri"),
        ("", "vision.source"),
        (7, "vision.source"),
        ({"name": "a"}, "vision.source"),
        (None, "vision.source"),
    ],
)
def test_what_is_no_image_file_is_refused(read, tmp_path, source, code):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "broken.png").symlink_to(tmp_path / "absent.png")
    os.mkfifo(tmp_path / "pipe")
    with refused(code) as caught:
        read(source)
    assert len(str(caught.value)) < 600


def test_an_image_of_too_many_bytes_is_refused(read, monkeypatch):
    monkeypatch.setattr(sources, "MOST_BYTES", len(DATA) - 1)
    for source in (DATA, URI, "a b.png"):
        with refused("vision.size", about="here"):
            read(source)


def test_a_stored_image_is_written_once_and_again_if_torn(read, tmp_path):
    store = ImageStore(tmp_path / "images")
    digest = store.keep(DATA)
    assert read(STORED + digest) == DATA
    (file,) = [path for path in (tmp_path / "images" / "originals").rglob("*") if path.is_file()]
    before = file.stat().st_ino
    assert store.keep(DATA) == digest and file.stat().st_ino == before
    file.write_bytes(DATA[:-1])
    store.keep(DATA)
    assert read(STORED + digest) == DATA
    file.unlink()
    with refused("vision.missing", about=digest):
        read(STORED + digest)
    file.parent.rmdir()
    file.parent.write_text("not a folder")
    with refused("vision.store", about=str(tmp_path / "images")):
        store.keep(DATA)
