"""Findings about a prompt file: columns, lengths, and a reward that can grade its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slimx import entry_points
from slimx.config.sections.rollout import RowFields
from slimx.data.chat.tokens import encode_prompt, load_tokenizer
from slimx.data.prompts.mapping import fitting_fields, make_mapping
from slimx.data.prompts.read import KEYS, read_prompts
from slimx.data.prompts.rows import read_rows
from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.datasets.files.read import DATASETS

MEASURED = 20_000
"""Maximum number of prompts whose tokens are counted; of larger files, prompts at regular intervals."""
NUMBER = re.compile(r"\$?[-+]?[\d.,]+(?:/\d+)?\s*%?\$?")
FORMULA = re.compile(r"\\[a-zA-Z]+|\^|^\$.+\$$")
LETTER = re.compile(r"[A-J]")
SHORT = 60
"""Maximum number of characters of an answer that a model can be expected to repeat exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A prompt file as a run reads it."""

    path: str
    count: int
    fields: Mapping[str, object] | None
    """Value of `rollout.fields`; None if the rows are in slimx's format."""
    longest: int | None
    """Largest number of tokens of a prompt, with a reserve if not all were counted; None without a tokenizer."""
    longest_answer: int | None
    """Largest number of tokens of an answer; None without a tokenizer or answers."""
    exact: bool
    """True if all prompts were counted."""
    reward: str | None
    """Name of a reward function that can grade the answers; None if there is none."""
    why: str
    """Reason for the choice of the reward, in a few words."""


def examine(path: str, model: str) -> Prompts:
    """Returns the findings about the prompt file at `path`, for the tokenizer in the directory `model`. Raises
    SlimxError if the file cannot be read as prompts."""
    first = next(iter(read_rows(path)[1]), None)
    if first is None:
        raise SlimxError(f"{path} contains no rows; choose another file", code="prompts.empty", about=path)
    fields = None
    if not {*first[2]} <= {*KEYS}:
        fields = fitting_fields(first[2])
    mapping = make_mapping(RowFields.model_validate(fields) if fields else None, None, None)
    prompts = read_prompts(path, mapping)
    reward, why = _reward(prompts)
    chosen = prompts[:: -(-len(prompts) // MEASURED)]
    longest, longest_answer = _lengths(chosen, model)
    exact = len(chosen) == len(prompts)
    if longest is not None and not exact:
        longest += longest // 2
    return Prompts(
        path=path,
        count=len(prompts),
        fields=fields,
        longest=longest,
        longest_answer=longest_answer,
        exact=exact,
        reward=reward,
        why=why,
    )


def columns_of(path: str) -> list[str]:
    """Returns the columns that all rows of the file at `path` have, without those that JSON cannot contain."""
    columns: list[str] | None = None
    for _, _, row in read_rows(path)[1]:
        if columns is None:
            columns = [name for name, value in row.items() if _is_json(value)]
        columns = [name for name in columns if name in row]
    return columns or []


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _lengths(prompts: Sequence[Prompt], model: str) -> tuple[int | None, int | None]:
    """Returns the largest numbers of tokens of a prompt and of an answer."""
    try:
        tokenizer = load_tokenizer(model)
    except SlimxError as error:
        if error.code in ("tokenizer.missing", "setup.missing"):
            return None, None
        raise
    longest = max(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    answers = [prompt.answer for prompt in prompts if prompt.answer is not None]
    longest_answer = max((len(tokenizer.encode(answer)) for answer in answers), default=None)
    return longest, longest_answer


def _reward(prompts: Sequence[Prompt]) -> tuple[str | None, str]:
    """Returns the name of a reward that can grade all answers, or None, and the reason."""
    known = entry_points.find(DATASETS)
    sources = {prompt.source for prompt in prompts}
    rewards = set()
    for source in sources:
        if source in known:
            rewards.add(entry_points.load(DATASETS, source).reward)
    if len(rewards) == 1 and sources <= known.keys():
        return rewards.pop(), f"suits {', '.join(sorted(map(str, sources)))}"
    answers = [prompt.answer for prompt in prompts if prompt.answer]
    if len(answers) < len(prompts):
        return None, "not all prompts have an answer"
    if all(LETTER.fullmatch(answer.strip()) for answer in answers):
        return "choice", "answers are letters of choices"
    if all(NUMBER.fullmatch(answer.strip()) or FORMULA.search(answer) for answer in answers):
        if any(
            re.search("[^\\W\\d]{2}", str(prompt.messages[-1].get("content"))) for prompt in prompts if prompt.messages
        ):
            return "math", "answers are numbers or formulas"
        return "exact", "prompts have no words, so a response is the answer alone"
    if max(map(len, answers)) <= SHORT:
        return "exact", "answers are short texts"
    return None, "answers are long texts"
