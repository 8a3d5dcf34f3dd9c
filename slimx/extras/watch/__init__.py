"""Views of a run: terminal commands, the live page, trackers and Prometheus."""
