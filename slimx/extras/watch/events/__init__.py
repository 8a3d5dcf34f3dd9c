"""Events of a run: stalled phases, lost parts, steps without a signal; posted to a webhook."""
