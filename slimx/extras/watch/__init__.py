"""Views of a run: terminal commands, the live page, trackers, Prometheus and the webhook."""
