"""Engine servers that span several nodes (`rollout.engines.nodes`)."""
