"""Answers of prompts are trained as the chat template writes them."""

from __future__ import annotations

import pytest

from slimx.data.records import Prompt
from slimx.extras.demonstrations import hook as demonstrations
from slimx.extras.demonstrations.answers import check_answer, encode_answer
from slimx.rewards.needs import prompt_check
from tests.extras.agents.proxy_stand import TEMPLATE
from tests.refusals import refused
from tests.unit.rollout.test_hooks import context, the_tokenizer
from tests.unit.rollout.test_turns import with_chat

THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant><think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{{ m.content }}<end>\n{% else %}<user>{{ m.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opens }}{% endif %}"
)
PROMPT_OF = Prompt(id="p", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("opens", "answer", "trained"),
    [
        ("", "A", "<think>\n\n</think>\n\nA<end>"),
        ("<think>\n", "A", "\n</think>\n\nA<end>"),
        ("<think>\n", "<think>why</think>A", "why\n</think>\n\nA<end>"),
        ("<think>\n\n</think>\n\n", "A", "A<end>"),
    ],
)
def test_an_answer_is_trained_as_the_template_writes_it(opens, answer, trained):
    tokenizer = with_chat(THINKS.replace("{{ opens }}", opens))
    assert tokenizer.decode(encode_answer(tokenizer, PROMPT_OF, answer)) == trained
    check_answer(tokenizer, PROMPT_OF, answer)


def test_an_answer_that_the_template_writes_otherwise_is_refused():
    tokenizer = with_chat(TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}"))
    for check in (encode_answer, check_answer):
        with refused("prompts.demonstration", about="p"):
            check(tokenizer, PROMPT_OF, "A")
    assert tokenizer.decode(encode_answer(tokenizer, PROMPT_OF, "<think>\nwhy</think>A")) == "why</think>A<end>"
    assert tokenizer.decode(encode_answer(tokenizer, Prompt(id="p", token_ids=[5]), "A")) == "A<end>"


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = with_chat("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.eos_token = None
    for check in (encode_answer, check_answer):
        with refused("tokenizer.end"):
            check(tokenizer, PROMPT_OF, "A")


async def test_demonstrations_train_the_answer_and_the_end_token():
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}], answer="2")
    t = await demonstrations.generate(context(None), prompt)
    assert the_tokenizer().decode(t.token_ids.tolist()) == "<user>1+1=<assistant>2<end>"
    assert t.loss_mask.tolist() == [0] * 6 + [1, 1]
    with refused("hooks.answer", about="q"):
        await demonstrations.generate(context(None), Prompt(id="q", messages=prompt.messages))


def test_a_prompt_without_an_answer_is_refused_before_the_run():
    check = prompt_check(demonstrations.generate)
    messages = [{"role": "user", "content": "1+1="}]
    check([Prompt(id="p", messages=messages, answer="2")], tokenizer=the_tokenizer())
    with refused("hooks.answer", about="q"):
        check([Prompt(id="q", messages=messages)], tokenizer=the_tokenizer())
