"""Terminal tasks: the model works in a sandbox with a shell and edits; tests in a fresh sandbox judge the result."""
