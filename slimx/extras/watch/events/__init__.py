"""Events of a run, such as stalled phases, lost parts and steps without a training signal, and the webhook that posts
them."""
