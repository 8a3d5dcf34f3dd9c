"""Groups of trainer ranks over Ray."""
