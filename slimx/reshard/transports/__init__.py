"""Memory that processes of one machine share: the host's and that of its GPUs."""
