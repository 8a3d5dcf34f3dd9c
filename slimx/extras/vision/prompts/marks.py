"""Places of images in messages: `<image>` in their text, or content parts as chat templates and APIs have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from slimx.errors import SlimxError, counted
from slimx.extras.vision.images.sources import KEYS
from slimx.json_types import Json
from slimx.models.fields import HfConfig

MARK = "<image>"
"""Text in a message that stands for the next image."""
TEXTS = ("text", "input_text", "output_text")
"""Types of content parts that contain text."""
IMAGES = ("image", "image_url", "input_image")
"""Types of content parts that contain or stand for an image."""


def with_marks(messages: Sequence[object], images: Sequence[object], where: str) -> tuple[list[object], list[object]]:
    """Returns `messages` with content parts as text, in which `MARK` replaces parts of images, and the images of the
    prompt in the order of the marks.

    `images`: images outside the messages. A mark in text and a part that contains no image stand for the next of these;
    those that remain follow at the end. Messages that are not objects are returned unchanged. `where`: location of the
    messages, for errors. Raises SlimxError for parts that are neither text nor image, for images of the
    assistant, and for text with `MARK` in a message with parts of images."""
    remaining = iter(images)
    shown: list[object] = []
    out: list[object] = []
    for turn, message in enumerate(messages):
        if not isinstance(message, dict):
            out.append(message)
            continue
        key = "content" if "content" in message else "value"
        assistant = message.get("role", message.get("from")) in ("assistant", "gpt")
        content = message.get(key)
        if isinstance(content, list):
            content = _text(content, remaining, shown, assistant, f"{where}: messages[{turn}]")
        elif isinstance(content, str):
            shown += islice(remaining, content.count(MARK))
        out.append({**message, key: content} if key in message else message)
    return out, [*shown, *remaining]


def _text(
    parts: Sequence[object], remaining: Iterator[object], shown: list[object], assistant: bool, where: str
) -> object:
    """Returns the text of content parts with a mark for each image, which it appends to `shown`."""
    text = ""
    marked = ""
    for part in parts:
        kind = _kind(part, where)
        if isinstance(part, dict) and kind == "text":
            text += part["text"]
            marked += part["text"]
        elif isinstance(part, dict):
            if assistant:
                raise SlimxError(
                    f"{where} of the assistant contains an image, which the model cannot sample; move the image to a "
                    "message of another role",
                    code="vision.role",
                    about=where,
                )
            marked += MARK
            contained = any(part.get(name) is not None for name in KEYS)
            shown += [part] if contained else islice(remaining, 1)
    if MARK not in text:
        return marked
    if marked != text:
        raise SlimxError(
            f"{where} contains parts of images, and text with {MARK}, which would stand for another image; remove "
            f"{MARK} from the text",
            code="vision.marks",
            about=where,
        )
    shown += islice(remaining, text.count(MARK))
    return text


def _kind(part: object, where: str) -> str:
    """Returns "text" or "image". Raises SlimxError for any other content part."""
    name: object = type(part).__name__
    if isinstance(part, dict):
        name = part.get("type")
        if name in TEXTS or name is None:
            if isinstance(part.get("text"), str):
                return "text"
            if name is None and part.get("image") is not None:
                return "image"
        if name in IMAGES:
            return "image"
    raise SlimxError(
        f"{where} has a part of type {name}; use only parts of text ({', '.join(TEXTS)}) and images "
        f"({', '.join(IMAGES)})",
        code="vision.part",
        about=str(name),
    )


def with_parts(messages: Sequence[Json], count: int) -> list[Json]:
    """Returns `messages` with the text of each as parts, in which parts of type image replace `MARK`. Without any mark,
    the images precede the text of the first user message. Raises SlimxError if there is no place for each image."""
    marks = sum(str(message.get("content")).count(MARK) for message in messages)
    placed = any(message.get("role") == "user" for message in messages)
    if marks != count and (marks or not placed):
        raise SlimxError(
            f"the messages contain {counted(marks, 'time')} {MARK}, but the prompt has {counted(count, 'image')}; "
            f"write {MARK} once for each image",
            code="vision.marks",
            about=MARK,
        )
    out: list[Json] = []
    missing = 0 if marks else count
    for message in messages:
        content = str(message.get("content"))
        if missing and message.get("role") == "user":
            content = MARK * missing + content
            missing = 0
        out.append({**message, "content": _parts(content)} if MARK in content else message)
    return out


def placeholder_token(hf: HfConfig) -> int | None:
    """Returns the id of the token that stands for an embedding of an image, from config.json `hf`; None for a model
    without images."""
    token: int | None = hf.get("media_placeholder_token_id", hf.get("image_token_id"))
    return token


def merged_patches(hf: HfConfig) -> int:
    """Returns the number of patches of which the vision tower makes one embedding, from config.json `hf`."""
    vision = hf["vision_config"]
    height, width = vision.get("merge_kernel_size") or [vision["spatial_merge_size"]] * 2
    return int(height) * int(width)


def check_placeholders(found: int, images: int) -> None:
    """Raises SlimxError unless a rendered conversation has one placeholder for each image. `found`: number of
    placeholders; `images`: number of images."""
    if found != images:
        raise SlimxError(
            f"the chat template renders {counted(found, 'placeholder')} for {counted(images, 'image')}; use the "
            "chat template of the checkpoint, and no text that contains a placeholder",
            code="vision.template",
            about="chat template",
        )


def _parts(content: str) -> list[Json]:
    first, *others = content.split(MARK)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]
