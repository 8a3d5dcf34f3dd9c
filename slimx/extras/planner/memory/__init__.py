"""Memory of trainers and engines, computed from the configuration."""
