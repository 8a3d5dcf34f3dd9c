"""Boxes and points in an image, as vision-language models write them, and the scales of their coordinates."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, get_args

from slimx.errors import SlimxError
from slimx.rewards.context import Context

type Point = tuple[float, float]
type Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge: x1, y1, x2, y2."""
Scale = Literal["pixels", "relative", "thousandths"]
"""Unit of coordinates: pixels, fractions of the image's width and height, or thousandths of them."""

LARGEST = 1e9
"""Largest absolute value of a coordinate. The area of a box with larger coordinates might be infinite."""
_LIST = re.compile(r"""(?:["'](?P<name>[^"'\n]{0,40}+)["']\s*+:\s*+)?+[\[(](?P<numbers>[^\[\](){}]*+)[\])]""")
"""Pattern of a list in square or round brackets that contains no other list, with the name in front of it, as in
"bbox_2d": [1, 2, 3, 4]."""
_NUMBER = re.compile(
    r"(?:[xy][12]?\s*=\s*)?(?P<value>[-+]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:e[-+]?[0-9]++)?|nan|[-+]?inf(?:inity)?)",
    re.IGNORECASE,
)
_COORDINATE = r"\s*+([^\s(),]{1,40}+)\s*+"
_CORNER = rf"\({_COORDINATE},{_COORDINATE}\)"
_CORNERS = re.compile(rf"{_CORNER}\s*+,\s*+{_CORNER}")
"""Pattern of a box as Qwen2-VL writes it, (x1,y1),(x2,y2)."""


def boxes_in(text: str) -> list[Box]:
    """Returns the boxes in a string: lists of four numbers, and pairs of corners (x1,y1),(x2,y2). Lists that the text
    names a point are not boxes. The coordinates may be NaN, infinite or in the wrong order."""
    lists = _lists(_CORNERS.sub(r"[\1,\2,\3,\4]", text), unlike="point")
    return [(item[0], item[1], item[2], item[3]) for item in lists if len(item) == 4]


def points_in(text: str) -> list[Point]:
    """Returns the points in a string: lists of two numbers in square or round brackets, unless the text names them a
    box. The coordinates may be NaN or infinite."""
    return [(item[0], item[1]) for item in _lists(text, unlike="box") if len(item) == 2]


def is_box(box: Box) -> bool:
    """Returns True if the coordinates of `box` are finite, at most `LARGEST`, and those of a box with an area."""
    x1, y1, x2, y2 = box
    return all(abs(value) <= LARGEST for value in box) and x1 < x2 and y1 < y2


def reference_boxes(ctx: Context, answer: str) -> list[Box]:
    """Returns the boxes in the prompt's `answer`. Raises SlimxError if there are none, or one is malformed."""
    boxes = boxes_in(answer)
    if not boxes or not all(map(is_box, boxes)):
        raise SlimxError(
            f"prompt {ctx.prompt.id!r} has the answer {answer!r}, which is not a box or a list of boxes; set the "
            "answer to [x1, y1, x2, y2] with x1 < x2 and y1 < y2, or to a list of such boxes",
            code="reward.answer",
            about=ctx.prompt.id,
        )
    return boxes


def check_scales(hook: str, scale: str, answer_scale: str | None) -> None:
    """Raises SlimxError if an option is not a `Scale`. `hook`: name of the reward hook, for the message."""
    for option, value in (("scale", scale), ("answer_scale", answer_scale)):
        if value is not None and value not in get_args(Scale):
            raise SlimxError(
                f"{hook}: reward.options.{option}={value!r} is not a scale of coordinates; set it to one of "
                f"{', '.join(get_args(Scale))}",
                code="reward.option",
                about=option,
            )


def factors(ctx: Context, scale: Scale, answer_scale: Scale | None) -> Point:
    """Returns the factors of x and y by which coordinates in `scale` become coordinates in `answer_scale` (None: the
    same scale). Raises SlimxError if this depends on the size of the image and the prompt's metadata lack it."""
    if answer_scale in (None, scale):
        return 1.0, 1.0
    wide, high = _extent(ctx, scale)
    answer_wide, answer_high = _extent(ctx, answer_scale)
    return answer_wide / wide, answer_high / high


def _extent(ctx: Context, scale: Scale | None) -> Point:
    """Returns width and height of the image in units of `scale`."""
    if scale == "relative":
        return 1.0, 1.0
    if scale == "thousandths":
        return 1000.0, 1000.0
    match ctx.prompt.metadata.get("image_size"):
        case [int() | float() as wide, int() | float() as high] if 0 < wide <= LARGEST and 0 < high <= LARGEST:
            return float(wide), float(high)
        case other:
            raise SlimxError(
                f"prompt {ctx.prompt.id!r} has metadata.image_size={other!r}, which is needed to convert pixels; set "
                "it to the image's [width, height] in pixels, or write the answers in the scale of the responses",
                code="reward.image_size",
                about=ctx.prompt.id,
            )


def _lists(text: str, *, unlike: str) -> Iterable[list[float]]:
    """Yields the lists of numbers in a string whose name does not contain `unlike`."""
    for match in _LIST.finditer(text):
        parts = [_NUMBER.fullmatch(part.strip()) for part in match["numbers"].split(",")]
        numbers = [float(part["value"]) for part in parts if part is not None]
        if len(numbers) == len(parts) and unlike not in (match["name"] or "").lower():
            yield numbers
