"""Fixtures of the unit tests, for the tests of extras."""

from tests.unit.conftest import (  # noqa: F401
    deepseek,
    emulator_library,
    mine,
    no_collection,
    qwen,
    unawaited,
)
