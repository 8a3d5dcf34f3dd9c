"""Generation of trajectories: what hooks receive, the client, the flow of groups."""
