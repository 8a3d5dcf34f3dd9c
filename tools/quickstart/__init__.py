"""Makes the model and the task of the quickstart, which therefore needs no download."""
