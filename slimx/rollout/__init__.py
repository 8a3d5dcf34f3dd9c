"""Generation of trajectories: what hooks receive, the client, the chat proxy, the flow of groups."""
