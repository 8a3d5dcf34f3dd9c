"""Agent rollouts: a server that agents sample through, tools, and adapters for environments of other projects."""
