"""`slimx data`: published data sets as files of prompts, and what a run would see of a file."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from slimx import entry_points
from slimx.config.sections.rollout import RowFields
from slimx.data.chat.template import check_arguments, check_ends, with_template
from slimx.data.chat.tokens import encode_prompt, load_tokenizer
from slimx.data.prompts.mapping import fitting_fields, make_mapping, written
from slimx.data.prompts.read import KEYS, read_prompts
from slimx.data.prompts.rows import read_rows
from slimx.data.records import Prompt
from slimx.durable import write_atomic
from slimx.errors import SlimxError
from slimx.extras.datasets.files.read import DATASETS
from slimx.observability.live.safe_text import visible

app = typer.Typer(add_completion=False)

KNOWN = entry_points.find(DATASETS)
"""Published data sets by the name on the command line."""
SHOWN = 3
"""Prompts that `slimx data check` renders."""
LONGEST = 2000
"""Characters of a prompt that are shown, at most."""


def convert(name: str, out: Path, given: str | None, seed: int) -> Iterator[str]:
    """Write a published data set as JSONL of prompts, and say what was done. `given`: what the user has of it, instead
    of a download; `seed` shuffles the choices of GPQA."""
    if name not in KNOWN:
        near = [each for each in KNOWN if each.startswith(name)] or difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]}?" if len(near) == 1 else "slimx data check FILE looks at a file of your own"
        raise SlimxError(
            f"slimx data knows no {name!r}, but {', '.join(KNOWN)}; {hint}",
            code="data.name",
            about=name,
        )
    known = entry_points.load(DATASETS, name)
    if out.exists() and not out.is_file():
        raise SlimxError(f"{out} is no file; name the file to write", code="data.out", about=str(out))
    lines: dict[str, dict[str, Any]] = {}
    repeated: Counter[str] = Counter()
    for where, number, row in read_rows(given or known.hub)[1]:
        try:
            prompt = known.convert(row, where, seed)
        except SlimxError as error:
            told = f"{error}{_fitting(row, where, name)}"
            raise SlimxError(told, code=error.code, about=error.about) from error
        prompt = {"id": f"{name}:{number}"} | prompt
        prompt["metadata"] = prompt.get("metadata", {}) | {"dataset": name}
        if (before := lines.get(prompt["id"])) is None:
            lines[prompt["id"]] = prompt
        elif before == prompt:
            repeated[prompt["id"]] += 1
        else:
            raise SlimxError(
                f"{where}: id {prompt['id']!r} is that of another question; give the file as it was published",
                code="prompts.id",
                about=prompt["id"],
            )
    if not lines:
        raise SlimxError(f"{given or known.hub}: holds no row", code="prompts.empty", about=str(given or known.hub))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in lines.values()))
    except OSError as error:
        raise SlimxError(f"{out}: cannot be written ({error.strerror})", code="data.out", about=str(out)) from error
    yield f"{out}: {len(lines)} prompts of {given or known.hub}"
    if repeated:
        yield f"{repeated.total()} rows repeated an earlier one and are written once ({len(repeated)} questions)"
    yield f"reward.function: {known.reward}"


def _fitting(row: Mapping[str, Any], where: str, name: str) -> str:
    """A hint at the data set other than `name` that a row is of, if there is one."""
    for other, known in entry_points.load_all(DATASETS).items():
        try:
            known.convert(row, where, 0)
        except (SlimxError, TypeError, ValueError, KeyError, AttributeError):
            continue
        if other != name:
            return f"; it looks like {other}"
    return ""


def check(
    file: str,
    model: str | None,
    fields: dict[str, Any] | None,
    system: str | None,
    template: dict[str, Any],
    subset: str | None = None,
    split: str | None = None,
) -> Iterator[str]:
    """Lines on what a run would see of a file. Raises SlimxError where the run would refuse it; `fields`, `system` and
    `template` are those of section rollout, `subset` and `split` those of an entry of rollout.sources."""
    rows = read_rows(file, subset, split)[1]
    first = next(rows, None)
    rows.close()
    guessed = fitting_fields(first[2]) if first and fields is None and not {*first[2]} <= {*KEYS} else None
    mapping = make_mapping(RowFields.model_validate(fields or guessed) if fields or guessed else None, None, system)
    prompts = read_prompts(file, mapping, subset=subset, split=split)
    yield f"{file}: {len(prompts)} prompts"
    if guessed:
        yield f"needs rollout.fields: {written(guessed)}"
    if first is not None and (fields or guessed):
        used = {str(path).split(".")[0] for path in (fields or guessed or {}).values() if isinstance(path, str)}
        if unused := [name for name in first[2] if name not in used]:
            yield f"columns that no field names: {', '.join(unused)}"
    yield from _counted(prompts)
    tokenizer = None
    if model is not None:
        tokenizer = load_tokenizer(model)
        check_ends(tokenizer)
        check_arguments(tokenizer, template, "rollout.template")
        tokenizer = with_template(tokenizer, template)
        lengths = sorted(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
        yield f"tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]} (rollout.max_prompt_tokens)"
    for prompt in prompts[:SHOWN]:
        yield from rendered_lines(prompt, tokenizer)
    if model is None:
        yield "give --model DIR to see the chat template's own text, and tokens"


def rendered_lines(prompt: Prompt, tokenizer: Any | None) -> Iterator[str]:
    """A prompt as the model is given it, or its turns where there is no tokenizer; then its answer."""
    yield f"--- {prompt.id}" + (f" (answer: {_cut(prompt.answer)})" if prompt.answer is not None else "")
    if tokenizer is not None:
        yield _cut(tokenizer.decode(encode_prompt(tokenizer, prompt), skip_special_tokens=False))
        return
    for turn in prompt.messages or ():
        yield _cut(f"{turn['role']}: {turn.get('content')}")
    if prompt.token_ids is not None:
        yield f"{len(prompt.token_ids)} token ids"


def _counted(prompts: Sequence[Prompt]) -> Iterator[str]:
    without = sum(prompt.answer is None for prompt in prompts)
    if without:
        yield f"{without} prompts have no answer; rewards that compare with one refuse them"
    tasks = Counter(msgspec.json.encode((prompt.messages, prompt.token_ids)) for prompt in prompts)
    if (twice := len(prompts) - len(tasks)) > 0:
        yield f"{twice} prompts repeat another one's text"
    for source, count in sorted(Counter(prompt.source for prompt in prompts if prompt.source).items()):
        yield f"data set {source}: {count} prompts"
    if media := sum("images" in prompt.metadata for prompt in prompts):
        yield f"{media} prompts have images in metadata.images: hooks get them, the model's own template does not"


def _cut(text: str) -> str:
    return visible(text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text)} characters)")


@app.command()
def data(
    name: Annotated[str, typer.Argument(help=f"{', '.join(KNOWN)}; or check.")],
    file: Annotated[str, typer.Argument(help="The file to write; with check, the file or directory to look at.")],
    given: Annotated[
        str | None, typer.Option("--from", help="File or directory of the data set; else it is downloaded.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of GPQA's choices.")] = 0,
    model: Annotated[str | None, typer.Option(help="With check: Hugging Face directory of the tokenizer.")] = None,
    fields: Annotated[str | None, typer.Option(help="With check: rollout.fields, as '{prompt: question}'.")] = None,
    system: Annotated[str | None, typer.Option(help="With check: rollout.system.")] = None,
    template: Annotated[str | None, typer.Option(help="With check: rollout.template.")] = None,
    subset: Annotated[str | None, typer.Option(help="With check: subset of a directory or of hf://.")] = None,
    split: Annotated[str | None, typer.Option(help="With check: split of a directory or of hf://.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a published data set as a file of prompts; `slimx data check FILE`: say what a run would see of a file."""
    if name == "check":
        named, arguments = _mapping("--fields", fields), _mapping("--template", template) or {}
        for line in check(file, model, named, system, arguments, subset, split):
            print(visible(line))
        return
    for line in convert(name, Path(file), given, seed):
        print(visible(line))


def _mapping(option: str, text: str | None) -> dict[str, Any] | None:
    import yaml

    if text is None:
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise SlimxError(f"{option} is {text!r}, which is no mapping; write '{{prompt: question}}'")
    if option == "--fields" and (unknown := [key for key in value if key not in RowFields.model_fields]):
        raise SlimxError(f"--fields has {unknown[0]!r}; known are {', '.join(RowFields.model_fields)}")
    return value
