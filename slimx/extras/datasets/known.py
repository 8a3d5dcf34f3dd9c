"""Published data sets: their location, and the conversion of their rows to prompts (`slimx data NAME OUT`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from slimx.data.prompts.mapping import as_text, value_at
from slimx.digest import fingerprint
from slimx.errors import SlimxError
from slimx.extras.rewards.shared.boxes import last_box
from slimx.json_types import Json

BOXED = "Put your final answer within \\boxed{}."
LETTERS = "ABCD"
type Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Known:
    """Published data set that `slimx data` can write as a prompt file."""

    hub: str
    """Location on the Hub, hf://OWNER/NAME/SUBSET/SPLIT."""
    convert: Callable[[Row, str, int], Json]
    """Function that converts a row to the fields of a prompt. Its other arguments are the row's location, for error
    messages, and a seed."""
    reward: str
    """Name or dotted path of a reward function that suits the data set's answers."""


def _gsm8k(row: Row, where: str, seed: int) -> Json:
    solution = str(column(row, "answer", where))
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise unfit(where, "the answer has no '####'")
    return task(column(row, "question", where), answer.strip().replace(",", ""))


def _math(row: Row, where: str, seed: int) -> Json:
    answer = row.get("answer")
    if answer is None:
        answer = last_box(str(column(row, "solution", where)))
        if answer is None:
            raise unfit(where, "the solution has no \\boxed{...}")
    metadata = _without_nulls({key: row.get(key) for key in ("level", "type", "subject")})
    return task(column(row, "problem", where), answer, metadata, row.get("unique_id"))


def _dapo(row: Row, where: str, seed: int) -> Json:
    messages = column(row, "prompt", where)
    if not isinstance(messages, list):
        raise unfit(where, "the prompt is not a list of messages")
    answer = column(row, "reward_model.ground_truth", where)
    turns = [{"role": turn.get("role"), "content": turn.get("content")} for turn in messages]
    # The published file repeats each question many times with the same index; `slimx data` writes it once.
    extra_info = row.get("extra_info")
    index = extra_info.get("index") if isinstance(extra_info, Mapping) else None
    out: Json = {"messages": turns, "answer": str(answer)}
    if index is not None:
        out["id"] = str(index)
    return out


def _aime(row: Row, where: str, seed: int) -> Json:
    columns = {str(name).lower(): name for name in row}
    if not {"problem", "answer"} <= columns.keys():
        raise unfit(where, f"the columns are {', '.join(map(str, row))}, but must include problem and answer")
    answer = str(as_text(row[columns["answer"]])).strip()
    number = re.fullmatch(r"\$?(\d{1,3})(?:\.0+)?\s*(?:°|\^\{?\\circ\}?|\\degree)?\$?", answer)
    if not number:
        raise unfit(where, f"the answer {answer!r} is not an integer from 0 to 999")
    row_id = next((row[columns[name]] for name in ("id", "problem_idx") if name in columns), None)
    return task(row[columns["problem"]], str(int(number[1])), {}, None if row_id is None else as_text(row_id))


def _gpqa(row: Row, where: str, seed: int) -> Json:
    question = str(column(row, "Question", where)).strip()
    names = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    choices = [str(column(row, name, where)).strip() for name in names]
    # Drawn from seed and question, so that neither the order nor the number of rows affects a question's choices.
    keys = np.random.PCG64([seed, int(fingerprint(question.encode()), 16)]).random_raw(len(choices))
    order = [int(index) for index in np.argsort(keys, kind="stable")]
    listed = "\n".join(f"{letter}) {choices[index]}" for letter, index in zip(LETTERS, order, strict=True))
    text = f"{question}\n\n{listed}\n\nEnd with the letter of the right choice, as 'Answer: LETTER'."
    row_id = row.get("Record ID")
    return message(text, LETTERS[order.index(0)], {}, None if row_id is None else str(row_id))


def _ifeval(row: Row, where: str, seed: int) -> Json:
    ids = list(column(row, "instruction_id_list", where))
    arguments = column(row, "kwargs", where)
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments)
    if len(ids) != len(arguments):
        raise unfit(where, f"instruction_id_list has length {len(ids)}, but kwargs has length {len(arguments)}")
    # A table has every argument in every row; arguments that an instruction does not take are null.
    kwargs = [_without_nulls(item) for item in arguments]
    metadata = {"instruction_id_list": ids, "kwargs": kwargs}
    key = row.get("key")
    return message(str(column(row, "prompt", where)), None, metadata, None if key is None else str(key))


_MATH = "math"
GSM8K = Known("hf://openai/gsm8k/main/train", _gsm8k, _MATH)
MATH = Known("hf://HuggingFaceH4/MATH-500/default/test", _math, _MATH)
DAPO = Known("hf://BytedTsinghua-SIA/DAPO-Math-17k/default/train", _dapo, _MATH)
AIME24 = Known("hf://HuggingFaceH4/aime_2024/default/train", _aime, _MATH)
AIME25 = Known("hf://math-ai/aime25/default/test", _aime, _MATH)
GPQA = Known("hf://Idavidrein/gpqa/gpqa_diamond/train", _gpqa, "choice")
IFEVAL = Known("hf://google/IFEval/default/train", _ifeval, "ifeval")


def _without_nulls(fields: Mapping[str, object]) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def task(question: object, answer: object, metadata: Json | None = None, row_id: object = None) -> Json:
    """Returns the fields of a prompt whose answer is compared in a box."""
    return message(f"{str(question).strip()}\n\n{BOXED}", str(answer), metadata or {}, row_id)


def message(text: str, answer: str | None, metadata: Json, row_id: object) -> Json:
    """Returns the fields of a prompt of one user message. `row_id`: id of the prompt, or None."""
    out: Json = {}
    if row_id is not None:
        out["id"] = row_id
    out["messages"] = [{"role": "user", "content": text}]
    if answer is not None:
        out["answer"] = answer
    if metadata:
        out["metadata"] = metadata
    return out


def column(row: Row, path: str, where: str) -> Any:
    """Returns the value of a row at the dotted `path`. `where`: location of the row. Raises SlimxError if it is
    missing or null."""
    value = value_at(row, path, "the published data set", where)
    if value is None:
        raise unfit(where, f"{path} is null")
    return value


def unfit(where: str, reason: str) -> SlimxError:
    """Returns the error for the row at `where`, which is not of the published form for a `reason`."""
    return SlimxError(
        f"{where}: {reason}; use an unmodified copy of the published data set", code="prompts.published", about=where
    )
