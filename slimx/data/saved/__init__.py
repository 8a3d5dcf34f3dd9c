"""Files of rollouts: encoding of groups, one file per step, and values of trained tokens."""
