"""vLLM's `vllm.general_plugins`: loaded in the API server, the EngineCore and every worker.

Loading the entry point imports the package, and that arms; the function has nothing left to do. It must not raise:
vLLM ends its start-up on an exception from a plugin function.
"""


def register() -> None:
    """Called once a process by vLLM (`vllm/plugins/__init__.py`, all releases from 0.16 on)."""
