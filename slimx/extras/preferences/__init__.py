"""Learning from pairs of answers: DPO and reward models."""
