"""Selects the tests that a change can affect, by imports and by names in strings: `make test-changed`."""
