"""Arguments of the chat template reach every rendering; a prompt's own go first; unknown ones are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.data.chat.template import check_arguments, check_ends, with_template
from slimx.data.chat.tokens import check_prompts, encode_prompt, encode_turn, rendered_text
from slimx.data.records import Prompt
from slimx.extras.datasets.command import rendered_lines
from slimx.orchestration.start.prompts import first_prompt, run_tokenizer
from tests.extras.agents.proxy_stand import END, TEMPLATE, tokenizer
from tests.refusals import refused

THINKING = TEMPLATE.replace(
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ note }}{% endif %}",
)
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}])


def thinking(**arguments: object) -> Any:
    """Returns a tokenizer of Qwen's kind, whose template reads enable_thinking and note."""
    out = copy.copy(tokenizer())
    out.chat_template = THINKING
    return with_template(out, arguments)


@pytest.mark.parametrize("note", ["x", "a'b\"c", "%} {{ 1 }}", "line\nbreak", None, 3])
def test_arguments_reach_the_first_turn_and_the_next(note):
    model = thinking(enable_thinking=False, note=note)
    assert rendered_text(model, PROMPT).endswith(f"<assistant><think></think>{note}")
    following = model.decode(encode_turn(model, "again", role="user", after=[END]))
    assert following.endswith(f"<assistant><think></think>{note}")
    plain = thinking()
    assert rendered_text(plain, PROMPT).endswith("<assistant>")
    assert rendered_text(thinking(enable_thinking=True), PROMPT) == rendered_text(plain, PROMPT)


def test_arguments_of_a_prompt_override_those_of_the_run():
    model = thinking(enable_thinking=False)
    prompt = Prompt(id="p", messages=PROMPT.messages, template={"enable_thinking": True})
    assert rendered_text(model, prompt) == rendered_text(thinking(), PROMPT) != rendered_text(model, PROMPT)
    assert model.chat_template == thinking(enable_thinking=False).chat_template, "the run's tokenizer is as it was"


def test_tools_of_a_prompt_are_rendered_and_counted():
    tools = [{"type": "function", "function": {"name": "add"}}]
    prompt = Prompt(id="p", messages=PROMPT.messages, tools=tools)
    text = rendered_text(thinking(), prompt)
    assert text.startswith("[tools ") and '"add"' in text
    length = len(encode_prompt(thinking(), prompt))
    check_prompts(thinking(), [PROMPT, prompt, PROMPT], "f.jsonl", length, 10**6)
    with refused("prompts.length", about="p"):
        check_prompts(thinking(), [PROMPT, prompt, PROMPT], "f.jsonl", length - 1, 10**6)


def test_an_argument_that_the_template_never_reads_is_refused():
    with refused("template.argument", about="rollout.template.enable_thinkng"):
        check_arguments(thinking(), {"enable_thinkng": False}, "rollout.template")
    wrong = Prompt(id="p", messages=PROMPT.messages, template={"enable_thinkng": False})
    with refused("prompts.template", about="p"):
        check_prompts(thinking(), [wrong], "f.jsonl", 100, 10**6)


def test_the_first_prompt_is_shown_as_the_model_receives_it(tmp_path):
    model = thinking()
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "p.jsonl").write_text('{"question": "1+1=", "answer": 4}\nnot read\n')
    rollout = {"prompts": str(tmp_path / "p.jsonl"), "fields": {"prompt": "question", "answer": "answer"}}
    keys = {"run": {"dir": "d"}, "model": {"path": str(tmp_path / "m")}}
    config = Config.model_validate(keys | {"rollout": rollout | {"template": {"enable_thinking": False}}})
    first = first_prompt(config, None)
    assert (first.id, first.answer) == ("p:1", "4")
    assert list(rendered_lines(first, run_tokenizer(config)))[1] == rendered_text(
        thinking(enable_thinking=False), first
    )
    wrong = Config.model_validate(keys | {"rollout": rollout | {"template": {"enable_thinkng": False}}})
    with refused("template.argument", about="rollout.template.enable_thinkng"):
        run_tokenizer(wrong)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_without_end_is_refused_by_its_directory(tmp_path):
    model = thinking()
    model.chat_template = THINKING + "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}"
    check_ends(model)
    model.chat_template = THINKING + "{% if tools %}" + LOOPS + "{% endif %}"
    model.save_pretrained(tmp_path)
    keys = {"run": {"dir": "d"}, "model": {"path": str(tmp_path)}, "rollout": {"prompts": "p.jsonl"}}
    with refused("template.endless", about=str(tmp_path)):
        run_tokenizer(Config.model_validate(keys))
