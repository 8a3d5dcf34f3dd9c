"""Images: the forms in which users give them, their preparation, and the store of a run."""
