"""Checks of a run's metrics: each compares a metric with its usual values in the same run."""
