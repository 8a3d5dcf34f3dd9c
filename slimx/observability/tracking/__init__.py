"""Records of a run: metrics, phases, samples, trackers."""
