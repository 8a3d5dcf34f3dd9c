"""Make the model and the task of the quickstart, so that it needs no download."""
