"""Places of images in messages, in every form that data sets use."""

from __future__ import annotations

import pytest

from slimx.extras.vision.prompts.marks import with_marks
from tests.refusals import refused


def user(*parts: object) -> dict:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


A, B = ({"type": "image_url", "image_url": {"url": name}} for name in "ab")
BARE = {"type": "image"}


@pytest.mark.parametrize(
    ("messages", "beside", "texts", "images"),
    [
        ([user(A, text("x"), B)], [], ["<image>x<image>"], [A, B]),
        ([user(text("x"), text("y"))], [], ["xy"], []),
        ([user(BARE, text("x"))], ["c"], ["<image>x"], ["c"]),
        ([user(BARE, A, BARE)], ["c", "d"], ["<image><image><image>"], ["c", A, "d"]),
        ([user(A), user(B)], ["c"], ["<image>", "<image>"], [A, B, "c"]),
        ([{"role": "user", "content": "<image>"}, user(A)], ["c"], ["<image>", "<image>"], ["c", A]),
        ([user(text("<image>x"))], ["c"], ["<image>x"], ["c"]),
        ([{"role": "user", "content": "x"}], ["c"], ["x"], ["c"]),
        ([{"role": "tool", "content": [A]}, {"role": "system", "content": [B]}], [], ["<image>", "<image>"], [A, B]),
        ([user({"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"})], [], ["x<image>"],
         [{"type": "input_image", "image_url": "u"}]),
        ([user({"image": "p"}, {"text": "x"})], [], ["<image>x"], [{"image": "p"}]),
        ([user(A), {"role": "assistant", "content": [text("<image>")]}][:1], [], ["<image>"], [A]),
        ([{"role": "assistant", "content": None, "tool_calls": []}, user(A)], [], [None, "<image>"], [A]),
    ],
)  # fmt: skip
def test_parts_become_marks_and_their_images_follow_in_order(messages, beside, texts, images):
    out, found = with_marks(messages, beside, "here")
    assert [message["content"] for message in out] == texts and found == images
    assert [message["role"] for message in out] == [message["role"] for message in messages]


def test_turns_of_sharegpt_keep_their_keys():
    turns = [{"from": "human", "value": "<image>x"}, {"from": "gpt", "value": "<image>"}]
    assert with_marks(turns, ["a", "b"], "here") == (turns, ["a", "b"])


def test_a_demonstration_contains_no_image():
    answer = {"role": "assistant", "content": [text("<im"), text("age>")]}
    out, found = with_marks([user(BARE), {"role": "assistant", "content": "<image>"}], ["a"], "here")
    assert found == ["a"]
    out, found = with_marks([user(A), answer], [], "here")
    assert out[1]["content"] == "<image>" and found == [A]
    with refused("vision.role"):
        with_marks([user(A), {"role": "assistant", "content": [A]}], [], "here")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (user(A, text("see <image>")), "vision.marks"),
        (user({"type": "video", "video": "v"}), "vision.part"),
        (user({"type": "input_audio", "input_audio": {}}), "vision.part"),
        (user({"type": "text", "text": 7}), "vision.part"),
        (user({}), "vision.part"),
        (user("x"), "vision.part"),
    ],
)
def test_parts_that_are_neither_text_nor_image_are_refused(message, code):
    with refused(code):
        with_marks([{"role": "user", "content": "x"}, message], [], "here")
