"""Model families with recurrent layers: gated delta nets (Qwen3-Next, Qwen3.5) and Mamba-2 (Nemotron-H)."""
