"""Frozen models that a run's engines serve without training them: judges, reward models, teachers."""
