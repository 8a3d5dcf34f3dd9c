"""The model that is trained: construction, parts that megatron-core lacks, weights, log-probs."""
