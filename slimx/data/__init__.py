"""Records, prompt sources, and the packing of trajectories into training batches."""
