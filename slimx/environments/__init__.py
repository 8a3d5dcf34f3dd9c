"""Tools that a rollout uses, and the sandbox in which untrusted code runs."""
