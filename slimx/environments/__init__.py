"""Environments and tools that a rollout uses: their interfaces, and processes for those that compute."""
