"""A run's prompts: read as section rollout says, checked, and the order in which rollouts take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.rollout import Rollout
from slimx.data.chat.template import check_arguments, check_ends, with_template
from slimx.data.chat.tokens import check_prompts, load_tokenizer
from slimx.data.prompts.mapping import make_mapping
from slimx.data.prompts.read import DataSource, PromptSource, iter_prompts, read_prompts
from slimx.data.records import Prompt
from slimx.dotted import load_function
from slimx.errors import SlimxError, raised
from slimx.models.families import ModelSpec

SOURCES = "slimx.prompt_sources"
"""Entry points: classes of `DataSource`."""


def run_tokenizer(config: Config) -> Any:
    """The model's tokenizer, which renders with `rollout.template`. Raises SlimxError for an argument of it that the
    chat template never reads, and for a chat template that does not end."""
    tokenizer = load_tokenizer(config.model.path)
    check_ends(tokenizer)
    check_arguments(tokenizer, config.rollout.template, "rollout.template")
    return with_template(tokenizer, config.rollout.template)


def training_prompts(config: Config, tokenizer: Any, spec: ModelSpec) -> dict[str, list[Prompt]]:
    """Prompts of each source by its name, checked; those of `rollout.prompts` have the name ""."""
    rollout = config.rollout
    prompts = source_prompts(rollout)
    for name, several in prompts.items():
        path = next((each.path for each in rollout.sources if each.name == name), rollout.prompts)
        check_prompts(tokenizer, several, str(path), rollout.max_prompt_tokens, spec.vocab_size)
    return prompts


def first_prompt(config: Config) -> Prompt:
    """The first prompt of the first file, the rest unread. Raises SlimxError where the file has none or a wrong one."""
    rollout = config.rollout
    if rollout.prompts is not None:
        mapping = make_mapping(rollout.fields, rollout.map, rollout.system)
        return next(iter_prompts(rollout.prompts, mapping))
    each = rollout.sources[0]
    mapping = make_mapping(each.fields or rollout.fields, rollout.map, rollout.system)
    return next(iter_prompts(each.path, mapping, dataset=each.name, subset=each.subset, split=each.split))


def make_source(config: Config, prompts: Mapping[str, list[Prompt]]) -> DataSource:
    """The order in which rollouts take `prompts`, which are those of `training_prompts`. Raises SlimxError for a source
    of the user's own that cannot be made."""
    rollout, seed = config.rollout, config.run.seed
    if rollout.sources:
        mixed = entry_points.load(SOURCES, "mixed")
        return mixed(rollout.sources, prompts, seed, rollout.prompts_per_step)
    (several,) = prompts.values()
    if rollout.source is None:
        return PromptSource(several, seed)
    make = load_function("rollout.source", rollout.source, ("prompts", "seed"), is_async=False)
    try:
        source = make(several, seed)
    except Exception as error:
        raise SlimxError(
            f"rollout.source: {rollout.source} raised {raised(error)}", code="sources.raised", about="rollout.source"
        ) from error
    if missing := [name for name in ("next", "state", "restore") if not callable(getattr(source, name, None))]:
        raise SlimxError(
            f"rollout.source: {rollout.source} returned a {type(source).__name__} without {', '.join(missing)}; write "
            "the methods of slimx.data.prompts.read.DataSource",
            code="sources.methods",
            about="rollout.source",
        )
    return source


def check_order(config: Config, prompts: Mapping[str, list[Prompt]], rollouts: Mapping[str, Any], *, own: bool) -> None:
    """Raise SlimxError if `prompts`, or their seed, are not those whose position a checkpoint's `rollouts` have: before
    any file of the run changes. `own`: whether the checkpoint is this run's, not that of a fork."""
    if config.rollout.replay or (config.run.fork_prompts == "anew" and not own):
        return
    make_source(config, prompts).restore(rollouts["source"])


def source_prompts(rollout: Rollout) -> dict[str, list[Prompt]]:
    """Prompts of each entry of `rollout.sources` by its name, or of `rollout.prompts` under "". Raises SlimxError for
    an id that two of them have."""
    if rollout.prompts is not None:
        return {"": read_prompts(rollout.prompts, make_mapping(rollout.fields, rollout.map, rollout.system))}
    out: dict[str, list[Prompt]] = {}
    seen: dict[str, str] = {}
    for each in rollout.sources:
        mapping = make_mapping(each.fields or rollout.fields, rollout.map, rollout.system)
        out[each.name] = read_prompts(each.path, mapping, dataset=each.name, subset=each.subset, split=each.split)
        for prompt in out[each.name]:
            if (other := seen.setdefault(prompt.id, each.name)) != each.name:
                raise SlimxError(
                    f"rollout.sources: {each.name!r} and {other!r} both have a prompt with id {prompt.id!r}; give the "
                    "files other names, or their rows ids",
                    code="prompts.id",
                    about=prompt.id,
                )
    return out


def heldout_prompts(config: Config, name: str, path: str, tokenizer: Any, spec: ModelSpec) -> list[Prompt]:
    """Prompts of one file of `eval.prompts`, checked; `name`: the file's, "" if it has none."""
    mapping = make_mapping(config.eval.fields, config.eval.map, config.rollout.system, section="eval")
    prompts = read_prompts(path, mapping, dataset=name or None)
    check_prompts(tokenizer, prompts, path, config.rollout.max_prompt_tokens, spec.vocab_size)
    return prompts
