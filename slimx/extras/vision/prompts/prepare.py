"""Prompts and turns with images: each image is prepared once, stored by its digest, and replaced by placeholder tokens.

A prompt has its images in `metadata.images`, and marks their places with `<image>` in the text of its messages."""

from __future__ import annotations

import asyncio
import copy
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, override

from slimx.config.schema import Config
from slimx.data.chat.tokens import PromptIds, encode_chat, encode_turns, templated
from slimx.data.records import Image, Prompt
from slimx.digest import fingerprint
from slimx.errors import SlimxError
from slimx.extras.vision.images import processing
from slimx.extras.vision.images.pictures import undecodable
from slimx.extras.vision.images.sources import read_image
from slimx.extras.vision.images.store import Grid, ImageStore
from slimx.extras.vision.prompts.marks import check_placeholders, merged_patches, placeholder_token, with_parts
from slimx.json_types import Json
from slimx.models.families import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Preparation:
    """Prepares the images of a run in a pool of processes."""

    def __init__(self, config: Config, spec: ModelSpec):
        """Prepares images for the model `spec` as section `trainer.vision` of `config` configures it. Processes start
        when the first image is prepared."""
        vision = config.trainer.vision
        assert vision is not None
        self._size = processing.limits(vision)
        self._model = config.model.path
        self._store = ImageStore(config.images)
        self._processes = vision.processes
        self._pool: ProcessPoolExecutor | None = None
        self._running: dict[str, Future[Grid | str]] = {}
        """Images that are being prepared, by digest. Rollouts of a group often show the same image at the same time,
        and two processes must not write the same file."""
        self._settings = json.dumps(self._size) + (Path(config.model.path) / "preprocessor_config.json").read_text()
        token = placeholder_token(spec.hf)
        assert token is not None
        self.token = token
        """Id of the placeholder token of an image."""
        self._merged = merged_patches(spec.hf)

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase) -> ImagePromptIds:
        """Returns the encoder of one group's prompt."""
        return ImagePromptIds(tokenizer, self)

    async def expand(self, token_ids: Sequence[int], sources: Sequence[object]) -> tuple[list[int], list[Image]]:
        """Returns `token_ids`, which have one placeholder for each image of `sources`, with a placeholder for each
        embedding, and the images with their places. Raises SlimxError if there are more or fewer placeholders than
        images, and for an image that cannot be prepared."""
        check_placeholders(list(token_ids).count(self.token), len(sources))
        names = [f"image {index}" for index in range(len(sources))]
        prepared = await asyncio.gather(*(self._prepare(*pair) for pair in zip(sources, names, strict=True)))
        return self._expanded(token_ids, prepared)

    def _expanded(self, ids: Sequence[int], prepared: Sequence[tuple[str, Grid]]) -> tuple[list[int], list[Image]]:
        out: list[int] = []
        images: list[Image] = []
        remaining = iter(prepared)
        for token in ids:
            if token != self.token:
                out.append(token)
                continue
            digest, grid = next(remaining)
            start = len(out)
            out += [token] * (prod(grid) // self._merged)
            images.append(Image(start=start, stop=len(out), grid=grid, digest=digest))
        return out, images

    async def _prepare(self, source: object, where: str) -> tuple[str, Grid]:
        """Returns digest and grid of an image after storing its pixels."""
        data = await asyncio.to_thread(read_image, source, where, self._store)
        digest = fingerprint(self._settings.encode() + data)
        grid = await asyncio.to_thread(self._store.grid, digest)
        if grid is None:
            # Shielded, because a rollout that is cancelled must not cancel the work that others wait for.
            result = await asyncio.shield(asyncio.wrap_future(self._work(data, digest)))
            if isinstance(result, str):
                raise undecodable(where, result)
            grid = result
        return digest, grid

    def _work(self, data: bytes, digest: str) -> Future[Grid | str]:
        """Returns the work of preparing an image, which is started unless it is in progress."""
        work = self._running.get(digest)
        if work is None:
            work = self._workers().submit(processing.prepare, data, digest)
            self._running[digest] = work
            work.add_done_callback(lambda _: self._running.pop(digest, None))
        return work

    def _workers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                multiprocessing.get_context("spawn"),
                processing.begin,
                (os.getpid(), self._model, str(self._store.directory), self._size),
            )
        return self._pool

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class ImagePromptIds(PromptIds):
    """Encoder of one group's prompt and of the later turns of its rollouts. It prepares the prompt's images once for
    all rollouts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, preparation: Preparation):
        super().__init__(tokenizer)
        self.preparation = preparation
        self._lock = asyncio.Lock()
        self._prepared: list[tuple[object, list[int], list[Image]]] = []
        """Prompts that were prepared, each with its token ids and images."""

    @override
    async def prepare(self, prompt: Prompt) -> None:
        sources = prompt.metadata.get("images")
        if not sources:
            return
        async with self._lock:
            if self._find(prompt) is None:
                messages = with_parts(prompt.messages or [], len(sources))
                ids = encode_chat(templated(self.tokenizer, prompt), messages, prompt.tools)
                token_ids, images = await self.preparation.expand(ids, sources)
                # Copies, because hooks may change the prompt's own objects.
                self._prepared.append((copy.deepcopy(_key(prompt)), token_ids, images))

    @override
    def of(self, prompt: Prompt) -> list[int]:
        self.images = []
        if not prompt.metadata.get("images"):
            return super().of(prompt)
        found = self._find(prompt)
        if found is None:
            raise SlimxError(
                f"the images of prompt {prompt.id!r} are not prepared for these messages and tools; call `await "
                "ctx.prompt_ids.prepare(prompt)` with the changed prompt before ctx.draft(prompt)",
                code="vision.unprepared",
                about=prompt.id,
            )
        token_ids, self.images = found
        return list(token_ids)

    @override
    async def turn(self, content: Sequence[Json], role: str, after: Sequence[int]) -> tuple[list[int], list[Image]]:
        return await self.turns([{"role": role, "content": list(content)}], after=after)

    async def turns(
        self,
        messages: Sequence[Json],
        *,
        after: Sequence[int],
        tools: list[Json] | None = None,
        calls: Sequence[Json] = (),
    ) -> tuple[list[int], list[Image]]:
        """Returns the token ids of `encode_turns`, and the images in them: an image is a part {"type": "image",
        "image": IMAGE} of a message's content."""
        bare, sources = without_sources(messages)
        ids = encode_turns(self.tokenizer, bare, after=after, tools=tools, calls=calls)
        return await self.expand(ids, sources)

    async def expand(self, token_ids: list[int], sources: Sequence[object]) -> tuple[list[int], list[Image]]:
        """Returns the ids and images of `Preparation.expand`. Without `sources`, the ids are unchanged: placeholders in
        them are text, like those that the model samples."""
        if not sources:
            return token_ids, []
        return await self.preparation.expand(token_ids, sources)

    def _find(self, prompt: Prompt) -> tuple[list[int], list[Image]] | None:
        key = _key(prompt)
        return next(((ids, images) for known, ids, images in self._prepared if known == key), None)


def _key(prompt: Prompt) -> object:
    return prompt.messages, prompt.tools, prompt.template, prompt.metadata["images"]


def without_sources(messages: Sequence[Json]) -> tuple[list[Json], list[object]]:
    """Returns `messages` as chat templates render them, and the images that were the values of `image` in their parts
    of type image, in the order of the parts."""
    bare: list[Json] = []
    sources: list[object] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            sources += [part["image"] for part in content if part["type"] == "image"]
            content = [{"type": "image"} if part["type"] == "image" else part for part in content]
            message = {**message, "content": content}
        bare.append(message)
    return bare, sources
