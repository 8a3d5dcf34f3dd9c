"""Events of a run: phases that are stalled, parts that are lost, steps without a signal; posted to a webhook."""
