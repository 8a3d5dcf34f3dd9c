"""Prompts are read or refused by file and line; their stream is shuffled, endless and resumable; tokens are checked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slimx.data.chat.tokens import PromptIds, check_prompts, encode_prompt, load_tokenizer
from slimx.data.prompts.read import DataSource, PromptSource, read_prompts
from slimx.data.records import Prompt
from tests.refusals import refused

TURN = {"role": "user", "content": "1+1="}


def write(path: Path, *lines: object) -> Path:
    """Writes a JSONL file; strings go in as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_bytes("".join(text + "\n" for text in texts).encode())
    return path


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"p{index}", token_ids=[index]) for index in range(count)]


def take(source: DataSource, count: int) -> list[str]:
    return [source.next().id for _ in range(count)]


def test_a_file_is_read_in_order_with_every_field(tmp_path):
    full = {"id": "a", "messages": [TURN], "answer": "2", "metadata": {"level": 1.5, "tags": ["é\u2028"]}}
    path = write(tmp_path / "sums.jsonl", full, {"token_ids": [4, 5]}, "  ", {"messages": [TURN, TURN]})
    assert read_prompts(path) == [
        Prompt(id="a", messages=[TURN], answer="2", metadata={"level": 1.5, "tags": ["é\u2028"]}),
        Prompt(id="sums:2", token_ids=[4, 5]),
        Prompt(id="sums:4", messages=[TURN, TURN]),
    ]


