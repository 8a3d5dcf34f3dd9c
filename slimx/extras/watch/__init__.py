"""Views of a run: terminal commands, the HTML report, the live page, trackers, Prometheus and the webhook."""
