"""Parts of section rollout that say where prompts are and how a row becomes one."""

from __future__ import annotations

from slimx.config.section import Count, Faults, PathText, Section, Weight


class Fields(Section):
    """Columns of a row, dotted where a value lies inside another, such as reward_model.ground_truth."""

    prompt: str
    """Column of the question, text that becomes one user turn, or of a list of messages."""
    answer: str | None = None
    """Column of the answer; numbers are taken as text."""
    answer_after: str | None = None
    """Text after whose last occurrence the answer stands, such as '####' in GSM8K; a row without it is refused."""
    id: str | None = None
    """Column of an id that is unique in the file; a row without one, or every row if null, is named by the file's stem
    and its number."""
    dataset: str | None = None
    """Column of the data set's name, for metrics and `reward.parts`."""
    rejected: str | None = None
    """Column of the rejected answer, for preference learning."""
    tools: str | None = None
    """Column of tools that the chat template shows, as a list or as JSON."""
    images: str | None = None
    """Column of images, kept unchanged in metadata.images for hooks."""
    metadata: tuple[str, ...] = ()
    """Columns kept in the prompt's metadata."""


class PromptSet(Section):
    """One of several sources."""

    path: PathText
    """File, directory or hf://OWNER/NAME."""
    name: str
    """Name of the source in metrics, and the prompts' metadata.dataset where a row names none."""
    weight: Weight | dict[Count, Weight] = 1.0
    """Share of the prompts in proportion to the other sources', or a mapping from a step to the weight that holds from
    then on; before the first of them it is 0."""
    subset: str | None = None
    """Configuration of a data set that has several."""
    split: str | None = None
    """Split of a data set that has several."""
    fields: Fields | None = None
    """Columns of this source; null: `rollout.fields`."""

    def weight_at(self, step: int) -> float:
        """Weight in the batch of `step`, from 0."""
        if not isinstance(self.weight, dict):
            return self.weight
        return next((self.weight[start] for start in sorted(self.weight, reverse=True) if start <= step), 0.0)


def source_faults(sources: tuple[PromptSet, ...]) -> Faults:
    """Yields a name that two sources have, and a step at which no source has any weight."""
    names = [each.name for each in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        yield (
            "sources.name",
            twice[0],
            f"rollout.sources names {twice[0]!r} twice; give each source its own name",
        )
    if not sources:
        return
    starts = {0, *(step for each in sources if isinstance(each.weight, dict) for step in each.weight)}
    for step in sorted(starts):
        if not any(each.weight_at(step) for each in sources):
            yield (
                "sources.weight",
                "rollout.sources",
                f"rollout.sources: no source has a weight at step {step}; give one of them more than 0",
            )
            return
