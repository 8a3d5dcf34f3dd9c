"""Learning from pairs of a chosen and a rejected answer: direct preference optimization (DPO) and reward models."""
