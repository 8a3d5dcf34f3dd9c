"""Published data sets with images: their location, and the conversion of their rows to prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slimx.extras.datasets.known import Known, Row, column, message, task, unfit
from slimx.extras.vision.images.pictures import size_of
from slimx.extras.vision.images.sources import check_file, located
from slimx.extras.vision.prompts.marks import MARK
from slimx.json_types import Json

SCALE = 1000
"""Coordinates of boxes are from 0 to `SCALE` along both sides of the image."""
BOX = (
    f"Where is this in the image: {{}}\n\nEnd with its bounding box as [left, top, right, bottom], in coordinates from "
    f"0 to {SCALE} along each side of the image."
)


def _geometry3k(row: Row, where: str, seed: int) -> Json:
    images = column(row, "images", where)
    problem = str(column(row, "problem", where))
    if not isinstance(images, list) or problem.count(MARK) != len(images):
        raise unfit(where, f"the problem contains {MARK} {problem.count(MARK)} times, not once for each image")
    return task(problem, column(row, "answer", where), {"images": images})


def _clevr(row: Row, where: str, seed: int) -> Json:
    solution = str(column(row, "solution", where))
    answer = re.fullmatch(r"\s*<answer>\s*(\d+)\s*</answer>\s*", solution)
    if not answer:
        raise unfit(where, f"the solution {solution[:100]!r} is not a number between <answer> and </answer>")
    return task(MARK + str(column(row, "problem", where)), answer[1], {"images": [column(row, "image", where)]})


def _refcoco(row: Row, where: str, seed: int) -> Json:
    image = column(row, "image", where)
    if "conversations" in row:  # the files of VLM-R1, whose corners are in pixels
        phrase, corners = _turns(row, where)
    else:  # those of lmms-lab, with COCO's boxes of left, top, width and height
        phrases = column(row, "answer", where)
        phrase = phrases[0] if isinstance(phrases, list) and phrases else None
        left, top, wide, high = _numbers(column(row, "bbox", where), where)
        corners = [left, top, left + wide, top + high]
    if not isinstance(phrase, str):
        raise unfit(where, "the answer is not a list of phrases")
    size = _size(image, where) * 2
    scaled = [round(SCALE * corner / side) for corner, side in zip(corners, size, strict=True)]
    if not all(0 <= edge <= SCALE for edge in scaled):
        raise unfit(where, f"the box {corners} is not inside the image of {size[0]} x {size[1]} pixels")
    text = MARK + BOX.format(phrase.strip())
    return message(text, str(scaled), {"images": [image]}, None)


def _turns(row: Row, where: str) -> tuple[object, list[float]]:
    """Returns the phrase and the corners in a row's conversation of a question and an answer."""
    turns = column(row, "conversations", where)
    values = [turn.get("value") for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []
    if len(values) != 2:
        raise unfit(where, "the conversation does not consist of a question and an answer")
    question, answer = values
    phrase = str(question).replace(MARK, "").rpartition("describes:")[2].strip()
    if isinstance(answer, str):
        try:
            answer = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            raise unfit(where, f"the answer {answer[:100]!r} is not a list of coordinates") from None
    return phrase or None, _numbers(answer, where)


def _numbers(box: Any, where: str) -> list[float]:
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(edge, int | float) for edge in box):
        raise unfit(where, f"the box {str(box)[:100]} does not consist of four numbers")
    return [float(edge) for edge in box]


def _size(image: object, where: str) -> tuple[int, int]:
    found = located(image, Path(where.rpartition(", ")[0]).parent, where)
    if isinstance(found, Path):
        check_file(found, where)
    return size_of(found, where)


GEOMETRY3K = Known("hf://hiyouga/geometry3k/default/train", _geometry3k, "math")
CLEVR = Known("hf://leonardPKU/clevr_cogen_a_train/default/train", _clevr, "math")
REFCOCO = Known("hf://lmms-lab/RefCOCO/default/val", _refcoco, "iou")
