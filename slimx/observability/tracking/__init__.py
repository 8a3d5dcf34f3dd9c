"""Records of a run on disk and in tracking services: metrics, phases, samples."""
