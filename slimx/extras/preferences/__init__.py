"""Preference learning from pairs of answers: DPO and reward models."""
