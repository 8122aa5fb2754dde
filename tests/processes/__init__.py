"""Real processes of other runtimes, without an upstream in them."""
