"""Files of rollouts: encoding of groups, files of steps, and values of trained tokens."""
