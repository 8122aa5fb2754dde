"""What the probes of LoRA exports share."""
