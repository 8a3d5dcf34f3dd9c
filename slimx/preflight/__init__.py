"""What can be refused before a process is started."""
