"""Prompts of a run: reads and checks the files named in section rollout, and creates the source that returns prompts in
order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.rollout import Rollout
from slimx.data.chat.template import check_arguments, check_ends, with_template
from slimx.data.chat.tokens import check_prompts, load_tokenizer
from slimx.data.prompts.mapping import RowRewriter, make_mapping
from slimx.data.prompts.read import DataSource, PromptSource, iter_prompts
from slimx.data.records import Prompt
from slimx.dotted import load_function
from slimx.errors import SlimxError, raised
from slimx.json_types import Json
from slimx.models.families import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCES = "slimx.prompt_sources"
"""Entry-point group for classes that implement `DataSource`; the class named "mixed" mixes the prompts of
`rollout.sources`."""


def run_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Returns the model's tokenizer with a chat template that receives the arguments in `rollout.template`. Raises
    SlimxError for an argument that the template never reads, and for a template that does not terminate."""
    tokenizer = load_tokenizer(config.model.path)
    check_ends(tokenizer)
    check_arguments(tokenizer, config.rollout.template, "rollout.template")
    return with_template(tokenizer, config.rollout.template)


class RowImages(Protocol):
    """The images in rows of prompt files."""

    def __call__(self, row: Json, where: str) -> Json:
        """Rewrites a row as `RowMapping.images` does."""

    @property
    def check(self) -> Callable[[PreTrainedTokenizerBase, Sequence[Prompt], str, int, int], None]:
        """Replacement of `check_prompts` for prompts with images."""


def row_images(config: Config, keep: bool) -> RowImages | None:
    """Returns the handler of images in rows; None without `trainer.vision`. `keep`: copy these images to the run's
    image store."""
    if config.trainer.vision is None:
        return None
    rows: RowImages = entry_points.load("slimx.images", "rows")(config, keep)
    return rows


def training_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> dict[str, list[Prompt]]:
    """Reads and checks the training prompts. Returns them by source name; the prompts of `rollout.prompts` have the
    name ""."""
    rollout = config.rollout
    images = row_images(config, True)
    check = check_prompts if images is None else images.check
    prompts = source_prompts(rollout, images)
    paths = {source.name: source.path for source in rollout.sources}
    for name, rows in prompts.items():
        path = paths.get(name, rollout.prompts)
        check(tokenizer, rows, str(path), rollout.max_prompt_tokens, spec.vocab_size)
    return prompts


def first_prompt(config: Config, images: RowImages | None) -> Prompt:
    """Reads only the first prompt of the first prompt file. Raises SlimxError if this prompt is missing or invalid."""
    _, prompts = next(_streams(config.rollout, images))
    return next(prompts)


def make_source(config: Config, prompts: Mapping[str, list[Prompt]]) -> DataSource:
    """Creates the source from which rollouts take `prompts`, a result of `training_prompts`, in a reproducible order.
    Raises SlimxError if a user's source (`rollout.source`) cannot be created."""
    rollout = config.rollout
    seed = config.run.seed
    if rollout.sources:
        mixed = entry_points.load(SOURCES, "mixed")
        return mixed(rollout.sources, prompts, seed, rollout.prompts_per_step)
    (rows,) = prompts.values()
    if rollout.source is None:
        return PromptSource(rows, seed)
    make = load_function("rollout.source", rollout.source, ("prompts", "seed"), is_async=False)
    try:
        source = make(rows, seed)
    except Exception as error:
        raise SlimxError(
            f"rollout.source: {rollout.source} raised {raised(error)}; correct the function",
            code="sources.raised",
            about="rollout.source",
        ) from error
    missing = [name for name in ("next", "state", "restore") if not callable(getattr(source, name, None))]
    if missing:
        raise SlimxError(
            f"rollout.source: {rollout.source} returned an object of type {type(source).__name__}, which does not "
            f"define {', '.join(missing)}; define all methods of slimx.data.prompts.read.DataSource",
            code="sources.methods",
            about="rollout.source",
        )
    return source


def check_order(config: Config, prompts: Mapping[str, list[Prompt]], rollouts: Json, *, forked: bool) -> None:
    """Raises SlimxError if the run cannot continue with `prompts` from the position in a checkpoint, because the
    prompts or their seed differ from those of the checkpoint. Changes no files. `rollouts`: the part of the
    checkpoint's state that contains the position. `forked`: True if the checkpoint is another run's."""
    if config.rollout.replay or (config.run.fork_prompts == "anew" and forked):
        return
    make_source(config, prompts).restore(rollouts["source"])


def source_prompts(rollout: Rollout, images: RowRewriter | None = None) -> dict[str, list[Prompt]]:
    """Reads the prompts of each of `rollout.sources`, and returns them by source name; the prompts of `rollout.prompts`
    have the name "". `images`: as in `RowMapping`. Raises SlimxError if two sources have prompts with the same id."""
    prompts: dict[str, list[Prompt]] = {}
    seen: dict[str, str] = {}
    for name, rows in _streams(rollout, images):
        prompts[name] = [*rows]
        for prompt in prompts[name]:
            other = seen.setdefault(prompt.id, name)
            if other != name:
                raise SlimxError(
                    f"rollout.sources: {name!r} and {other!r} both have a prompt with id {prompt.id!r}; "
                    "give the prompts different ids, or rename a file if its name is part of the id",
                    code="prompts.id",
                    about=prompt.id,
                )
    return prompts


def _streams(rollout: Rollout, images: RowRewriter | None) -> Iterator[tuple[str, Iterator[Prompt]]]:
    """Yields the name and the prompts, read lazily, of each of `rollout.sources`, or "" and those of
    `rollout.prompts`."""
    if rollout.prompts is not None:
        yield "", iter_prompts(rollout.prompts, make_mapping(rollout.fields, rollout.map, rollout.system, images))
    for source in rollout.sources:
        mapping = make_mapping(source.fields or rollout.fields, rollout.map, rollout.system, images)
        rows = iter_prompts(source.path, mapping, dataset=source.name, subset=source.subset, split=source.split)
        yield source.name, rows


def heldout_prompts(
    config: Config, name: str, path: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec
) -> list[Prompt]:
    """Reads and checks the prompts of the evaluation file `path`. `name`: name of the file in `eval.prompts`; "" if it
    has no name there."""
    images = row_images(config, True)
    prompts = [*heldout_rows(config, name, images)]
    check = check_prompts if images is None else images.check
    check(tokenizer, prompts, path, config.rollout.max_prompt_tokens, spec.vocab_size)
    return prompts


def heldout_rows(config: Config, name: str, images: RowRewriter | None) -> Iterator[Prompt]:
    """Yields the prompts, read lazily, of the file `name` in `eval.prompts`. `images`: as in `RowMapping`."""
    options = config.eval.sets[name]
    mapping = make_mapping(options.fields, options.map, config.rollout.system, images, section="eval")
    return iter_prompts(config.eval.files[name], mapping, dataset=name or None)
