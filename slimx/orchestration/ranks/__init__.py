"""Groups of trainer ranks. Each group consists of the Ray actors of one torch.distributed world."""
