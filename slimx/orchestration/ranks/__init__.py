"""Groups of trainer ranks, the Ray actors of one torch.distributed world each."""
