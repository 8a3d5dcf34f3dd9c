"""Events of a run that somebody is told of: what they are, when a phase is called stalled, and the webhook."""
