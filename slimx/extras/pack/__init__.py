"""`slimx pack`: one archive for a bug report, without weights, rollouts, secrets and names of users and machines."""
