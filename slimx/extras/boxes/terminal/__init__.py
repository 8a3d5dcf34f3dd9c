"""Terminal tasks: the model works in a sandbox with a shell and edits files; tests in a fresh sandbox decide the
reward."""
