"""The phone of examples/screens answers actions as documented, and its prompts and rewards agree with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.screens import make
from examples.screens.phone import BACK, BUTTONS, HOME, SQUARE, Phone, action, below, in_squares, middle
from examples.screens.play import Screens, reward
from slimx import Prompt, RewardContext
from slimx.data.chat.responses import Response
from slimx.data.prompts.read import read_prompts

PHONES = [Phone(seed) for seed in range(20)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("screens")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TRAIN_PHONES": 8, "EVAL_PHONES": 3, "DEMONSTRATIONS": 2000, "TRAIN": 200}.items():
            patch.setattr(make, name, value)
        make.make_task(out, seed=1)
    return out


async def play(prompt: Prompt, *turns: str) -> list[Any]:
    screens = Screens()
    assert await screens.reset(prompt, seed=0) == ""
    steps = [await screens.step(turn) for turn in turns]
    await screens.close()
    return steps


def task(phone: Phone, app: str, button: int, screen: str) -> Prompt:
    return Prompt(id="p", metadata={"seed": phone.seed, "app": app, "button": button, "screen": screen})


def shown(step: Any) -> bytes:
    (image,) = step.images
    return image.tobytes()


def test_only_whole_actions_are_actions():
    assert action("R(1,6)") == (1, 6) and action("2(0,7)") == (0, 7) and action("back") == BACK
    for text in ("", "R(1,8)", "R(1,6) ", "R[1,6]", "4(1,1)", "(1,1)", "back back", "R(1,6)R(1,6)"):
        assert action(text) is None


@pytest.mark.parametrize("phone", PHONES)
def test_only_targets_are_hit_and_the_squares_below_them_never(phone):
    for screen in (HOME, *phone.apps):
        boxes = phone.icons if screen == HOME else phone.buttons[screen]
        for name, box in boxes.items():
            assert phone.touched(screen, middle(box)) == name and phone.touched(screen, below(box)) is None
            squares = in_squares(box)
            for x in range(8):
                for y in range(8):
                    inside = squares[0] <= x <= squares[2] and squares[1] <= y <= squares[3]
                    assert (phone.touched(screen, (x, y)) == name) == inside


@pytest.mark.parametrize("phone", PHONES[:4])
def test_an_icon_is_drawn_where_it_is_hit(phone):
    ground = phone.draw(HOME).getpixel((0, 0))
    pixels = np.asarray(phone.draw(HOME))
    for x in range(8):
        for y in range(8):
            pixel = tuple(pixels[y * SQUARE + SQUARE // 2, x * SQUARE + SQUARE // 2])
            assert (phone.touched(HOME, (x, y)) is not None) == (pixel != ground and pixel != (120, 120, 120))
    assert len({phone.draw(screen).tobytes() for screen in (HOME, *phone.apps)}) == 1 + len(phone.apps)


async def test_a_task_of_three_actions_is_rewarded_at_its_end():
    phone = PHONES[0]
    app, other = phone.apps[:2]
    right = phone.buttons[app][2]
    turns = (BACK, "R({},{})".format(*middle(phone.icons[app])), "2({},{})".format(*middle(right)))
    went_back, opened, finished = await play(task(phone, app, 2, other), *turns)
    assert shown(went_back) == phone.draw(HOME).tobytes() and shown(opened) == phone.draw(app).tobytes()
    assert [step.done for step in (went_back, opened, finished)] == [False, False, True]
    assert [step.reward for step in (went_back, opened, finished)] == [0.0, 0.0, 1.0]


async def test_other_buttons_end_the_task_and_other_places_change_nothing():
    phone = PHONES[0]
    app, other = phone.apps[:2]
    missed, nothing, stays = await play(
        task(phone, app, 1, HOME), "R({},{})".format(*below(phone.icons[app])), "R(9,9)", BACK
    )
    assert {shown(missed), shown(nothing), shown(stays)} == {phone.draw(HOME).tobytes()}
    for screen, button in ((app, 2), (other, 1)):
        (step,) = await play(task(phone, app, 1, screen), "1({},{})".format(*middle(phone.buttons[screen][button])))
        assert (step.done, step.reward) == (True, 0.0)


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("[0.25, 0.25, 2.5, 2.5]", "R(1,2)", 1.0),
        ("[0.25, 0.25, 2.5, 2.5]", "R(1,3)", 0.0),
        ("[0.25, 0.25, 2.5, 2.5]", "back", 0.0),
        ("[0.25, 0.25, 2.5, 2.5]", "it is (1,2)", 0.0),
        ("back", "back", 1.0),
        ("back", "R(1,2)", 0.0),
        ("back", "back to", 0.0),
    ],
)
async def test_an_action_needs_the_right_type_and_place(answer, text, value):
    ctx = RewardContext(Prompt(id="p", answer=answer), None, text, False, responses=[Response((text,), text)])
    assert await reward(ctx, SimpleNamespace()) == value
    assert ctx.metrics == {"format": float(action(text) is not None)}


def test_three_in_ten_demonstrated_taps_hit_their_target(data):
    hits: list[bool] = []
    turns = []
    for prompt in read_prompts(data / "demonstrations.jsonl"):
        meta = prompt.metadata
        phone = Phone(meta["seed"])
        found = action(prompt.answer)
        assert (meta["screen"] not in (HOME, meta["app"])) == (found == BACK)
        if found != BACK:
            name = meta["app"] if meta["screen"] == HOME else meta["button"]
            assert prompt.answer[0] == str(name)
            hits.append(phone.touched(meta["screen"], found) == name)
        turns.append(len(meta["images"]))
    assert len(hits) > 1000 and 0.25 < np.mean(hits) < 0.35
    assert set(turns) == {1, 2, 3} and 0.3 < np.mean(np.array(turns) > 1) < 0.5


async def test_the_conversation_before_a_demonstration_leads_to_its_screen(data):
    for prompt in read_prompts(data / "demonstrations.jsonl")[:100]:
        meta = prompt.metadata
        names = [image.removesuffix(".png").rpartition("-")[2] for image in meta["images"]]
        said = [message["content"] for message in prompt.messages if message["role"] == "assistant"]
        steps = await play(task(Phone(meta["seed"]), meta["app"], meta["button"], names[0]), *said)
        assert [shown(step) for step in steps] == [Phone(meta["seed"]).draw(name).tobytes() for name in names[1:]]
        assert names[-1] == meta["screen"]
        assert [message["content"] for message in prompt.messages[2::2]] == ["<image>"] * len(said)


def test_prompts_show_their_screen_and_held_out_phones_are_others(data):
    seeds = {}
    for name in ("demonstrations", "actions", "tasks", "heldout-actions", "heldout-tasks"):
        prompts = read_prompts(data / f"{name}.jsonl")
        seeds[name] = {prompt.metadata["seed"] for prompt in prompts}
        for prompt in prompts[:200]:
            meta = prompt.metadata
            phone = Phone(meta["seed"])
            assert prompt.messages[0]["content"] == f"<image>open {meta['app']}, tap {meta['button']}"
            assert meta["app"] in phone.apps and 1 <= meta["button"] <= BUTTONS
            for image in meta["images"]:
                assert (data / image).read_bytes()[:4] == b"\x89PNG"
            assert meta["images"][-1].endswith(f"{phone.seed}-{meta['screen']}.png")
            if name.endswith("actions"):
                target = phone.target(meta["screen"], meta["app"], meta["button"])
                assert prompt.answer == (BACK if target is None else str(in_squares(target)))
            if name.endswith("tasks"):
                assert prompt.answer is None and meta["screen"] != meta["app"]
    assert not (seeds["heldout-actions"] | seeds["heldout-tasks"]) & (seeds["demonstrations"] | seeds["tasks"])


def test_the_same_seed_gives_the_same_screens_and_prompts(data, tmp_path, monkeypatch):
    for name, value in {"TRAIN_PHONES": 8, "EVAL_PHONES": 3, "DEMONSTRATIONS": 2000, "TRAIN": 200}.items():
        monkeypatch.setattr(make, name, value)
    make.make_task(tmp_path, seed=1)
    files = sorted(path.relative_to(data) for path in data.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert all((data / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)
