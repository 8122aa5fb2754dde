"""What a weight sync holds on each side besides the weights, in bytes, at its peak.

Read in Megatron-Bridge 0.6.2 (models/conversion/param_mapping.py) and vLLM 0.32.0 (weight_transfer/packed_tensor.py and
model_loader/reload/layerwise.py).
"""

from examples.planning.layout import Layout
from examples.planning.model import Model
from examples.planning.weights import Block

#: packed_nccl_broadcast_producer and _consumer alternate between so many packs (DEFAULT_PACKED_NUM_BUFFERS).
NCCL_PACKS = 2


def exported(model: Model, layout: Layout) -> int:
    """The largest tensor whole, with the pieces it is put together from; of experts, one from every EP rank at a time."""
    trainer = layout.trainer
    dense = [size for (layer, name), size in model.tensors.items() if ".experts." not in name or layer < 0]
    copies = (trainer.tp > 1) + (trainer.tp > 1 or trainer.pp > 1)
    routed = [weight.numel for layer in model.layers for weight in layer if weight.routed]
    together = trainer.ep if trainer.ep > 1 else 0
    return max(max(dense) * copies, max(routed, default=0) * together) * trainer.weight_bytes


def packs_sent(model: Model, layout: Layout) -> int:
    """Packs in the trainer's memory: with NCCL the one in flight, and the next with the tensors it is put together from."""
    if not layout.sync.packed:
        return 0
    return layout.sync.buffer_mib << 20 if layout.colocated else (NCCL_PACKS + 1) * _pack(model, layout)


def packs_received(model: Model, layout: Layout) -> int:
    """Packs in the engine's memory. Over IPC they are the trainer's."""
    if layout.colocated:
        return 0
    return NCCL_PACKS * _pack(model, layout) if layout.sync.packed else _largest(model, layout)


def _pack(model: Model, layout: Layout) -> int:
    """A pack is closed by the tensor that exceeds the limit."""
    return (layout.sync.buffer_mib << 20) + _largest(model, layout)


def _largest(model: Model, layout: Layout) -> int:
    return max(model.tensors.values()) * layout.trainer.weight_bytes


def reloaded(model: Model) -> int:
    """What vLLM keeps until a module is complete: all its tensors as they are sent, whole, whatever part a rank will use.

    The largest is the routed experts of one layer. The module's new weights come on top, as large as its share.
    """
    modules = [model.embedding.numel, *(size for layer in set(model.layers) for size in _modules(layer))]
    return 2 * max(modules)


def _modules(layer: Block) -> list[int]:
    """Elements of each of vLLM's modules of a layer: both matrices of all experts are one module."""
    sizes: dict[str, int] = {}
    for weight in layer:
        module = "experts" if weight.routed else weight.module or weight.tensor
        sizes[module] = sizes.get(module, 0) + weight.total
    return list(sizes.values())
