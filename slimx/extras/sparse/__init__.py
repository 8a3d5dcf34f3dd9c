"""Model families with DeepSeek sparse attention (DSA): DeepSeek-V3.2 and GLM-5. An indexer selects the tokens to which
each query attends."""
