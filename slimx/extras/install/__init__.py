"""Installs what trainers and engines need from the lock files: `slimx setup`."""
