"""The final answer is graded, and nothing before it: no thinking, no torn box, no sample output."""

from __future__ import annotations

import pytest

from slimx.extras.boxes.programs.answers import last_program
from slimx.extras.rewards import choice, exact, f1, math, pattern
from tests.extras.rewards.reward_stand import judged


@pytest.mark.parametrize(
    ("hook", "text", "answer", "value"),
    [
        (math, r"<think>try \boxed{5}</think>The answer is 7.", "5", 0.0),
        (math, r"<think>try \boxed{5}</think>The answer is 7.", "7", 1.0),
        (math, r"\boxed{5}. Wait, no: \boxed{7", "5", 0.0),
        (math, r"\boxed{5}. Wait, no: \boxed", "5", 0.0),
        (math, r"<think>maybe \boxed{5}", "5", 0.0),
        (math, r"$\boxed 2$", "2", 1.0),
        (math, r"\fbox{2}", "2", 1.0),
        (math, "$|x|$", "|x|", 1.0),
        (math, r"\boxed{|x|}", "|a||b|", 0.0),
        (math, r"\boxed{|a| \cdot |b|}", "|a||b|", 1.0),
        (math, r"\boxed{n!}", "n!", 1.0),
        (exact, "<think>5</think>7", "7", 1.0),
        (f1, "<think>red</think>blue", "red", 0.0),
        (f1, "<think>red", "red", 0.0),
        (choice, "<think>Answer: B", "B", 0.0),
        (choice, "<think>Answer: B</think>Answer: C", "C", 1.0),
        (choice, "<think>It is A.</think>\n<answer> C </answer>", "C", 1.0),
        (choice, "<answer>(C)</answer>", "C", 1.0),
        (choice, "<answer>C. 65°</answer>", "C", 1.0),
        (choice, "Answer: B\n<answer>C</answer>", "B", 0.0),
        (choice, "<answer>A or C</answer>", "C", 0.0),
        (choice, "Answer: C <answer>", "C", 0.0),
        (math, "Not 5. <answer>7</answer> after 3 steps", "7", 1.0),
        (math, "<answer>5</answer> or <answer>7</answer>", "5", 0.0),
        (math, "7 <answer>", "7", 0.0),
        (math, "<answer>7", "7", 0.0),
    ],
)
def test_the_final_answer_is_graded(hook, text, answer, value):
    assert judged(hook.reward, text, answer) == value


@pytest.mark.parametrize(("text", "value"), [("<think>= 4</think>", 0.0), ("<think>= 5</think>= 4", 1.0)])
def test_pattern_takes_no_answer_from_the_thinking(text, value):
    assert judged(pattern.reward, text, "4", pattern=r"= (?P<answer>\d+)") == value


BOXED = r"<think>.*</think>.*\\boxed\{.*\}.*"
TAGGED = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        (BOXED, r"<think>a\nb</think> So it is \boxed{2 \sqrt { 221 }}.", 1.0),
        (BOXED, r"It is \boxed{2 \sqrt { 221 }}.", 0.0),
        (BOXED, r"<think>a</think> $2 \sqrt { 221 }$", 0.0),
        (TAGGED, "<think>a\nb</think>\n<answer>65°</answer>", 1.0),
        (TAGGED, "<think>a</think> 65 <answer>65</answer>", 0.0),
        (TAGGED, "<answer>65</answer>", 0.0),
    ],
)
def test_pattern_pays_for_the_form_of_geometrical_answers(form, text, value):
    assert judged(pattern.reward, text, pattern=form, whole=True) == value


def test_a_response_that_math_verify_cannot_read_in_time_is_not_logged(caplog, monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 1)
    with caplog.at_level("DEBUG"):
        assert judged(math.reward, r"\boxed{10^{10^{10}}}", "5") == 0.0
    assert [record for record in caplog.records if record.name.startswith("math_verify")] == []


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("**Answer**: B", "B"),
        ("Answer: $B$", "B"),
        (r"Answer: \(B\)", "B"),
        (r"\boxed{\textbf{B}}", "B"),
        (r"\boxed{B) 12}", "B"),
        (r"$\boxed B$", "B"),
        (r"\boxed{b}", "B"),
        ("The correct answer is option (B).", "B"),
        ("The answer is: I believe it is C.\n\nC", "C"),
        ("The answer is A because it rains", "A"),
        ("Answer: B; D is wrong", "B"),
        ("Option A is wrong. Answer: D", "D"),
        ("Answer: A or B", None),
        ("Answer: A, B, C, D", None),
        ("(A) or (B)", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A} or \boxed{B}", None),
        ("The answer is not A", None),
        (r"The answer is B, so \boxed{B", None),
    ],
)
def test_choices_are_read_in_their_spellings_and_several_are_none(text, letter):
    assert choice.chosen(text) == letter


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nOutput:\n```\n1\n```", "a\n"),
        ("```\na\n```\nor\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```Python3\nb\n```\n```bash\nc\n```", "b\n"),
        ("```python\na\n```\nNo:\n```python\nb", None),
        ("````python\na = 1\n```\n````", "a = 1\n```\n"),
        ("~~~py\na\n~~~", "a\n"),
        ("```python\na```", "a\n"),
        ("Use ```x``` and ```y```.", None),
        ("<think>```python\na\n```</think>I do not know", None),
        ("```pycon\n>>> a\n```", None),
    ],
)
def test_the_program_is_the_last_block_of_python(text, program):
    assert last_program(text) == program
