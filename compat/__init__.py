"""The compatibility matrix: which releases, their sources, and what the probes say on each."""
