"""Fixtures of the tests in this room: the run of the live page's tests."""

from tests.extras.watch.conftest import run  # noqa: F401
