"""GRPO on GSM8K."""
