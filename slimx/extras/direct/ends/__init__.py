"""Both ends of direct transfers: a trainer rank that writes, and an engine whose memory it writes to."""
