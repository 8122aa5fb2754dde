"""How many bytes of weights a vLLM rank holds, by vLLM 0.32.0's layers, in bf16 but for what it keeps in fp32."""

from examples.planning.layout import Rollout
from examples.planning.model import Model
from examples.planning.weights import Weight

#: vLLM pads vocabularies to this (DEFAULT_VOCAB_PADDING_SIZE in layers/vocab_parallel_embedding.py).
VOCAB_MULTIPLE = 64
#: These build embedding, final norm and head on every pipeline rank (models/nemotron_h.py and models/qwen3_moe.py).
ENDS_EVERYWHERE = ("NemotronHForCausalLM", "Qwen3MoeForCausalLM")


def partition(layers: int, pp: int) -> list[range]:
    """The layers of each pipeline rank (get_pp_indices in distributed/utils.py): what is left over goes before the last."""
    sizes = [layers // pp] * pp
    for place in range(layers % pp):
        sizes[-2 - place] += 1
    starts = [sum(sizes[:rank]) for rank in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def rank_bytes(model: Model, rollout: Rollout) -> list[int]:
    """Bytes of parameters on a rank of each pipeline stage; its tensor-parallel ranks hold the same."""
    return [
        sum(_share(weight, rollout) for layer in layers for weight in model.layers[layer])
        + _ends(model, rollout, index)
        for index, layers in enumerate(partition(len(model.layers), rollout.pp))
    ]


def _share(weight: Weight, rollout: Rollout) -> int:
    """Heads and groups that are fewer than ranks are repeated, hence a unit at least. Experts are dealt out by EP or cut by TP."""
    fp32 = weight.engine_fp32 in {"always", rollout.device}
    return _elements(weight, rollout) * (4 if fp32 else 2)


def _elements(weight: Weight, rollout: Rollout) -> int:
    if weight.routed and rollout.ep > 1:
        return weight.numel * -(-weight.experts // rollout.ep)
    if weight.units is None:
        return weight.numel
    return weight.total // weight.units.count * -(-weight.units.count // rollout.tp)


def _ends(model: Model, rollout: Rollout, index: int) -> int:
    """Embedding, final norm and head; a tied head is the embedding, wherever one of both is."""
    everywhere = model.architecture in ENDS_EVERYWHERE
    first, last = everywhere or index == 0, everywhere or index == rollout.pp - 1
    tables = (1 if first or last else 0) if model.tied else first + last
    rows = -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // rollout.tp
    return 2 * (tables * rows * model.hidden + (model.hidden if last else 0))
