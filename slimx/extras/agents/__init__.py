"""Agent rollouts: a server that agents sample through, tools, and environments of other projects."""
