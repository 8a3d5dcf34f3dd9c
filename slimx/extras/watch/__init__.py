"""Views of a run: the HTML report, the live page, trackers, Prometheus and the webhook."""
