"""For vLLM's workers: the bytes of a model's parameters as they were loaded.

vLLM's CPU build then packs matrices and drops the parameters; on GPUs without quantization they stay.
"""

from typing import Any

from vllm.model_executor.model_loader import base_loader

_released = base_loader.process_weights_after_loading
_loaded: list[int] = []


def parameter_bytes(model: Any) -> int:
    """Of every parameter once: a tied head is the embedding."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _counted(model: Any, *arguments: Any, **options: Any) -> None:
    _loaded.append(parameter_bytes(model))
    _released(model, *arguments, **options)


base_loader.process_weights_after_loading = _counted


class Count:
    """What vLLM adds to its workers; it imports this module before it loads a model."""

    def loaded_bytes(self) -> list[int]:
        """Of each model that this worker loaded."""
        return _loaded
