"""The two ends of direct transfers: the sender on a trainer rank, and the receiver at an engine, into whose memory the
sender writes."""
