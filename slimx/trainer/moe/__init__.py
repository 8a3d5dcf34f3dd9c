"""Routing of mixture-of-experts layers: recording and replaying the experts of each token, auxiliary losses, selection
bias."""
