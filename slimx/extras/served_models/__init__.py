"""Models that engines serve without training: judges, reward models, teachers."""
