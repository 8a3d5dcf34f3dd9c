"""Groups in progress: scheduling, interruption, rewards, replay."""
