"""Makes a tiny vision-language model, and the tasks on drawn screens that it learns in three stages.

    python -m examples.screens.make --out DIR --seed 1

DIR gets `model/`, the seeded Qwen3-VL of examples/pictures; `images/`, PNG files of screens; and five files of prompts:

- demonstrations.jsonl: screens with an action as the answer, some of them in the middle of a task. The type of action
  is right, but 70% of the taps land below their target;
- actions.jsonl and heldout-actions.jsonl: first screens of tasks with the box to tap as the answer, or `back`;
- tasks.jsonl and heldout-tasks.jsonl: the first screens of tasks of two actions, or of three if the wrong app is open.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from examples.pictures import make as pictures
from examples.screens.phone import BACK, BUTTONS, HOME, Phone, below, in_squares, middle, path
from slimx.data.chat.tokens import load_tokenizer
from slimx.json_types import Json

TRAIN_PHONES, EVAL_PHONES = 400, 100
DEMONSTRATIONS, TRAIN, HELD_OUT = 38_400, 3200, 200
"""Number of prompts in each file of demonstrations, of training prompts and of held-out prompts."""
RIGHT_SHARE = 0.3
_POSITIONS, _POSITION_SCALE = "model.visual.pos_embed.weight", 60.0
_TEMPLATE_END = "{% endfor %}{% if add_generation_prompt %}"


def make_model(out: Path, seed: int) -> None:
    """Writes the model of examples/pictures into the directory `out`, with two changes.

    Its embeddings of positions are larger: the model must say where something is, and would learn this hundreds of
    steps later, because the embeddings of flat colors hide positions. Its chat template ends an action in the
    conversation as the model ends it."""
    pictures.make_model(out, seed)
    weights = load_file(out / "model.safetensors")
    weights[_POSITIONS] *= _POSITION_SCALE
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(out)
    ends = "{% if message.role == 'assistant' %}<end>{% endif %}" + _TEMPLATE_END
    tokenizer.chat_template = str(tokenizer.chat_template).replace(_TEMPLATE_END, ends)
    tokenizer.save_pretrained(out)


def make_task(out: Path, seed: int) -> None:
    """Writes screens and prompts into the directory `out`. Held-out prompts show phones of their own."""
    rng = np.random.default_rng(seed)
    phones = [Phone(number) for number in rng.choice(2**31, TRAIN_PHONES + EVAL_PHONES, replace=False).tolist()]
    train, held_out = phones[:TRAIN_PHONES], phones[TRAIN_PHONES:]
    (out / "images").mkdir(parents=True, exist_ok=True)
    for phone in phones:
        for screen in (HOME, *phone.apps):
            phone.draw(screen).save(out / "images" / _name(phone, screen))

    _write(out / "demonstrations.jsonl", (_demonstration(rng, train) for _ in range(DEMONSTRATIONS)))
    for prefix, some, count in (("", train, TRAIN), ("heldout-", held_out, HELD_OUT)):
        _write(out / f"{prefix}actions.jsonl", (_first_action(rng, some) for _ in range(count)))
        _write(out / f"{prefix}tasks.jsonl", (_task(rng, some) for _ in range(count)))


def _demonstration(rng: np.random.Generator, phones: list[Phone]) -> Json:
    """Returns a conversation of right actions with the next action, of which a tap is right with `RIGHT_SHARE`."""
    phone, app, button, start = _random(rng, phones, opened=True)
    screens = path(start, app)
    screens = screens[: int(rng.integers(1, len(screens) + 1))]
    right = [phone.action(screen, app, button, middle) for screen in screens]
    last = right[-1] if rng.random() < RIGHT_SHARE else phone.action(screens[-1], app, button, below)
    return _line(phone, app, button, screens, right[:-1], last)


def _first_action(rng: np.random.Generator, phones: list[Phone]) -> Json:
    """Returns a screen with the box to tap or `back`."""
    phone, app, button, start = _random(rng, phones, opened=True)
    target = phone.target(start, app, button)
    return _line(phone, app, button, [start], [], BACK if target is None else str(in_squares(target)))


def _task(rng: np.random.Generator, phones: list[Phone]) -> Json:
    phone, app, button, start = _random(rng, phones, opened=False)
    return _line(phone, app, button, [start], [], None)


def _random(rng: np.random.Generator, phones: list[Phone], *, opened: bool) -> tuple[Phone, str, int, str]:
    """Returns a phone, the app and the button of a task, and its first screen: the home screen, the screen of another
    app or, if `opened`, that of the app, each equally often."""
    phone = phones[int(rng.integers(len(phones)))]
    app, other = (str(name) for name in rng.permutation(phone.apps)[:2])
    starts = (HOME, other, app) if opened else (HOME, other)
    return phone, app, int(rng.integers(1, BUTTONS + 1)), starts[int(rng.integers(len(starts)))]


def _line(phone: Phone, app: str, button: int, screens: list[str], actions: list[str], answer: str | None) -> Json:
    """Returns a prompt that shows `screens`, with an action of the model after each but the last."""
    messages = [{"role": "user", "content": f"<image>open {app}, tap {button}"}]
    for done in actions:
        messages += [{"role": "assistant", "content": done}, {"role": "user", "content": "<image>"}]
    return {
        "messages": messages,
        "answer": answer,
        "metadata": {
            "images": [f"images/{_name(phone, screen)}" for screen in screens],
            "seed": phone.seed,
            "app": app,
            "button": button,
            "screen": screens[-1],
        },
    }


def _name(phone: Phone, screen: str) -> str:
    return f"{phone.seed}-{screen}.png"


def _write(file: Path, lines: Iterable[Json]) -> None:
    rows = ({"id": f"{number:05d}", **line} for number, line in enumerate(lines))
    file.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="make a tiny vision-language model and tasks on drawn screens")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights, the screens and the prompts")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    make_model(arguments.out / "model", arguments.seed)
    make_task(arguments.out, arguments.seed)
    print(f"{arguments.out}: model, {5 * (TRAIN_PHONES + EVAL_PHONES)} images, 5 files of prompts")


if __name__ == "__main__":
    main()
