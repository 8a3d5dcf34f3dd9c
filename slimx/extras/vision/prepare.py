"""Prompts with images: each image is prepared once, stored by its digest, and replaced by placeholder tokens.

A prompt has its images in `metadata.images`, and marks their places with `<image>` in the text of its messages."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, override

from slimx.config.schema import Config
from slimx.data.chat.tokens import PromptIds, encode_chat, templated
from slimx.data.records import Image, Prompt
from slimx.digest import fingerprint
from slimx.errors import SlimxError
from slimx.extras.vision import processing
from slimx.extras.vision.prompts.marks import with_parts
from slimx.extras.vision.prompts.pictures import undecodable
from slimx.extras.vision.sources import read_image
from slimx.extras.vision.store import Grid, ImageStore
from slimx.json_types import Json
from slimx.models.families import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Preparation:
    """Prepares the images of a run's prompts in a pool of processes."""

    def __init__(self, config: Config, spec: ModelSpec):
        """Prepares images for the model `spec` as section `trainer.vision` of `config` configures it. Processes start
        when the first image is prepared."""
        vision = config.trainer.vision
        assert vision is not None
        self._size = processing.limits(vision)
        self._model = config.model.path
        self._prompts = Path(config.rollout.prompts or ".").parent
        self._store = ImageStore(config.images)
        self._processes = vision.processes
        self._pool: ProcessPoolExecutor | None = None
        self._settings = json.dumps(self._size) + (Path(config.model.path) / "preprocessor_config.json").read_text()
        self.token: int = spec.hf["image_token_id"]
        """Id of the placeholder token of an image."""
        self._merged: int = spec.hf["vision_config"]["spatial_merge_size"] ** 2

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase) -> ImagePromptIds:
        """Returns the encoder of one group's prompt."""
        return ImagePromptIds(tokenizer, self)

    async def encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Json],
        tools: list[Json] | None,
        images: Sequence[object],
    ) -> tuple[list[int], list[Image]]:
        """Returns the token ids of `messages`, in which `<image>` stands for an image, and the images with their
        places. Raises SlimxError if these marks, `images` and the placeholders of the chat template do not correspond,
        and for an image that cannot be prepared."""
        ids = encode_chat(tokenizer, with_parts(messages, len(images)), tools)
        if ids.count(self.token) != len(images):
            raise SlimxError(
                f"the chat template renders {ids.count(self.token)} placeholders for {len(images)} images; use the "
                "chat template of the checkpoint",
                code="vision.template",
                about="chat template",
            )
        names = [f"image {index} of the prompt" for index in range(len(images))]
        prepared = await asyncio.gather(*(self._prepare(*pair) for pair in zip(images, names, strict=True)))
        return self._expanded(ids, prepared)

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
        data = await asyncio.to_thread(read_image, source, self._prompts, where, self._store)
        digest = fingerprint(self._settings.encode() + data)
        grid = await asyncio.to_thread(self._store.grid, digest)
        if grid is None:
            result = await asyncio.get_running_loop().run_in_executor(self._workers(), processing.prepare, data, digest)
            if isinstance(result, str):
                raise undecodable(where, result)
            grid = result
        return digest, grid

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
    """Encoder of one group's prompt, whose images it prepares once for all rollouts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, preparation: Preparation):
        super().__init__(tokenizer)
        self._preparation = preparation
        self._lock = asyncio.Lock()
        self._prepared: object = None
        """Messages, tools and images of the prompt that was prepared."""

    @override
    async def prepare(self, prompt: Prompt) -> None:
        sources = prompt.metadata.get("images")
        if not sources:
            return
        key = (prompt.messages, prompt.tools, prompt.template, sources)
        async with self._lock:
            if key != self._prepared:
                tokenizer = templated(self.tokenizer, prompt)
                encode = self._preparation.encode
                self._ids, self.images = await encode(tokenizer, prompt.messages or [], prompt.tools, sources)
                self._prepared = key

    @override
    def of(self, prompt: Prompt) -> list[int]:
        return list(self._ids) if self.images else super().of(prompt)
