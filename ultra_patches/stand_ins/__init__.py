"""Stand-ins for what a machine without a GPU lacks, for probes, tests and examples."""
