"""Tokenizer of tiny vision-language models: the quickstart's, with the tokens of images."""

from __future__ import annotations

from pathlib import Path

from slimx.extras.quickstart.make_model import make_tokenizer

TOKENS = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
"""Ids of the tokens of images, which follow the quickstart's vocabulary, by their names in config.json."""
NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(directory: str | Path) -> None:
    """Writes the quickstart's tokenizer with the tokens of images, and a chat template that renders images."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(NAMES), special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
    ids = tokenizer.convert_tokens_to_ids(list(NAMES))
    if ids != list(TOKENS.values()):
        raise ValueError(f"the tokens of images have the ids {ids}, not {list(TOKENS.values())}")
    tokenizer.save_pretrained(directory)
