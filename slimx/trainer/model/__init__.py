"""The trained model on one rank: its construction, layers that megatron-core lacks, its weights, and log-probs."""
