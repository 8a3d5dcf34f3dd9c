"""Effects of settings on losses, shown on probes."""
