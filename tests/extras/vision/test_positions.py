"""Positions and places of images in packed sequences, compared with transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding

from slimx.data.records import Image
from slimx.extras.vision.model import AxisRotation
from slimx.extras.vision.positions import packed_positions, placeholders, positions_of
from slimx.extras.vision.tower import rotary_axes
from tests.refusals import refused

PLACEHOLDER = 7
parts = st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=7)
"""Lengths of texts, and sizes of images in embeddings."""


def sequence(items: list[int | tuple[int, int]]) -> tuple[list[int], list[Image]]:
    """Returns token ids and images; texts separate the images, as the tokens around placeholders do."""
    ids, images = [1], []
    for index, item in enumerate(items):
        if isinstance(item, int):
            ids += [2] * item
            continue
        high, wide = item
        start = len(ids)
        ids += [PLACEHOLDER] * (high * wide) + [3]
        images.append(Image(start=start, stop=len(ids) - 1, grid=(1, 2 * high, 2 * wide), digest=str(index)))
    return ids, images


@pytest.fixture(scope="module")
def oracle() -> Qwen3VLModel:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8, "head_dim": 16}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    with torch.device("meta"):
        return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER))


@given(parts)
def test_positions_are_those_of_transformers(oracle: Qwen3VLModel, items: list[int | tuple[int, int]]) -> None:
    ids, images = sequence(items)
    tokens = torch.tensor([ids])
    grids = torch.tensor([image.grid for image in images]) if images else None
    expected, _ = oracle.get_rope_index(
        tokens, (tokens == PLACEHOLDER).int(), image_grid_thw=grids, attention_mask=torch.ones_like(tokens)
    )
    np.testing.assert_array_equal(positions_of(len(ids), images, 2), expected[:, 0].numpy())


def test_every_packed_sequence_has_its_positions_and_placeholders() -> None:
    one, other = sequence([2, (1, 2)]), sequence([(2, 2), 1, (1, 2)])
    other[1][1].digest = one[1][0].digest
    lengths = [len(one[0]) + 2, len(other[0]), 3]
    found = packed_positions(lengths, [one[1], other[1]], 2)
    separate = [positions_of(lengths[0], one[1], 2), positions_of(lengths[1], other[1], 2), positions_of(3, [], 2)]
    np.testing.assert_array_equal(found, np.concatenate(separate, axis=1))
    first = {one[1][0].digest: 0, other[1][0].digest: 2}
    tokens, embeddings = placeholders(lengths, [one[1], other[1]], first)
    ids = np.array([*one[0], 0, 0, *other[0], 0, 0, 0])
    np.testing.assert_array_equal(tokens, np.flatnonzero(ids == PLACEHOLDER))
    assert embeddings.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_frequencies_rotate_by_the_axes_of_transformers() -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = Qwen3VLConfig(text_config={"head_dim": 16, "rope_parameters": rotary}).text_config
    embedding = Qwen3VLTextRotaryEmbedding(text)
    positions = torch.randint(0, 50, (3, 1, 11))
    cosines, _ = embedding(torch.zeros(1), positions)
    axes = rotary_axes(8, (4, 2, 2), interleaved=True)
    angles = AxisRotation(embedding.inv_freq, axes)(positions[:, 0], None)
    torch.testing.assert_close(angles[:, 0, 0].cos(), cosines[0], rtol=0, atol=1e-6)
    assert rotary_axes(8, (4, 2, 2), interleaved=False) == (0, 0, 0, 0, 1, 1, 2, 2)


def test_sections_that_lack_a_frequency_are_refused() -> None:
    with refused("vision.sections", about="mrope_section"):
        rotary_axes(9, (4, 2, 2), interleaved=True)
