"""The documentation's site builds without a warning, in the order of docs/index.md, and shows pages as GitHub does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.documents import ROOT

PAGES = sorted(path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md"))
ADDRESS = "https://example.org/slimx"
TAGS = re.compile(r"<(li|ol|ul|pre|table|tr|h2)\b")


def built(directory: Path, address: str) -> Path:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True, repo_url=address)
    build(config)
    return directory


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"), "")


def page_of(site: Path, page: Path) -> str:
    """Returns the text of a page's article."""
    name = page.with_suffix("")
    text = (site / "index.html" if name.name == "index" else site / name / "index.html").read_text()
    return text[text.index("<article") : text.index("</article>")]


def test_pages_have_the_lists_and_tables_that_github_shows(site: Path) -> None:
    for page in PAGES:
        expected = MarkdownIt("commonmark").enable("table").render((ROOT / "docs" / page).read_text())
        assert Counter(TAGS.findall(page_of(site, page))) == Counter(TAGS.findall(expected)), page


def test_links_that_leave_the_pages_lead_to_copies(site: Path) -> None:
    for page in PAGES:
        place = site / ("" if page.name == "index.md" else page.with_suffix(""))
        targets = re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', page_of(site, page))
        assert [target for target in targets if not (place / target).resolve().exists()] == [], page
    assert (site / "source/examples/two_turn.py.txt").read_bytes() == (ROOT / "examples/two_turn.py").read_bytes()


def test_the_navigation_has_the_order_of_the_first_page(site: Path) -> None:
    text = (site / "index.html").read_text()
    navigation = re.findall(r'<a href="([\w/-]+)/" class="md-nav__link"', text)
    named = re.findall(r"\]\(([\w/-]+)\.md\)", (ROOT / "docs/index.md").read_text())
    assert list(dict.fromkeys(navigation)) == list(dict.fromkeys(named))
    assert len(set(named)) == len(PAGES) - 1


@pytest.mark.slow("builds the site a second time")
def test_links_lead_to_the_repository_if_its_address_is_known(tmp_path: Path) -> None:
    page = page_of(built(tmp_path, ADDRESS), Path("hooks.md"))
    assert f'href="{ADDRESS}/blob/main/examples/two_turn.py"' in page
    assert not (tmp_path / "source").exists()
