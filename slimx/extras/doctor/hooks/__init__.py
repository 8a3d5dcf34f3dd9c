"""`slimx doctor --hooks`: tries a run's hooks without engines or trainers."""
