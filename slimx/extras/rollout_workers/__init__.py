"""Rollout workers: Ray actors that generate a run's groups (`rollout.workers`)."""
