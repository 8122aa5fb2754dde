"""What each process of a run has, one file a process."""
