"""Rollouts of agents: a server that they sample through, tools, and environments of other projects."""
