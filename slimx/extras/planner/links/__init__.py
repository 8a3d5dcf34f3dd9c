"""Traffic of a publication, and the seconds that links need for it."""
