"""Unit tests: they need no upstream. Stub packages in temporary folders stand in for vLLM and Megatron."""
