"""`slimx data`: writes published data sets as prompt files, and shows how a run would read a prompt file."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from slimx import entry_points
from slimx.commands.usage import PlainCommand
from slimx.config.sections.rollout import RowFields
from slimx.data.chat.template import check_arguments, check_ends, with_template
from slimx.data.chat.tokens import encode_prompt, load_tokenizer, rendered_text
from slimx.data.prompts.mapping import fitting_fields, make_mapping, written
from slimx.data.prompts.read import KEYS, read_prompts
from slimx.data.prompts.rows import read_rows
from slimx.data.records import Prompt
from slimx.digest import fingerprint
from slimx.durable import write_atomic
from slimx.errors import SlimxError, counted
from slimx.extras.datasets.files.read import DATASETS
from slimx.extras.vision.images.pictures import opened, size_of
from slimx.extras.vision.images.sources import check_file, located
from slimx.extras.vision.prompts.check import ModelImages, described_images, shows_images
from slimx.extras.vision.prompts.rows import RowImages
from slimx.json_types import Json
from slimx.observability.live.safe_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(add_completion=False)

KNOWN = entry_points.find(DATASETS)
"""Published data sets, by their names on the command line."""
SHOWN = 3
"""Number of prompts that `slimx data check` prints."""
LONGEST = 2000
"""Maximum number of characters of a prompt that are printed."""


def convert(name: str, out: Path, source: str | None, seed: int) -> Iterator[str]:
    """Writes the published data set `name` as a JSON Lines file of prompts, and yields lines of output. `source`: file
    or directory to read instead of a download; `seed`: seed for the order of the choices in GPQA."""
    if name not in KNOWN:
        near = [known for known in KNOWN if known.startswith(name)] or difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]}?" if len(near) == 1 else "to check a prompt file, use `slimx data check FILE`"
        raise SlimxError(
            f"slimx data can download only {', '.join(KNOWN)}, not {name!r}; {hint}",
            code="data.name",
            about=name,
        )
    known = entry_points.load(DATASETS, name)
    origin = source or known.hub
    if out.exists() and not out.is_file():
        raise SlimxError(
            f"{out} exists, but is not a regular file; choose another path for the output file",
            code="data.out",
            about=str(out),
        )
    prompts: dict[str, Json] = {}
    repeated: Counter[str] = Counter()
    for where, number, row in read_rows(origin)[1]:
        try:
            prompt = known.convert(row, where, seed)
        except SlimxError as error:
            message = f"{error}{_fitting(row, where, name)}"
            raise SlimxError(message, code=error.code, about=error.about) from error
        prompt = {"id": f"{name}:{number}", **_with_files(prompt, out, where)}
        prompt["metadata"] = prompt.get("metadata", {}) | {"dataset": name}
        before = prompts.setdefault(prompt["id"], prompt)
        if before is prompt:
            continue
        if before == prompt:
            repeated[prompt["id"]] += 1
        else:
            raise SlimxError(
                f"{where}: the id {prompt['id']!r} is also the id of a different question in an earlier row; use an "
                "unmodified copy of the published file",
                code="prompts.id",
                about=prompt["id"],
            )
    if not prompts:
        raise SlimxError(
            f"{origin} contains no rows; add rows to the file, or choose another file",
            code="prompts.empty",
            about=origin,
        )
    _write(out, b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts.values()))
    yield f"{out}: {counted(len(prompts), 'prompt')} of {origin}"
    if repeated:
        yield f"omitted as duplicates: {counted(repeated.total(), 'row')} ({counted(len(repeated), 'question')})"
    yield f"reward.function: {known.reward}"


def _write(file: Path, data: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, data)
    except OSError as error:
        raise SlimxError(
            f"{file} cannot be written ({error.strerror}); choose another path for the output file",
            code="data.out",
            about=str(file),
        ) from error


def _with_files(prompt: Json, out: Path, where: str) -> Json:
    """Returns a prompt whose images are files: those that the row at `where` contains are written into a folder next
    to the file `out`."""
    metadata = prompt.get("metadata", {})
    if "images" not in metadata:
        return prompt
    folder = out.with_suffix(".images")
    names = []
    for index, image in enumerate(metadata["images"]):
        place = f"{where}: image {index}"
        found = located(image, Path(where.rpartition(", ")[0]).parent, place)
        if isinstance(found, Path):
            check_file(found, place)
            names.append(str(found))
            continue
        size_of(found, place)  # raises SlimxError if it is not an image
        with opened(found) as picture:
            file = folder / f"{fingerprint(found)}.{str(picture.format).lower()}"
        names.append(f"{folder.name}/{file.name}")
        if not file.exists():
            _write(file, found)
    return prompt | {"metadata": metadata | {"images": names}}


def _fitting(row: Mapping[str, object], where: str, name: str) -> str:
    """Returns a hint for the error message if `row` looks like a row of a data set other than `name`, else ""."""
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
    fields: Json | None,
    system: str | None,
    template: Json,
    subset: str | None = None,
    split: str | None = None,
) -> Iterator[str]:
    """Yields lines that describe how a run would read a prompt file. Raises SlimxError if a run would refuse the file.
    `model`: directory of the tokenizer; `fields`, `system` and `template`: settings of section rollout; `subset` and
    `split`: settings of an entry of rollout.sources."""
    first = next(iter(read_rows(file, subset, split)[1]), None)
    guessed = None
    if first is not None and fields is None and not {*first[2]} <= {*KEYS}:
        guessed = fitting_fields(first[2])
        column = next((name for name in ("images", "image") if name in first[2]), None)
        if guessed and column:
            guessed["images"] = column
    rows = None if model is not None and not shows_images(model) else RowImages(None)
    named_fields = None
    if fields or guessed:
        named_fields = RowFields.model_validate(fields or guessed)
    mapping = make_mapping(named_fields, None, system, rows)
    prompts = read_prompts(file, mapping, subset=subset, split=split)
    yield f"{file}: {counted(len(prompts), 'prompt')}"
    if guessed:
        yield f"needs rollout.fields: {written(guessed)}"
    if first is not None and (fields or guessed):
        paths = (fields or guessed or {}).values()
        used = {path.split(".")[0] for path in paths if isinstance(path, str)}
        unused = [name for name in first[2] if name not in used]
        if unused:
            yield f"columns not used by any field: {', '.join(unused)}"
    yield from _counted(prompts)
    tokenizer = images = None
    if model is not None:
        tokenizer = load_tokenizer(model)
        check_ends(tokenizer)
        check_arguments(tokenizer, template, "rollout.template")
        tokenizer = with_template(tokenizer, template)
        images = None if rows is None else ModelImages(model, rows)
        if images is not None:
            images.read_sizes(prompts, file)
        lengths = sorted(_length(tokenizer, images, prompt, file) for prompt in prompts)
        yield f"tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]} (rollout.max_prompt_tokens)"
        if images is not None:
            yield from described_images(images, prompts)
    for prompt in prompts[:SHOWN]:
        yield from rendered_lines(prompt, tokenizer, images, file)
    if model is None:
        yield "add --model DIR to see the prompts rendered by the chat template, and their numbers of tokens"


def _length(tokenizer: PreTrainedTokenizerBase, images: ModelImages | None, prompt: Prompt, file: str) -> int:
    """Returns the number of tokens of a prompt of `file`, among them those of its images."""
    if images is None:
        return len(encode_prompt(tokenizer, prompt))
    ids = images.token_ids(tokenizer, prompt, file)
    return len(encode_prompt(tokenizer, prompt) if ids is None else ids)


def rendered_lines(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, images: ModelImages | None = None, file: str = ""
) -> Iterator[str]:
    """Yields lines for a prompt of `file` with its answer. The prompt is rendered by the chat template, or shown as its
    messages if there is no tokenizer. `images`: images of the prompts, for a vision-language model."""
    title = f"--- {prompt.id}"
    if prompt.answer is not None:
        title += f" (answer: {_cut(prompt.answer)})"
    yield title
    if tokenizer is not None:
        text = None if images is None else images.rendered(tokenizer, prompt, file)
        yield _cut(rendered_text(tokenizer, prompt) if text is None else text)
        return
    for turn in prompt.messages or ():
        yield _cut(f"{turn['role']}: {turn.get('content')}")
    if prompt.token_ids is not None:
        yield counted(len(prompt.token_ids), "token id")


def _counted(prompts: Sequence[Prompt]) -> Iterator[str]:
    without = sum(prompt.answer is None for prompt in prompts)
    if without:
        yield f"{counted(without, 'prompt')} without an answer; rewards that compare with an answer refuse them"
    tasks = Counter(msgspec.json.encode((prompt.messages, prompt.token_ids)) for prompt in prompts)
    repeated = len(prompts) - len(tasks)
    if repeated:
        yield f"{counted(repeated, 'prompt')} with the same text as another prompt"
    for source, count in sorted(Counter(prompt.source for prompt in prompts if prompt.source).items()):
        yield f"data set {source}: {counted(count, 'prompt')}"
    with_images = sum(bool(prompt.metadata.get("images")) for prompt in prompts)
    if with_images:
        yield f"{counted(with_images, 'prompt')} with images, which trainer.vision shows to the model"


def _cut(text: str) -> str:
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({counted(len(text), 'character')})"
    return visible(text)


@app.command(cls=PlainCommand)
def data(
    name: Annotated[str, typer.Argument(help=f"Data set ({', '.join(KNOWN)}), or check.")],
    file: Annotated[str, typer.Argument(help="File to write; with check, the file or directory to read.")],
    source: Annotated[
        str | None, typer.Option("--from", help="File or directory of the data set; default: download it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the order of the choices in GPQA.")] = 0,
    model: Annotated[str | None, typer.Option(help="With check: Hugging Face directory of the tokenizer.")] = None,
    fields: Annotated[str | None, typer.Option(help="With check: rollout.fields, e.g. '{prompt: question}'.")] = None,
    system: Annotated[str | None, typer.Option(help="With check: rollout.system.")] = None,
    template: Annotated[str | None, typer.Option(help="With check: rollout.template.")] = None,
    subset: Annotated[str | None, typer.Option(help="With check: subset of a directory or of hf://.")] = None,
    split: Annotated[str | None, typer.Option(help="With check: split of a directory or of hf://.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a published data set as a prompt file, or check a prompt file (`slimx data check FILE`) as a run would read
    it.

    Examples:

    slimx data gsm8k data/gsm8k.jsonl

    slimx data gsm8k data/gsm8k.jsonl --from gsm8k/train.jsonl

    slimx data check data/gsm8k.jsonl --model models/Qwen2.5-0.5B-Instruct

    slimx data check mine.csv --fields '{prompt: question, answer: solution}'

    Page: docs/data.md
    """
    if name == "check":
        mapping = _mapping("--fields", fields)
        arguments = _mapping("--template", template) or {}
        for line in check(file, model, mapping, system, arguments, subset, split):
            print(visible(line))
        return
    for line in convert(name, Path(file), source, seed):
        print(visible(line))


def _mapping(option: str, text: str | None) -> Json | None:
    import yaml

    if text is None:
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise SlimxError(
            f"{option} is {text!r}, which is not a YAML mapping; write, for example, '{{prompt: question}}'"
        )
    unknown = [key for key in value if key not in RowFields.model_fields]
    if option == "--fields" and unknown:
        raise SlimxError(f"--fields has the unknown key {unknown[0]!r}; use {', '.join(RowFields.model_fields)}")
    return value
