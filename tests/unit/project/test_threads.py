"""Tests compute with one thread, also where a conftest imports torch before the tests begin."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS", "1") != "1", reason="this session has a number of its own")
def test_torch_computes_with_one_thread():
    assert torch.get_num_threads() == 1
