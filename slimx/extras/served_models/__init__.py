"""Models that engines serve and nothing trains: judges, reward models, teachers."""
