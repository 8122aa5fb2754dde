"""What a person reads: status, doctor, run folders, what may be retired."""
