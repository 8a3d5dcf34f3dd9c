"""A phone of small drawn screens: a home screen with the icons of apps, and in each app numbered buttons.

A task is an app and a button, such as "open R, tap 2": R is the red app. The model answers every screen with one
action: `back`, or a tap such as `R(1,6)`, which says what is tapped and where. The screen is divided into 8 x 8
squares; the tap is at the middle of the one in column 1 and row 6, and what it says before has no effect. An icon opens
its app; `back` returns to the home screen; the first button that is tapped ends the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw

type Tap = tuple[int, int]
"""Column and row of a square, each from 0 to 7."""
type Box = tuple[int, int, int, int]
"""Left, top, right and bottom edge in pixels, all of which belong to the box."""

SIZE = 64
"""Width and height of a screen in pixels."""
SQUARE = SIZE // 8
"""Width and height in pixels of one of the squares that a tap names."""
COLORS = {"R": (220, 40, 40), "G": (40, 190, 60), "B": (50, 80, 230), "Y": (230, 210, 40)}
"""Color of each app, by its name, which is the color's first letter."""
APPS, BUTTONS = 3, 3
"""Number of apps of a phone, and number of buttons of an app."""
HOME = "home"
"""Name of the home screen; the other screens have the names of the apps."""
BACK = "back"
_CELL, _PLACES = 32, 4
"""Width and height in pixels of a cell of the layout, and number of cells on a screen."""
_SIDE = 20
"""Width and height in pixels of an icon or button."""
_DOTS = {1: ((10, 10),), 2: ((5, 5), (14, 14)), 3: ((5, 5), (10, 10), (14, 14))}
"""Places of the dots of a button relative to its corner in pixels, by its number."""
_TAP = re.compile(r"[RGBY1-3]\(([0-7]),([0-7])\)")


@dataclass(frozen=True, slots=True)
class Phone:
    """A phone whose apps and buttons lie where `seed` puts them."""

    seed: int
    icons: dict[str, Box] = field(init=False)
    """Boxes of the icons on the home screen, by app."""
    buttons: dict[str, dict[int, Box]] = field(init=False)
    """Boxes of an app's buttons by their numbers from 1 to 3, by app."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        apps = [str(name) for name in rng.permutation(list(COLORS))[:APPS]]
        object.__setattr__(self, "icons", dict(zip(apps, _boxes(rng, APPS), strict=True)))
        buttons = {app: dict(enumerate(_boxes(rng, BUTTONS), start=1)) for app in apps}
        object.__setattr__(self, "buttons", buttons)

    @property
    def apps(self) -> list[str]:
        return list(self.icons)

    def draw(self, screen: str) -> Image.Image:
        """Returns a picture of `screen`, in mode RGB. A home screen is dark, and an app has the color of its icon."""
        if screen == HOME:
            image = Image.new("RGB", (SIZE, SIZE), (20, 20, 30))
            pen = ImageDraw.Draw(image)
            for app, (left, top, right, bottom) in self.icons.items():
                pen.rectangle((left, top, right, bottom), fill=COLORS[app])
                pen.rectangle((left + 3, bottom + 4, right - 3, bottom + 6), fill=(120, 120, 120))  # the icon's label
            return image
        image = Image.new("RGB", (SIZE, SIZE), COLORS[screen])
        pen = ImageDraw.Draw(image)
        for number, (left, top, right, bottom) in self.buttons[screen].items():
            pen.rectangle((left, top, right, bottom), fill=(60, 60, 60))
            for x, y in _DOTS[number]:
                pen.rectangle((left + x - 2, top + y - 2, left + x + 2, top + y + 2), fill=(255, 255, 255))
        return image

    def target(self, screen: str, app: str, button: int) -> Box | None:
        """Returns the box to tap on `screen` for the task `app`, `button`; None if the right action is `back`."""
        if screen == HOME:
            return self.icons[app]
        return self.buttons[app][button] if screen == app else None

    def action(self, screen: str, app: str, button: int, place: Callable[[Box], Tap]) -> str:
        """Returns `back`, or a tap at the `place` of the target, as text."""
        target = self.target(screen, app, button)
        if target is None:
            return BACK
        x, y = place(target)
        return f"{app if screen == HOME else button}({x},{y})"

    def touched(self, screen: str, tap: Tap) -> str | int | None:
        """Returns the app or the number of the button at a place of `screen`; None if nothing is there."""
        x, y = (SQUARE * place + SQUARE // 2 for place in tap)
        boxes: dict[str, Box] | dict[int, Box] = self.icons if screen == HOME else self.buttons[screen]
        for name, (left, top, right, bottom) in boxes.items():
            if left <= x <= right and top <= y <= bottom:
                return name
        return None


def path(screen: str, app: str) -> list[str]:
    """Returns the screens from `screen` to that of `app`, as right actions show them, both included."""
    if screen == app:
        return [app]
    return [screen, app] if screen == HOME else [screen, HOME, app]


def action(text: str) -> Tap | str | None:
    """Returns the action that is the whole text: a place to tap, or `BACK`. None if the text is not an action."""
    if text == BACK:
        return BACK
    match = _TAP.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))


def middle(box: Box) -> Tap:
    """Returns the square whose middle is closest to that of `box`. Its middle lies in any icon or button."""
    left, top, right, bottom = box
    return round(((left + right) / 2 - SQUARE / 2) / SQUARE), round(((top + bottom) / 2 - SQUARE / 2) / SQUARE)


def below(box: Box) -> Tap:
    """Returns the square under the middle of `box`. Nothing can be tapped there."""
    return middle(box)[0], (box[3] - SQUARE // 2) // SQUARE + 1


def in_squares(box: Box) -> list[float]:
    """Returns a box in the unit of taps: a tap at (x, y) hits the box if (x, y) lies in what is returned."""
    return [round((edge - SQUARE // 2) / SQUARE, 3) for edge in box]


def _boxes(rng: np.random.Generator, count: int) -> list[Box]:
    """Returns `count` boxes in different cells of the layout. Below each lies a row of squares that hits no box."""
    boxes = []
    for cell in rng.permutation(_PLACES)[:count].tolist():
        left, top = cell % 2 * _CELL + 6, cell // 2 * _CELL + 3
        boxes.append((left, top, left + _SIDE - 1, top + _SIDE - 1))
    return boxes
