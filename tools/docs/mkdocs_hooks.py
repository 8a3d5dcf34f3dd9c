"""Hooks of the documentation's site (mkdocs.yml): the order of its pages, and links that leave docs/.

Pages link to files of the repository, such as ../examples/two_turn.py. On the site, such a link leads to the repository
if its address is known (`make docs REPOSITORY=https://...`), otherwise to a copy of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FIRST = "index.md"
"""Page whose headings and links are the order of the navigation."""
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")
"""Target of a link within the repository, and its anchor."""
ITEM = re.compile(r"(?:\d\.|-) +")
"""Beginning of a list item, up to its text."""
COPIES = "source"
"""Directory of the site with copies of files outside docs/."""
BRANCH = "main"


def anchor(text: str, separator: str) -> str:
    """Returns the anchor of a heading as GitHub makes it, which links of pages use."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the navigation: pages in the order in which `FIRST` names them, then all others."""
    docs = Path(config.docs_dir)
    sections: dict[str, list[str]] = {}
    section = ""
    named = {FIRST}
    for line in (docs / FIRST).read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        for page, _ in LINK.findall(line):
            if page.endswith(".md") and not page.startswith("..") and page not in named:
                named.add(page)
                sections.setdefault(section, []).append(page)
    others = sorted({str(path.relative_to(docs)) for path in docs.rglob("*.md")} - named)
    if others:
        sections["More"] = others
    config.nav = [FIRST, *({title: pages} for title, pages in sections.items())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds copies of the files outside docs/ to which pages link, if the address of the repository is unknown."""
    if config.repo_url:
        return files
    outside: set[str] = set()
    for page in files.documentation_pages():
        for target, _ in LINK.findall(page.content_string):
            name = _outside(target, page.src_uri)
            if name is not None and (ROOT / name).is_file():
                outside.add(name)
    for name in sorted(outside):
        files.append(File.generated(config, _copy(name), content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text of a page with links that leave docs/ mapped to the repository or to copies."""

    def mapped(link: re.Match[str]) -> str:
        name = _outside(link[1], page.file.src_uri)
        if name is None:
            return link[0]
        if config.repo_url:
            kind = "tree" if (ROOT / name).is_dir() else "blob"
            return f"{config.repo_url.rstrip('/')}/{kind}/{BRANCH}/{name}{link[2] or ''}"
        return relpath(_copy(name), Path(page.file.src_uri).parent)

    return _indented(LINK.sub(mapped, markdown))


def _indented(markdown: str) -> str:
    """Returns the text with the contents of list items indented by four spaces, which mkdocs needs where GitHub takes
    two or three."""
    lines = []
    width = 0
    in_fence = False
    for line in markdown.splitlines():
        item = ITEM.match(line)
        if line.startswith("```"):
            in_fence = not in_fence
            width = 0
        elif in_fence:
            pass
        elif item is not None:
            width = len(item[0])
        elif line and not line.startswith(" "):
            width = 0
        elif width and line.startswith(" " * width):
            line = " " * (4 - width) + line
        lines.append(line)
    return "\n".join(lines) + "\n"


def _copy(name: str) -> str:
    """Returns the path of a copy on the site. Copies of pages are text, because the site would render them."""
    return f"{COPIES}/{name}.txt"


def _outside(target: str, page: str) -> str | None:
    """Returns the path in the repository of a link of `page`, if it leaves docs/; None: it does not."""
    name = normpath(Path("docs", page).parent.joinpath(target).as_posix())
    return None if name.startswith("docs/") or target.startswith("/") else name
