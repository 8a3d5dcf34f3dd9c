"""Images in later turns, of environments and tools, and in the requests of agents: a scripted engine, no model."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import PIL.Image
import pytest

from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Image, Prompt, Trajectory
from slimx.digest import fingerprint
from slimx.environments.base import Begin, Step
from slimx.extras.agents import agent, multi_turn, tools
from slimx.extras.agents.hubs.openenv import Fields
from slimx.extras.agents.hubs.views import Words, state_digest
from slimx.extras.agents.proxy.server import ChatProxy
from slimx.extras.agents.toolbox import ToolResult
from slimx.extras.quickstart.make_vision_model import TOKENS, write_tokenizer
from slimx.extras.vision.images.sources import read_image
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.vision.prompts.prepare import ImagePromptIds, Preparation
from slimx.json_types import Json
from slimx.rollout.hooks import RolloutContext
from tests.extras.agents.proxy_stand import CALL, TOOLS, Script, bare, client_of
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import rollout_context

PLACEHOLDER = TOKENS["image_token_id"]
PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
COUNT = 4
"""Embeddings of each image."""


def png(pixels: np.ndarray = PIXELS) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def uri(pixels: np.ndarray = PIXELS) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


URIS = [uri(PIXELS + number) for number in range(4)]
STORE = ImageStore("unused")
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}])


class Unprepared(Preparation):
    """Places images without an image processor: each has four patches of embeddings."""

    def __init__(self) -> None:
        self.token = PLACEHOLDER
        self._merged = 4

    async def _prepare(self, source: object, where: str) -> tuple[str, tuple[int, int, int]]:
        return fingerprint(read_image(source, where, STORE)), (1, 4, COUNT)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


def context(engine: Script, tokenizer: Any, *, vision: bool = True, **fields: Any) -> RolloutContext:
    """Returns a rollout's context in a run with images."""
    if vision:
        fields["prompt_ids"] = ImagePromptIds(tokenizer, Unprepared())
    return rollout_context(engine, {"temperature": 1.0, "max_new_tokens": 100}, tokenizer=tokenizer, **fields)


def assert_placed(trajectory: Trajectory, sources: list[object]) -> None:
    """Asserts that the trajectory has `sources` in this order, each with its placeholders, and no other ones."""
    assert [image.digest for image in trajectory.images] == [
        fingerprint(read_image(source, "", STORE)) for source in sources
    ]
    places: list[int] = []
    for image in trajectory.images:
        assert image.stop - image.start == COUNT
        places += range(image.start, image.stop)
    assert np.flatnonzero(trajectory.token_ids == PLACEHOLDER).tolist() == places


async def test_a_turn_shows_images_in_every_form(tokenizer: Any) -> None:
    ctx = context(Script(), tokenizer)
    forms: list[Any] = [PIXELS, PIL.Image.fromarray(PIXELS), png(), uri(), PIXELS[:, :, 0], PIXELS[:, :, :1]]
    parts = [{"type": "text", "text": "So: "}, *({"type": "image", "image": form} for form in forms)]
    token_ids, images = await ctx.turn_with_images(parts, after=[3])
    assert [image.stop - image.start for image in images] == [COUNT] * len(forms)
    assert token_ids.count(PLACEHOLDER) == COUNT * len(forms)
    assert all(token_ids[image.start : image.stop] == [PLACEHOLDER] * COUNT for image in images)
    digests = [image.digest for image in images]
    assert digests[0] == digests[1] and digests[2] == digests[3] and digests[4] == digests[5] != digests[0]
    assert tokenizer.decode(token_ids).startswith("<user>So: <|vision_start|><|image_pad|>")


async def test_images_that_cannot_be_shown_are_refused(tokenizer: Any) -> None:
    part: Json = {"type": "image", "image": PIXELS}
    with refused("tokenizer.image"):
        await context(Script(), tokenizer, vision=False).turn_with_images([part], after=[3])
    ctx = context(Script(), tokenizer)
    for image in (PIXELS.astype(np.float64), 5):
        with refused("vision.source"):
            await ctx.turn_with_images([{"type": "image", "image": image}], after=[3])
    with refused("vision.template"):
        await ctx.turn_with_images([part, {"type": "text", "text": "<|image_pad|>"}], after=[3])


