"""Events of a run, such as stalled phases, lost processes and steps without a training signal, and the webhook that
posts these events."""