@pytest.mark.parametrize(
    ("line", "code", "named"),
    [
        ('{"messages": [', "prompts.line", "JSON"),
        ("[1, 2]", "prompts.line", "a list"),
        ('"text"', "prompts.line", "a string"),
        ({"answer": "2"}, "prompts.neither", ""),
        ({"messages": [TURN], "token_ids": [1]}, "prompts.both", ""),
        ({"messages": None, "token_ids": None}, "prompts.neither", ""),
        ({"messages": []}, "prompts.empty_list", ""),
        ({"token_ids": []}, "prompts.empty_list", ""),
        ({"messages": "1+1="}, "prompts.type", "messages"),
        ({"messages": ["1+1="]}, "prompts.type", "messages[0]"),
        ({"messages": [TURN, {"content": "x"}]}, "prompts.message", "messages[1]"),
        ({"messages": [{"role": "user"}]}, "prompts.message", "messages[0]"),
        ({"messages": [{"role": 1, "content": "x"}]}, "prompts.message", "messages[0]"),
        ({"token_ids": [1, 2.5]}, "prompts.type", "token_ids[1]"),
        ({"token_ids": [True]}, "prompts.type", "token_ids[0]"),
        ({"messages": [TURN], "answer": True}, "prompts.type", "answer"),
        ({"messages": [TURN], "answer": [2]}, "prompts.type", "answer"),
        ({"messages": [TURN], "id": 7}, "prompts.type", "id"),
        ({"messages": [TURN], "id": None}, None, ""),
        ({"messages": [TURN], "metadata": [1]}, "prompts.type", "metadata"),
        ({"messages": [TURN], "anwser": "2"}, "prompts.key", "'anwser'"),
        ({"messages": [TURN], "id": "first"}, "prompts.id", "line 1"),
        ({"messages": [TURN], "id": "bad:1"}, None, ""),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path, line, code, named):
    path = write(tmp_path / "bad.jsonl", {"id": "first", "messages": [TURN]}, "", line)
    if code is None:  # the control: a good third line is no error
        assert len(read_prompts(path)) == 2
        return
    subjects = {"prompts.key": "anwser", "prompts.id": "first"}
    with refused(code, about=subjects.get(code, f"{path}, line 3")) as caught:
        read_prompts(path)
    assert f"{path}, line 3" in str(caught.value) and named in str(caught.value)


def test_an_id_equal_to_a_default_id_is_refused(tmp_path):
    path = write(tmp_path / "bad.jsonl", {"token_ids": [1], "id": "bad:2"}, {"token_ids": [2]})
    with refused("prompts.id", about="bad:2"):
        read_prompts(path)


def test_an_empty_missing_or_binary_file_is_named(tmp_path):
    for content in (b"", b"\n \n"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with refused("prompts.empty", about=str(tmp_path / "empty.jsonl")):
            read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "directory").mkdir()
    for path in (tmp_path / "absent.jsonl", tmp_path / "directory"):
        with refused("prompts.unreadable", about=str(path)):
            read_prompts(path)
    (tmp_path / "binary.jsonl").write_bytes(b'{"messages": [{"role": "\xff"}]}\n')
    with refused("prompts.line"):
        read_prompts(tmp_path / "binary.jsonl")


def test_every_epoch_contains_every_prompt_once_in_another_order():
    source = PromptSource(some_prompts(50), seed=1)
    epochs = [take(source, 50) for _ in range(4)]
    assert all(sorted(epoch) == sorted(f"p{index}" for index in range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != [f"p{index}" for index in range(50)]
    assert take(PromptSource(some_prompts(50), seed=2), 50) != epochs[0]


def test_the_order_of_a_seed_is_the_same_in_every_release():
    expected = "p2 p4 p7 p5 p0 p6 p3 p1 p5 p6 p3 p0 p7 p2 p1 p4"
    assert take(PromptSource(some_prompts(8), seed=1), 16) == expected.split()


def test_a_restored_source_continues_as_the_uninterrupted_one():
    rng = np.random.default_rng(0)
    for _ in range(60):
        count, seed = int(rng.integers(1, 9)), int(rng.integers(0, 5))
        served, more = int(rng.integers(0, 30)), int(rng.integers(1, 30))
        source = PromptSource(some_prompts(count), seed)
        take(source, served)
        state = json.loads(json.dumps(source.state()))  # checkpoints keep it as JSON
        restored = PromptSource(some_prompts(count), seed)
        take(restored, int(rng.integers(0, 20)))
        restored.restore(state)
        assert restored.state() == state
        assert take(restored, more) == take(source, more)


def test_a_state_does_not_move_with_its_source():
    source = PromptSource(some_prompts(3), seed=1)
    state = source.state()
    take(source, 5)
    assert (state["epoch"], state["position"], state["count"]) == (0, 0, 3)
    assert (source.state()["epoch"], source.state()["position"]) == (1, 2)


@pytest.mark.parametrize(
    ("prompts", "seed", "changed"),
    [
        (some_prompts(6), 1, "count"),
        (some_prompts(5)[::-1], 1, "ids"),
        ([*some_prompts(4), Prompt(id="new", token_ids=[4])], 1, "ids"),
        ([*some_prompts(4), Prompt(id="p4", token_ids=[9])], 1, "contents"),
        (some_prompts(5), 2, "seed"),
        (some_prompts(6), 2, "seed"),
    ],
)
def test_a_source_whose_prompts_changed_refuses_the_saved_cursor(prompts, seed, changed):
    state = PromptSource(some_prompts(5), 1).state()
    source = PromptSource(prompts, seed)
    before = take(source, 2), source.state()
    with refused("prompts.changed", about=changed):
        source.restore(state)
    assert source.state() == before[1]


def test_a_state_of_something_else_is_refused():
    source = PromptSource(some_prompts(5), 1)
    with refused("prompts.state", about="epoch"):
        source.restore({"count": 5})
    for wrong in ({"position": 6}, {"position": -1}, {"epoch": -1}, {"position": "2"}, {"epoch": None}):
        with refused("prompts.state", about="position"):
            source.restore(source.state() | wrong)
    with refused("prompts.empty"):
        PromptSource([], 1)


class FakeTokenizer:
    """Tokens are code points; behaves as transformers 5 does unless a list is requested."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False, return_dict=True, tokenize=True):
        text = "".join(message["content"] for message in messages) + "\x01" * add_generation_prompt
        if "!" in messages[0]["content"]:
            raise Exception("no\nsuch role")
        if not tokenize:
            return text
        ids = self(text).input_ids
        return SimpleNamespace(input_ids=ids) if return_dict else ids

    def __call__(self, text, *, add_special_tokens=False):
        if not isinstance(text, str):
            raise Exception("one text, please")
        return SimpleNamespace(input_ids=[ord(character) for character in text])


def prompt_of(content: str) -> Prompt:
    return Prompt(id=content, messages=[{"role": "user", "content": content}])


def test_a_prompt_is_encoded_up_to_the_reply_or_kept_as_it_is():
    assert encode_prompt(FakeTokenizer(), prompt_of("ab")) == [97, 98, 1]
    prompt = Prompt(id="p", token_ids=[5, 6])
    ids = encode_prompt(FakeTokenizer(), prompt)
    ids.append(7)
    assert prompt.token_ids == [5, 6]


def test_a_group_renders_its_prompt_once_unless_a_hook_changes_it():
    rendered: list[str] = []

    class Counting(FakeTokenizer):
        def apply_chat_template(self, messages, **options):
            rendered.append(messages[0]["content"])
            return super().apply_chat_template(messages, **options)

    ids, prompt = PromptIds(Counting()), prompt_of("ab")
    ids.of(prompt).append(7)
    assert ids.of(prompt) == [97, 98, 1] and rendered == ["ab"]
    prompt.messages[0]["content"] = "c"
    assert ids.of(prompt) == [99, 1] and ids.of(prompt_of("ab")) == [97, 98, 1]
    assert rendered == ["ab", "c", "ab"]
    assert ids.of(Prompt(id="p", token_ids=[5])) == [5]


def test_a_prompt_that_the_tokenizer_refuses_is_named():
    with refused("prompts.template", about="a!"):
        encode_prompt(FakeTokenizer(), prompt_of("a!"))
    with refused("prompts.template", about="a!"):
        check_prompts(FakeTokenizer(), [prompt_of("a!")], "train.jsonl", 9, 128)


class OfSeveral(FakeTokenizer):
    """Takes several texts in one call, as transformers' tokenizers do."""

    def __call__(self, text, **options):
        if isinstance(text, list):
            return SimpleNamespace(input_ids=[self(x, **options).input_ids for x in text])
        return super().__call__(text, **options)


@pytest.mark.parametrize("tokenizer", [FakeTokenizer(), OfSeveral()])
def test_the_first_invalid_prompt_is_named(tokenizer):
    def check(*prompts: Prompt) -> None:
        check_prompts(tokenizer, prompts, "train.jsonl", max_prompt_tokens=4, vocab_size=128)

    check(prompt_of("abc"), Prompt(id="ids", token_ids=[0, 127]))
    with refused("prompts.length", about="abcd"):
        check(prompt_of("abc"), Prompt(id="ids", token_ids=[0]), prompt_of("abcd"), prompt_of("abcdefg"))
    with refused("prompts.length", about="abcd"):
        check(prompt_of("abc"), prompt_of("abcd"), prompt_of("a!"))
    for wrong in (128, -1):
        with refused("prompts.token_id", about="ids"):
            check(Prompt(id="ids", token_ids=[1, wrong]))


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with refused("tokenizer.missing", about=str(tmp_path / "absent")):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with refused("tokenizer.missing", about=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused("tokenizer.broken", about=str(tmp_path)):
        load_tokenizer(tmp_path)
