"""Examples that run on the real stack."""
