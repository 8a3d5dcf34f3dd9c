"""slimx from a script or a notebook: training with functions as hooks, and a run's results as tables."""
