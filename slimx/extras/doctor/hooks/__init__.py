"""`slimx doctor --hooks`: a trial of hooks without engines or trainers."""
