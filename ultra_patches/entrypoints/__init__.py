"""How the overlay gets into a process that the user does not start."""
