"""The unit tests that run SGLang's code share a worker, which imports it once."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.conftest import WITH_SGLANG

UNIT = Path(__file__).parents[1]


def test_every_file_whose_tests_take_sglang_is_listed():
    taking = {file.name for file in UNIT.glob("*/test_*.py") if re.search(r"\bsglang: SGLang\b", file.read_text())}
    assert taking == WITH_SGLANG
