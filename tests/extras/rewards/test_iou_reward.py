"""Grounding is paid by the overlap of boxes, however a response writes them, and clicks by the box that they hit."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimx.extras.rewards.images import iou, point_in_box
from slimx.extras.rewards.images.coordinates import Box, boxes_in, points_in
from slimx.extras.rewards.images.iou import agreement
from slimx.rewards import needs
from tests.extras.rewards.reward_stand import context, judged, trajectory
from tests.refusals import refused

ANSWER = "[10, 20, 30, 60]"


def box(side: int = 12) -> st.SearchStrategy[Box]:
    """Boxes with an area and integers from 0 to `side` as coordinates."""
    edges = st.lists(st.integers(0, side), min_size=2, max_size=2, unique=True).map(sorted)
    return st.builds(lambda x, y: (float(x[0]), float(y[0]), float(x[1]), float(y[1])), edges, edges)


def cells(one: Box) -> set[tuple[int, int]]:
    x1, y1, x2, y2 = map(int, one)
    return set(product(range(x1, x2), range(y1, y2)))


def sized(hook, text, answer, size, **options):
    return asyncio.run(hook(context(text, answer, image_size=size), trajectory(), **options))


# Overlap --------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(box(), box())
def test_iou_is_the_share_of_common_cells(one, other):
    assert iou.iou(one, other) == len(cells(one) & cells(other)) / len(cells(one) | cells(other))


FLOATS = st.floats(-1e9, 1e9, allow_nan=False)
EDGES = st.tuples(FLOATS, FLOATS).map(sorted).filter(lambda pair: pair[0] < pair[1])
ANY = st.builds(lambda x, y: (x[0], y[0], x[1], y[1]), EDGES, EDGES)


@settings(deadline=None)
@given(ANY, ANY)
def test_iou_is_symmetric_and_from_0_to_1(one, other):
    assert 0 <= iou.iou(one, other) <= 1
    assert iou.iou(one, other) == iou.iou(other, one)


@settings(deadline=None)
@given(st.lists(box(4), max_size=6), st.lists(box(4), min_size=1, max_size=6), st.sampled_from([None, 0.5]), st.data())
def test_the_order_of_boxes_does_not_matter(predicted, references, threshold, data):
    value = agreement(predicted, references, threshold)
    orders = data.draw(st.permutations(predicted)), data.draw(st.permutations(references))
    assert agreement(*orders, threshold) == value
    assert 0 <= value <= 1
    assert agreement(references, references, threshold) == 1


def test_the_order_of_equal_pairs_does_not_matter():
    """The first predicted box overlaps both references alike, the second only one of them, just as much."""
    predicted, references = [(1, 0, 3, 1), (-1, 0, 1, 1)], [(0, 0, 2, 1), (2, 0, 4, 1)]
    orders = product((predicted, predicted[::-1]), (references, references[::-1]))
    assert [agreement(*order) for order in orders] == pytest.approx([1 / 3] * 4)


@settings(deadline=None)
@given(st.lists(box(4), min_size=1, max_size=5), st.lists(box(4), min_size=1, max_size=5))
def test_another_box_never_pays_more_than_its_match(predicted, references):
    """A box that overlaps nothing always costs, and the reward stays below that of a perfect match."""
    far = (100.0, 100.0, 101.0, 101.0)
    before = agreement(predicted, references)
    assert agreement([*predicted, far], references) == pytest.approx(
        before * (len(predicted) + len(references)) / (len(predicted) + len(references) + 1)
    )


# Responses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[10, 20, 30, 60]",
        "The cat is at [10.0, 2e1, 30, 60.].",
        "<think>[1, 2, 3, 4]</think><answer>[10, 20, 30, 60]</answer>",
        "Not [1, 2, 3, 4]. <answer>[10, 20, 30, 60]</answer>",
        r"Not [1, 2, 3, 4]. \boxed{[10, 20, 30, 60]}",
        '```json\n[{"bbox_2d": [10, 20, 30, 60], "label": "cat"}]\n```',
        '{"bbox_2d": [10, 20, 30, 60], "point_2d": [1, 2], "points": [1, 2, 3, 4]}',
        "{'bbox_2d': [[10, 20, 30, 60]]}",
        '{"result": {"objects": [{"bbox": [10, 20, 30, 60]}]}}',
        "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(10,20),(30,60)<|box_end|>",
        "cat(10, 20), (30, 60)",
        "x1=10: (x1=10, y1=20, x2=30, y2=60)",
        "The image [1] of (640, 480) pixels: [10, 20, 30, 60]",
    ],
)
def test_a_box_is_read_in_each_notation(text):
    assert judged(iou.reward, text, ANSWER) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No cat.",
        "[30, 20, 10, 60]",
        "[10, 60, 30, 20]",
        "[10, 20, 10, 60]",
        "[10, 20, 30]",
        "[10, 20, 30, 60, 0.9]",
        "[NaN, 20, 30, 60]",
        "[-inf, -inf, inf, inf]",
        "[10, 20, 30, Infinity]",
        "[-1e300, -1e300, 1e300, 1e300]",
        "[10, 20, 30, 1e999]",
        "[10, 20, 30, sixty]",
        "[10, 20, 30, 60",
        "[10, 20], [30, 60]",
        "(10, 20) and (30, 60)",
        "[10 20 30 60]",
        "[１０, ２０, ３０, ６０]",
        "[١٠, ٢٠, ٣٠, ٦٠]",
        "[[[[10, 20, 30, 60",
        "[10, 20, 30, 60] <answer>",
        r"[10, 20, 30, 60] \boxed{[10, 20",
        "<think>[10, 20, 30, 60]",
        '{"point_2d": [10, 20, 30, 60]}',
    ],
)
def test_a_malformed_box_earns_nothing(text):
    assert judged(iou.reward, text, ANSWER) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "options", "value"),
    [
        ("[0, 0, 10, 10]", "[0, 0, 10, 20]", {}, 0.5),
        ("[0, 0, 10, 10]", "[0, 0, 10, 20]", {"threshold": 0.5}, 1.0),
        ("[0, 0, 10, 10]", "[0, 0, 10, 20]", {"threshold": 0.51}, 0.0),
        ("[0, 0, 10, 10] [0, 0, 10, 20]", "[0, 0, 10, 20]", {}, 2 / 3),
        ("[0, 0, 10, 20] [0, 0, 10, 20]", "[0, 0, 10, 20]", {}, 2 / 3),
        ("[0, 0, 10, 20] [9, 9, 1, 1]", "[0, 0, 10, 20]", {}, 2 / 3),
        ("[0, 0, 10, 20]", "[[0, 0, 10, 20], [50, 50, 60, 60]]", {}, 2 / 3),
        ("[50, 50, 60, 60], [0, 0, 10, 10]", "[[0, 0, 10, 20], [50, 50, 60, 60]]", {}, 0.75),
        ("[50, 50, 60, 60], [0, 0, 10, 9]", "[[0, 0, 10, 20], [50, 50, 60, 60]]", {"threshold": 0.5}, 0.5),
        ("[0, 0, 10, 20]", "[[0, 0, 10, 20], [0, 0, 10, 20]]", {}, 2 / 3),
        ("[0, 0, 10, 20]", '[{"bbox_2d": [0, 0, 10, 20]}]', {}, 1.0),
        # The pair of 4/5 comes first, although the pairs of 3/5 and 1/2 have the greater sum.
        ("[0, 0, 5, 1] [0, 0, 2, 1]", "[[0, 0, 4, 1], [0, 0, 3, 1]]", {}, (4 / 5 + 2 / 3) / 2),
    ],
)
def test_boxes_are_matched_one_to_one_and_extra_ones_cost(text, answer, options, value):
    assert judged(iou.reward, text, answer, **options) == pytest.approx(value)


@pytest.mark.parametrize(
    ("scale", "answer_scale", "text"),
    [
        ("pixels", None, "[100, 50, 200, 100]"),
        ("pixels", "pixels", "[100, 50, 200, 100]"),
        ("relative", "pixels", "[0.25, 0.25, 0.5, 0.5]"),
        ("thousandths", "pixels", "[250, 250, 500, 500]"),
    ],
)
def test_coordinates_are_converted_to_those_of_the_answer(scale, answer_scale, text):
    answer, options = "[100, 50, 200, 100]", {"scale": scale, "answer_scale": answer_scale}
    assert sized(iou.reward, text, answer, [400, 200], **options) == pytest.approx(1.0)
    assert sized(iou.reward, text, answer, [200, 400], **options) == (1.0 if scale == "pixels" else 0.0)
    values = json.loads(text)
    inside = f"({(values[0] + values[2]) / 2}, {values[1] * 1.01})"
    assert sized(point_in_box.reward, inside, answer, [400, 200], **options) == 1.0


def test_no_size_is_needed_between_shares_and_thousandths():
    options = {"scale": "thousandths", "answer_scale": "relative"}
    assert judged(iou.reward, "[250, 250, 500, 500]", "[0.25, 0.25, 0.5, 0.5]", **options) == 1.0
    options = {"scale": "relative", "answer_scale": "thousandths"}
    assert judged(iou.reward, "[0.25, 0.25, 0.5, 0.5]", "[250, 250, 500, 500]", **options) == 1.0


@pytest.mark.parametrize("size", [None, [400], [400, 0], ["400", "200"], [float("nan"), 5], {"width": 400}])
def test_pixels_without_a_size_are_refused(size):
    for hook in (iou.reward, point_in_box.reward):
        with refused("reward.image_size", about="p7"):
            sized(hook, "[1, 2, 3, 4]", ANSWER, size, scale="relative", answer_scale="pixels")


@pytest.mark.parametrize("answer", ["", "cat", "[]", "[1, 2]", "[3, 2, 1, 4]", "[1, 4, 3, 2]", "[-1e300, 2, 3, 4]"])
def test_an_answer_that_is_no_box_is_refused(answer):
    for hook in (iou.reward, point_in_box.reward):
        with refused("reward.answer", about="p7"):
            judged(hook, ANSWER, answer)


@pytest.mark.parametrize(
    ("hook", "options", "about"),
    [
        (iou, {"scale": "percent"}, "scale"),
        (iou, {"answer_scale": "percent"}, "answer_scale"),
        (iou, {"threshold": 0}, "threshold"),
        (iou, {"threshold": 50}, "threshold"),
        (point_in_box, {"scale": "percent"}, "scale"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_the_run(hook, options, about):
    with refused("reward.option", about=about):
        needs.check(partial(hook.reward, **options))


# Points ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[20, 40]", 1.0),
        ("(20, 40)", 1.0),
        ("click(20, 40)", 1.0),
        ("pyautogui.click(x=20, y=40)", 1.0),
        ('{"point_2d": [20, 40], "label": "cat"}', 1.0),
        ('{"action": "left_click", "coordinate": [20, 40]}', 1.0),
        ('{"bbox_2d": [5, 6], "point_2d": [20, 40]}', 1.0),
        ("<|box_start|>(20,40)<|box_end|>", 1.0),
        ("click(start_box='(20,40)')", 1.0),
        ("Not (1, 2). <answer>(20, 40)</answer>", 1.0),
        ("(20, 40), again (20.0, 40)", 1.0),
        ("[10, 20]", 1.0),
        ("[30, 60]", 1.0),
        ("[9.99, 20]", 0.0),
        ("[30, 60.01]", 0.0),
        ("[40, 20]", 0.0),
        ("(20, 40) or (40, 20)", 0.0),
        ("(20, 40), (30, 60)", 0.0),
        ("[10, 20, 30, 60]", 0.0),
        ("[NaN, 40]", 0.0),
        ("[20, inf]", 0.0),
        ("[２０, ４０]", 0.0),
        ("20, 40", 0.0),
        ("<think>(20, 40)", 0.0),
        ("", 0.0),
    ],
)
def test_one_point_in_the_box_earns_one(text, value):
    assert judged(point_in_box.reward, text, ANSWER) == value


def test_a_point_may_lie_in_any_box_of_the_answer():
    assert judged(point_in_box.reward, "(55, 55)", "[[0, 0, 10, 20], [50, 50, 60, 60]]") == 1.0


# Attacks --------------------------------------------------------------------------------------------------------------

LONG = 100_000
PIECES = [
    "[",
    "]",
    "(",
    ")",
    "1",
    ",",
    " ",
    "-",
    ".",
    "e",
    "{",
    "}",
    '"bbox_2d": ',
    "(1,1),(2,2)",
    "[1,2,3,4]",
    "NaN",
    "٣",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_response_raises_or_leaves_the_range(text):
    assert 0 <= judged(iou.reward, text, "[1, 2, 3, 4]") <= 1
    assert judged(point_in_box.reward, text, "[1, 2, 3, 4]") in (0, 1)


@pytest.mark.parametrize("part", ["[1,2,3,4]", "(1,2),(3,4)", "[", "[1,2,3,", "[1]", "9", "[[1,2,3,4],", '{"bbox_2d":'])
def test_a_long_response_costs_few_overlaps(part, monkeypatch):
    counted = 0
    overlap = iou.iou

    def counting(one, other):
        nonlocal counted
        counted += 1
        return overlap(one, other)

    monkeypatch.setattr(iou, "iou", counting)
    text = part * (LONG // len(part))
    assert judged(iou.reward, text, ANSWER) == 0.0
    assert judged(point_in_box.reward, text, ANSWER) == 0.0
    assert counted <= iou.MOST_EXTRA
    assert len(boxes_in(text)) <= LONG / len("[1,2,3,4]")
    assert len(points_in(text)) <= LONG / len("[1,2]")


def test_boxes_beyond_the_limit_earn_nothing():
    most = [f"[{i}, 0, {i + 1}, 1]" for i in range(iou.MOST_EXTRA + 2)]
    random.Random(5).shuffle(most)
    assert judged(iou.reward, " ".join(most[:-1]), most[0]) == pytest.approx(2 / (iou.MOST_EXTRA + 2))
    assert judged(iou.reward, " ".join(most), most[0]) == 0.0


def test_a_number_of_100_000_digits_is_no_coordinate():
    assert judged(iou.reward, f"[10, 20, 30, {'9' * LONG}]", ANSWER) == 0.0
    assert judged(iou.reward, f"[10, 20, 30, 60.{'0' * LONG}]", ANSWER) == 1.0