async def test_a_prompt_that_a_hook_changed_needs_preparation(tokenizer: Any) -> None:
    ctx = context(Script(), tokenizer)
    assert ctx.prompt_ids is not None
    first, second = (
        Prompt(id="p", messages=[{"role": "user", "content": text}], metadata={"images": [uri()]})
        for text in ("one<image>", "two<image>")
    )
    await ctx.prompt_ids.prepare(first)
    assert len(ctx.draft(first).images) == 1
    with refused("vision.unprepared", about="p"):
        ctx.draft(second)
    await ctx.prompt_ids.prepare(second)
    assert ctx.draft(second).images[0].start == ctx.draft(first).images[0].start
    assert ctx.draft(first).token_ids != ctx.draft(second).token_ids
    assert ctx.draft(PROMPT).images == [] and PLACEHOLDER not in ctx.draft(PROMPT).token_ids
    for text in ("<image><image>", None):
        messages = [{"role": "user" if text else "system", "content": text or "a"}]
        with refused("vision.marks"):
            await ctx.prompt_ids.prepare(Prompt(id="p", messages=messages, metadata={"images": [uri()]}))


class Painting:
    """Environment whose turns are images."""

    async def reset(self, prompt: Prompt, seed: int) -> Begin:
        return Begin(images=[URIS[0]])

    async def step(self, text: str) -> Step:
        return Step(text="Next", images=[URIS[1], PIXELS], role="tool")

    async def close(self) -> None: ...


async def test_environments_show_images(tokenizer: Any) -> None:
    engine = Script("a", "b")
    ctx = context(engine, tokenizer)
    found = await multi_turn.generate(ctx, PROMPT, environment=f"{__name__}.Painting", max_turns=2)
    assert_placed(found, [URIS[0], URIS[1], PIXELS])
    assert [len(images) for images in engine.images] == [1, 3] and engine.images[1] == tuple(found.images)


class Painter:
    """Toolbox whose tool paints."""

    async def open(self, prompt: Prompt, seed: int) -> list[Json]:
        return list(TOOLS)

    async def call(self, name: str, arguments: Json) -> ToolResult:
        return ToolResult(text="Done", images=[URIS[1], URIS[2]])

    async def judge(self, messages: Any) -> dict[str, float]:
        assert all(isinstance(message["content"], str) for message in messages)
        return {}

    async def close(self) -> None: ...


@pytest.mark.parametrize("vision", [True, False])
async def test_tools_show_images(tokenizer: Any, vision: bool) -> None:
    engine = Script(CALL, "b")
    ctx = context(engine, tokenizer, vision=vision)
    metadata = {"images": [URIS[0]]} if vision else {}
    prompt = Prompt(id="p", messages=PROMPT.messages, metadata=metadata)
    found = await tools.generate(ctx, prompt, toolbox=f"{__name__}.Painter")
    assert ctx.metrics["left_out"] == (0 if vision else 2)
    if vision:
        assert_placed(found, URIS[:3])
        assert [len(images) for images in engine.images] == [1, 3]
    else:
        assert engine.received[1][0].count(tools.UNSEEN) == 2 and engine.images == [(), ()]


async def served(engine: Script, tokenizer: Any, function: Any, prompt: Prompt = PROMPT) -> list[Trajectory]:
    """Returns the trajectories of an agent, `async def function(base_url, prompt)`."""
    bare.function = function
    proxy = ChatProxy(context=400, images=True)
    try:
        ctx = context(engine, tokenizer, proxy=proxy)
        return await agent.generate(ctx, prompt, agent="tests.extras.agents.proxy_stand.bare")
    finally:
        await proxy.stop()


def shown(source: str, text: str = "So?") -> list[Any]:
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": source}}]


