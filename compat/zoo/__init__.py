"""The zoo: every architecture that vLLM can load, made small, updated from one checkpoint to another, and compared tensor by tensor."""
