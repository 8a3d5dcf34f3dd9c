"""Checks of the driver's machine: free space on its disks, and temperature and clocks of its GPUs."""