async def test_conversations_of_agents_keep_images_in_their_places(tokenizer: Any) -> None:
    async def act(base_url: str, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": shown(URIS[0])}]
        async with client_of(base_url) as client:
            for content in (shown(URIS[1]), "Only text", shown(URIS[2])):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": content}]
            await client.chat.completions.create(model="m", messages=messages)
            # Another branch after the first answer, and one that differs by its first image only.
            other = [*messages[:2], {"role": "user", "content": shown(URIS[3])}]
            await client.chat.completions.create(model="m", messages=other)
            other = [{"role": "user", "content": shown(URIS[3])}, *messages[1:3]]
            await client.chat.completions.create(model="m", messages=other)

    engine = Script(*"abcdef")
    found = await served(engine, tokenizer, act)
    for trajectory, numbers in zip(found, [(0, 1, 2), (0, 3), (3, 1)], strict=True):
        assert_placed(trajectory, [URIS[number] for number in numbers])
    assert [len(images) for images in engine.images] == [1, 2, 2, 3, 2, 2]
    assert engine.images[3] == tuple(found[0].images) and engine.images[4] == tuple(found[1].images)


async def test_agents_show_images_by_every_api(tokenizer: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": URIS[1].partition(",")[2]}
    image = {"type": "image", "source": source}

    async def act(base_url: str, prompt: Prompt) -> None:
        async with client_of(base_url) as client:
            output = [{"type": "input_image", "image_url": URIS[1]}, {"type": "input_text", "text": "seen"}]
            call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
            user = {"role": "user", "content": [{"type": "input_image", "image_url": URIS[0]}]}
            result = {"type": "function_call_output", "call_id": "c", "output": output}
            items: Any = [user, call, result]
            await client.responses.create(model="m", input=items)
        async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="x") as other:
            use = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
            answer = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
            messages: Any = [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": [use]},
                {
                    "role": "user",
                    "content": [answer, {"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}],
                },
            ]
            await other.messages.create(model="m", max_tokens=9, messages=messages)

    engine = Script("a", "b")
    first, second = await served(engine, tokenizer, act)
    assert_placed(first, URIS[:2])
    assert_placed(second, [URIS[1], URIS[1]])
    text = tokenizer.decode(second.token_ids[: second.images[1].start].tolist())
    assert text.endswith("<user>a<|vision_start|>")


async def test_agents_may_refer_to_the_images_of_the_prompt_and_to_no_other(tokenizer: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    for path in paths:
        Path(path).write_bytes(png())

    async def act(base_url: str, prompt: Prompt) -> None:
        async with client_of(base_url) as client:
            for source in (paths[1], "stored:00", ""):
                with pytest.raises(openai.BadRequestError) as caught:
                    messages: Any = [{"role": "user", "content": shown(source)}]
                    await client.chat.completions.create(model="m", messages=messages)
                assert caught.value.code == "unsupported_value"
            (path,) = prompt.metadata["images"]
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": shown(path)}])

    (found,) = await served(Script("a"), tokenizer, act, replace(PROMPT, metadata={"images": paths[:1]}))
    assert_placed(found, [paths[0]])


async def test_images_that_agents_may_not_show_are_refused(tokenizer: Any) -> None:
    refusals = [
        ("user", shown("http://a/b.png"), "unsupported_value", "messages[0].content"),
        ("user", shown("/etc/passwd"), "unsupported_value", "messages[0].content"),
        ("user", [{"type": "image_url"}], "unsupported_value", "messages[0].content"),
        ("user", [*shown(URIS[0]), {"type": "input_audio"}], "unsupported_value", "messages[0].content"),
        (
            "user",
            [{"type": "image", "source": {"type": "url", "url": "https://a"}}],
            "unsupported_value",
            "messages[0]",
        ),
        ("system", shown(URIS[0]), "unsupported_value", "messages[0].content"),
        ("user", shown("data:image/png;base64,?"), "invalid_value", "messages"),
        ("user", shown(URIS[0], "<|image_pad|>"), "invalid_value", "messages"),
    ]

    async def act(base_url: str, prompt: Prompt) -> None:
        async with client_of(base_url) as client:
            for role, content, code, param in refusals:
                messages: Any = [{"role": role, "content": content}, *PROMPT.messages]
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(model="m", messages=messages)
                assert caught.value.code == code and str(caught.value.param).startswith(param), content
            await client.chat.completions.create(model="m", messages=PROMPT.messages)

    (found,) = await served(Script("a"), tokenizer, act)
    assert found.images == []


class World:
    render_mode = "rgb_array"

    def render(self) -> np.ndarray:
        return PIXELS + 1


def test_views_show_observations_and_renderings_as_images() -> None:
    assert Words(World()).images(PIXELS, {}) == []
    for image, expected in (("observation", PIXELS), ("render", PIXELS + 1)):
        view = Words(World(), image=image, ask="Where?")
        (found,) = view.images(PIXELS, {})
        assert np.array_equal(found, expected) and view.show(PIXELS, {}) == "Where?"
    with refused("environment.image"):
        Words(World(), image="video")
    assert state_digest(PIL.Image.fromarray(PIXELS)) == state_digest(PIXELS) != state_digest(PIXELS + 1)


def test_an_observation_of_openenv_may_contain_an_image() -> None:
    view = Fields(None, image="screenshot")
    observation = {"screenshot": URIS[0].partition(",")[2], "step": 3}
    assert view.show(observation, {}) == '{"step": 3}'
    for source in (view.images(observation, {}), view.images({"screenshot": URIS[0]}, {})):
        assert read_image(source[0], "", STORE) == png()
    assert view.images({}, {}) == [] == Fields(None).images(observation, {})


def test_images_move_with_the_turn_that_shows_them(tokenizer: Any) -> None:
    draft = context(Script(), tokenizer).draft([1, 2, 3])
    draft.add_inserted([4, PLACEHOLDER], images=[Image(start=1, stop=2, grid=(1, 2, 2), digest="d")])
    assert draft.images == [Image(start=4, stop=5, grid=(1, 2, 2), digest="d")]
