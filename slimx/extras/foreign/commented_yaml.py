"""Settings as YAML text with a comment on each line, and the configuration that slimx reads from such a text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from slimx.config.load import load_config
from slimx.config.rule import Refusal
from slimx.config.schema import Config
from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.observability.live.safe_text import one_line


def refuse_existing(out: Path | None, *, force: bool) -> None:
    """Raises SlimxError if `out` is a directory, or a file that exists already; `force`: it may be overwritten."""
    if out is not None and out.is_dir():
        raise SlimxError(f"{out} is a directory; name a file in it with --out", code="out.directory", about=str(out))
    if out is not None and out.exists() and not force:
        raise SlimxError(
            f"{out} exists already; choose another file with --out, or add --force", code="out.exists", about=str(out)
        )


def write_out(out: Path, text: str) -> None:
    """Writes `text` to the file `out`, and makes its directory. Raises SlimxError if the file cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text.encode())
    except OSError as error:
        raise SlimxError(
            f"{out} cannot be written ({error.strerror}); choose another file with --out",
            code="out.unwritable",
            about=str(out),
        ) from error


def tree_of(settings: Mapping[str, object]) -> Json:
    """Returns values by dotted key as nested mappings, in the same order; an entry of a list is addressed by its
    index."""
    tree: Json = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return _listed(tree, settings)


def lines_of(tree: Json, comments: Mapping[str, str], column: int = 0, path: str = "") -> Iterator[str]:
    """Yields the lines of YAML of `tree`, which lies at the dotted key `path` (with a final dot). `comments`: comments
    by dotted key; a key below which there is none is on one line with its value. `column`: least column of comments."""
    indent = "  " * path.count(".")
    entries = enumerate(tree) if isinstance(tree, list) else tree.items()
    for name, value in entries:
        key = f"{path}{name}"
        label = "-" if isinstance(tree, list) else f"{on_one_line(name)}:"
        comment = one_line(comments.get(key, ""))
        if not any(other.startswith(f"{key}.") for other in comments):
            yield _line(f"{indent}{label} {on_one_line(value)}", comment, column)
        elif label == "-":
            first, *others = lines_of(value, comments, column, f"{key}.")
            yield f"{indent}- {first.lstrip()}"
            yield from others
        else:
            yield _line(indent + label, comment, column)
            yield from lines_of(value, comments, column, f"{key}.")


def on_one_line(value: object) -> str:
    """Returns `value` as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text.splitlines()) < 2 else json.dumps(value)  # JSON is YAML without line breaks


def loaded(text: str, name: str) -> Config:
    """Returns the configuration `text`. Raises Refusal, which names `name` as the file, if slimx refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(text)
        try:
            return load_config(file)
        except SlimxError as error:
            problems = error.problems if isinstance(error, Refusal) and error.problems else (error,)
            whole, *parts = (
                Refusal(str(one).replace(str(file), name), code=one.code, about=one.about) for one in (error, *problems)
            )
            whole.problems = tuple(parts)
            raise whole from error


def _line(text: str, comment: str, column: int) -> str:
    return f"{text:<{column}}  # {comment}" if comment else text


def _listed(value: object, settings: Mapping[str, object], path: str = "") -> Json:
    """Returns `value`, which lies at the dotted key `path`, with every mapping from indices to entries replaced by the
    list of the entries, except in the values of `settings`."""
    if not isinstance(value, dict) or path in settings:
        return value  # type: ignore[return-value]
    inner = {key: _listed(part, settings, f"{path}.{key}".lstrip(".")) for key, part in value.items()}
    if inner and all(str(key).isdigit() for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]  # type: ignore[return-value]
    return inner
