"""The policy of examples/environments answers with the given texts, and its template has the turns of environments."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.environments.make import make
from slimx.config.load import load_config
from slimx.data.chat.tokens import encode_turn
from slimx.data.prompts.read import read_prompts

HERE = Path(__file__).parents[3] / "examples/environments"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("policy")
    make(out, ["Up", "Down"])
    return out


def test_demonstrations_end_with_a_given_answer(made):
    prompts = read_prompts(made / "demonstrations.jsonl")
    assert {prompt.answer for prompt in prompts} == {"Up", "Down"}
    assert {len(prompt.messages) for prompt in prompts} == {1, 3, 5}


def test_its_template_has_turns_of_the_system_and_of_tools(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == "<user>add <user>Add.<user>1+1=<assistant>"
    after = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
    said = [*after, *tokenizer.encode("2<end>", add_special_tokens=False)]
    inserted = encode_turn(tokenizer, "4", role="tool", after=said)
    assert tokenizer.decode(inserted) == "<user>4<assistant>"


@pytest.mark.parametrize("name", ["sft.yaml", "grpo.yaml"])
def test_its_configurations_are_valid(name):
    assert load_config(HERE / name, []).model.path == "runs/environments/data/model"
