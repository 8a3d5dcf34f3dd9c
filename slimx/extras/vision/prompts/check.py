"""Checks of prompts with images before a run starts: each image exists and can be decoded, and the prompt's tokens,
among them those of its images, are within the limit."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.config.schema import Config
from slimx.data.chat.tokens import check_prompts, encode_prompt
from slimx.data.records import Prompt
from slimx.errors import SlimxError, one_line
from slimx.extras.vision.images.pictures import size_of
from slimx.extras.vision.images.processing import limits, load_processor
from slimx.extras.vision.images.sources import check_file
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.vision.prompts.marks import MARK, check_placeholders, placeholder_token, with_parts
from slimx.extras.vision.prompts.rows import RowImages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARES = {"smallest": 0.0, "median": 0.5, "90%": 0.9, "largest": 1.0}
"""Shares of the values up to which a distribution is described, by their names."""
_THREADS = 16
"""Number of image files whose headers are read at the same time; file systems of clusters answer slowly."""


class ModelImages:
    """Checks prompts with images for one model."""

    def __init__(self, model: str, rows: RowImages, size: dict[str, int] | None = None):
        """Checks prompts for the model in the directory `model`. `rows`: the images of the prompts' rows; `size`:
        limits on numbers of pixels that differ from the processor's."""
        self._model = model
        self._rows = rows
        self._size = size or {}
        self._counts: dict[tuple[int, int], int] = {}
        """Numbers of tokens by width and height."""
        token = _placeholder(Path(model))
        assert token is not None
        self._token = token

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self._model, self._size)

    def check(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        path: str,
        max_prompt_tokens: int,
        vocab_size: int,
    ) -> None:
        """Raises the errors of `slimx.data.chat.tokens.check_prompts` for the prompts of file `path`, for images that
        are missing or cannot be decoded, and for a prompt whose marks do not correspond to its images."""
        self.read_sizes(prompts, path)
        plain = [_without_marks(prompt) if _images(prompt) else prompt for prompt in prompts]
        check_prompts(tokenizer, plain, path, max_prompt_tokens, vocab_size)
        for prompt in prompts:
            ids = self.token_ids(tokenizer, prompt, path)
            if ids is not None:
                encoded = replace(prompt, messages=None, token_ids=ids)
                check_prompts(tokenizer, [encoded], path, max_prompt_tokens, vocab_size)

    def read_sizes(self, prompts: Sequence[Prompt], path: str) -> None:
        """Reads the headers of all image files of the prompts of file `path`. Raises SlimxError naming the prompt and
        the image if slimx does not decode a file."""
        first: dict[str, str] = {}
        for prompt in prompts:
            for index, image in enumerate(_images(prompt)):
                if image not in self._rows.sizes:
                    first.setdefault(image, f"{path}: image {index} of prompt {prompt.id!r}")
        with ThreadPoolExecutor(_THREADS) as pool:
            for image, size in zip(first, pool.map(_size, first, first.values()), strict=True):
                self._rows.sizes[image] = size

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, path: str) -> list[int] | None:
        """Returns the token ids of a prompt of file `path` with a placeholder for each embedding of an image; None for
        a prompt of text. `read_sizes` must have been called. Raises SlimxError if marks, images and placeholders do not
        correspond, and for an image of a shape that the processor refuses."""
        try:
            return self._token_ids(tokenizer, prompt)
        except SlimxError as error:
            raise SlimxError(f"{path}: prompt {prompt.id!r}: {error}", code=error.code, about=prompt.id) from error

    def _token_ids(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int] | None:
        images = _images(prompt)
        self._refuse_placeholders(tokenizer, prompt)
        if not images:
            return None
        if prompt.token_ids is not None:
            raise SlimxError(
                "it has images and token_ids, but images need messages; replace token_ids by messages",
                code="vision.token_ids",
            )
        ids = encode_prompt(tokenizer, with_image_parts(prompt))
        check_placeholders(ids.count(self._token), len(images))
        out: list[int] = []
        remaining = iter(enumerate(images))
        for token in ids:
            count = self._tokens(*next(remaining)) if token == self._token else 1
            out += [token] * count
        return out

    def rendered(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, path: str) -> str | None:
        """Returns the text of `token_ids`, in which the number of an image's placeholders follows the first; None for a
        prompt of text. Reads the sizes of the prompt's images."""
        self.read_sizes([prompt], path)
        ids = self.token_ids(tokenizer, prompt, path)
        if ids is None:
            return None
        placeholder = str(tokenizer.convert_ids_to_tokens(self._token))
        text = str(tokenizer.decode(ids, skip_special_tokens=False))
        runs = re.compile(f"({re.escape(placeholder)})+")
        return runs.sub(lambda run: f"{placeholder} x {run[0].count(placeholder)}", text)

    def size_of(self, image: str) -> tuple[int, int]:
        """Returns width and height in pixels of an image, an entry of `metadata.images`."""
        return self._rows.sizes[image]

    def tokens_of(self, image: str) -> int:
        """Returns the number of tokens of an image, an entry of `metadata.images`. Raises ValueError if the processor
        refuses its shape."""
        size = self._rows.sizes[image]
        if size not in self._counts:
            wide, high = size
            patches = self._processor.get_number_of_image_patches(high, wide)
            self._counts[size] = patches // self._processor.merge_size**2
        return self._counts[size]

    def _tokens(self, index: int, image: str) -> int:
        try:
            return self.tokens_of(image)
        except ValueError as error:
            wide, high = self._rows.sizes[image]
            raise SlimxError(
                f"the model's processor refuses image {index} of {wide} x {high} pixels ({one_line(error)}); crop the "
                "image",
                code="vision.shape",
            ) from error

    def _refuse_placeholders(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
        text = str(tokenizer.convert_ids_to_tokens(self._token))
        found = any(text in str(message.get("content")) for message in prompt.messages or ())
        if found or self._token in (prompt.token_ids or ()):
            raise SlimxError(
                f"it contains the token {text}, which the model reads as an image; write {MARK} instead, and list the "
                "image in metadata.images",
                code="vision.placeholder",
            )


class RunImages(RowImages):
    """The images of a run's prompts: rewrites rows, and checks the prompts."""

    def __init__(self, config: Config, keep: bool):
        """Reads the configuration of a run. `keep`: copy the images that rows contain to the run's image store."""
        super().__init__(ImageStore(config.images) if keep else None)
        vision = config.trainer.vision
        assert vision is not None
        self.model = ModelImages(config.model.path, self, limits(vision))
        self.check = self.model.check


def shows_images(model: str) -> bool:
    """Returns True if `model`, the directory of a model, contains a vision-language model."""
    return (Path(model) / "config.json").is_file() and _placeholder(Path(model)) is not None


def _placeholder(model: Path) -> int | None:
    return placeholder_token(json.loads((model / "config.json").read_text()))


def described_images(images: ModelImages, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yields lines about the images of prompts whose headers have been read: their sizes, and their tokens."""
    shown = [image for prompt in prompts for image in _images(prompt)]
    if not shown:
        return
    sizes = [images.size_of(image) for image in shown]
    yield f"images: {len(shown)}, different ones: {len(set(shown))}"
    yield f"width in pixels: {_spread([wide for wide, _ in sizes])}"
    yield f"height in pixels: {_spread([high for _, high in sizes])}"
    yield f"tokens per image: {_spread([images.tokens_of(image) for image in shown])}"
    counts = Counter(len(_images(prompt)) for prompt in prompts)
    listed = ", ".join(f"{count}: {prompts_with}" for count, prompts_with in sorted(counts.items()))
    yield f"prompts by number of images: {listed}"


def _spread(values: Sequence[int]) -> str:
    """Returns a description of the distribution of `values`."""
    ordered = sorted(values)
    at = {name: ordered[int(share * (len(ordered) - 1))] for name, share in SHARES.items()}
    return ", ".join(f"{name} {value}" for name, value in at.items())


def with_image_parts(prompt: Prompt) -> Prompt:
    """Returns a prompt in which parts of messages replace the marks of its images, as chat templates need them. Raises
    SlimxError if marks and images do not correspond."""
    images = _images(prompt)
    return replace(prompt, messages=with_parts(prompt.messages or [], len(images))) if images else prompt


def _images(prompt: Prompt) -> list[str]:
    return prompt.metadata.get("images") or []


def _size(image: str, where: str) -> tuple[int, int]:
    path = Path(image)
    check_file(path, where)
    return size_of(path, where)


def _without_marks(prompt: Prompt) -> Prompt:
    """Returns a prompt whose text can be compared with its rendering by the chat template."""
    messages = [{**message, "content": str(message["content"]).replace(MARK, "")} for message in prompt.messages or ()]
    return replace(prompt, messages=messages or None)
