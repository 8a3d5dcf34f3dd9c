"""The tests that a change can reach, by the graph of imports and of names in strings: `make test-changed`."""
