"""Measures where the time of a test session goes: events of its tests, and CPU time of its processes.

For `tools/suite.py`."""
