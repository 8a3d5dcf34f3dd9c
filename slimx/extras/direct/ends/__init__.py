"""Both ends of direct transfers: a trainer rank that writes, an engine whose memory it writes to."""
