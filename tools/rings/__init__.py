"""Runs the suite: ring one (`make test`), ring two and its parts (`make test-all`), and keeps their results."""
