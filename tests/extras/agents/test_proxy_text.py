"""From tokens to an agent's text and back: pieces of a stream, tool calls, and programs as agents."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from slimx.errors import SlimxError
from slimx.extras.agents import agent, agent_process
from slimx.extras.agents.agent_process import ALLOWED, run_command
from slimx.extras.agents.proxy.answer import AnswerReader, Pieces
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.proxy.tool_calls import ToolCall, find_parser, hermes
from slimx.rollout.hooks import GivenUp
from tests.extras.agents.proxy_stand import PROMPT, Script, context, tokenizer
from tests.refusals import refused


def bytewise() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are single bytes: a character may need several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("text", ["plain", "süß 東京 🙂!", "a\n b  c", ""])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_pieces_add_up_to_the_whole_text_and_never_take_anything_back(text, step):
    byte_tokenizer = bytewise()
    reading, ids = AnswerReader(byte_tokenizer, find_parser("hermes", "")), byte_tokenizer(text).input_ids
    pieces = Pieces(reading, ["###"])
    shown = [pieces.add(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(shown) + pieces.end() == text == pieces.shown == reading.text(ids, ["###"])
    assert not any("\ufffd" in piece for piece in shown), "half a character is not shown"


def test_incomplete_characters_are_replaced_at_the_end():
    byte_tokenizer = bytewise()
    ids = byte_tokenizer("aé").input_ids[:2]
    pieces = Pieces(AnswerReader(byte_tokenizer, find_parser("hermes", "")), [])
    assert pieces.add(ids) == "" and pieces.end() == "a\ufffd"


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_stop_string_and_what_may_begin_one_are_never_shown(step):
    text = "ab ## c ### no"
    reading, ids = (
        AnswerReader(tokenizer(), find_parser("hermes", "")),
        tokenizer()(text, add_special_tokens=False).input_ids,
    )
    pieces = Pieces(reading, ["###", "zz"])
    shown = "".join(pieces.add(ids[start : start + step]) for start in range(0, len(ids), step))
    assert shown == "ab ## c " and pieces.end() == "" and reading.text(ids, ["###"]) == "ab ## c "
    unfinished = Pieces(reading, ["###"])
    assert unfinished.add(ids[:5]) == "ab " and unfinished.end() == "##", "it began and did not come"


def test_calls_in_the_format_of_hermes():
    one = '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'
    two = '<tool_call>{"name": "g"}</tool_call>'
    assert hermes(f"First.\n{one}\n{two}") == ("First.", [ToolCall("f", '{"x": "ü"}'), ToolCall("g", "{}")])
    for text in (
        "none",
        "<tool_call>{",
        '<tool_call>{"name": 3}</tool_call>',
        f"{one}<tool_call>[]</tool_call>",
        f"{one}<tool_call>{{",
    ):
        assert hermes(text) == (text, [])


# Programs -------------------------------------------------------------------------------------------------------------


async def test_a_program_gets_the_prompt_without_its_answer():
    code = "import os, sys; print(sys.stdin.read(), os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'])"
    out = await run_command([sys.executable, "-c", code], "http://base/v1", PROMPT)
    prompt, url, _ = out.rsplit(" ", 2)
    assert json.loads(prompt) == {"id": "p", "messages": PROMPT.messages, "metadata": {}}
    assert url == "http://base/v1"


async def test_a_program_sees_the_metadata_that_is_named_and_no_solution():
    prompt = replace(PROMPT, metadata={"level": 3, "tests": ["f(2) == 4"], "solution": "x"})
    out = await run_command(["cat"], "http://base/v1", prompt, metadata=["level", "absent"])
    assert json.loads(out)["metadata"] == {"level": 3}


async def test_a_program_that_writes_without_end_is_killed_without_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(agent_process, "MAX_WRITTEN", 1 << 20)
    for script in ("yes", "yes >&2"):
        with refused("agent.output"):
            await asyncio.wait_for(run_command(["bash", "-c", script], "http://base/v1", PROMPT), 600)
    assert not list(tmp_path.iterdir())


async def test_a_program_that_ignores_the_end_of_its_rollout_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(agent_process, "MAX_WRITTEN", 1 << 20)
    monkeypatch.setattr(agent_process, "GRACE_S", 0.05)
    monkeypatch.setattr(agent_process, "guarded_argv", list)  # the guard would leave at SIGTERM
    with refused("agent.output"):
        await asyncio.wait_for(run_command(["bash", "-c", "trap '' TERM; exec yes"], "http://base/v1", PROMPT), 600)


async def test_a_program_sees_only_the_allowed_environment_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "GIVEN"):
        monkeypatch.setenv(name, "secret")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    found = json.loads(await run_command([sys.executable, "-c", code], "http://base/v1", PROMPT, ["GIVEN", "ABSENT"]))
    endpoints = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}
    assert found["ANTHROPIC_BASE_URL"] == "http://base", "its clients write the /v1 themselves"
    assert found.keys() <= {*ALLOWED, "GIVEN", "no_proxy", "NO_PROXY", *endpoints} and found["GIVEN"] == "secret"
    assert found["PATH"] == os.environ["PATH"] and list(found.values()).count("secret") == 1


def test_variables_for_programs_are_named_and_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIVEN", "x")
    monkeypatch.delenv("ABSENT", raising=False)
    agent.check(command=[sys.executable], environment=["GIVEN"])
    for environment, about in ((["GIVEN", "ABSENT"], "ABSENT"), ("GIVEN", "rollout.options.environment")):
        with pytest.raises(SlimxError) as error:
            agent.check(command=[sys.executable], environment=environment)
        assert (error.value.code, error.value.about) == ("agent.environment", about)
    with refused("agent.metadata"):
        agent.check(command=[sys.executable], metadata="level")


async def test_a_program_that_fails_says_why():
    with refused("agent.status"):
        code = "import sys; sys.stderr.write('x' * 50_000 + 'the last words'); sys.exit(7)"
        await run_command([sys.executable, "-c", code], "http://base/v1", PROMPT)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ends", ["by itself", "at the deadline"])
async def test_a_program_ends_with_its_rollout_and_so_does_what_it_started(tmp_path, ends):
    """The shell leaves a child behind, which ignores SIGTERM, and a daemon in a session of its own."""
    pids = tmp_path / "pids"
    wait = "true" if ends == "by itself" else "wait"
    daemon = f"setsid -f bash -c 'echo $$ > {pids}.daemon; exec sleep 300'; while [ ! -s {pids}.daemon ]; do :; done"
    script = f"trap '' TERM; (trap '' TERM; sleep 300) & {daemon}; echo $! $$ $(<{pids}.daemon) > {pids}; {wait}"
    began = time.monotonic()
    running = asyncio.create_task(run_command(["bash", "-c", script], "http://base/v1", PROMPT))
    while not (pids.exists() and pids.read_text().endswith("\n")):
        await asyncio.sleep(0.01)
    if ends != "by itself":
        running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert time.monotonic() - began < 290, "before the child would have ended by itself"
    for pid in map(int, pids.read_text().split()):
        deadline = began + 290
        while alive(pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not alive(pid), pid


async def test_a_program_that_requests_no_completion_fails_its_rollout():
    proxy = ChatProxy(context=100)
    try:
        with refused("hooks.given_up", about="agent without answers", kind=GivenUp) as caught:
            await agent.generate(context(Script(), proxy), PROMPT, command=["true"])
        assert caught.value.reason == "agent without answers" and "command true" in str(caught.value)
    finally:
        await proxy.stop()
    assert "OPENAI_BASE_URL" not in os.environ
