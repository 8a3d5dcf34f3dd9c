"""Makes the quickstart's model and task, so that nothing is downloaded, and trains the model: `slimx quickstart`."""
