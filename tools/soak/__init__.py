"""A long run of tiny steps whose processes are killed at random: nothing may grow, and no prompt may be lost."""
