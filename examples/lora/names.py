"""What each tensor of a checkpoint is, by its name: an adapter's matrix, a base weight, an optimizer's state, or unknown."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from examples.errors import RunError
from examples.lora.checkpoint import Checkpoint, Entry

#: `optimizer.state.exp_avg.…`, `chained_1.optimizer.distributed.…`: Megatron puts every optimizer tensor under these, the
#: moments of adapters too.
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")

_ADAPTER = re.compile(
    r"^(?P<linear>.+)\.adapter\.(?:(?P<projection>adapter_[a-z]+)\.)?(?P<side>linear_in|linear_out)\.weight"
    r"(?P<part>_[wv]|\.(?:z|x|B|C|dt))?$"
)
_LAYER = re.compile(r"^decoder\.layers\.(?:(?P<layer>[0-9]{1,9})\.)?(?P<inner>.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.experts\.(?:(?P<expert>[0-9]{1,9})\.)?(?P<linear>linear_fc[12])$")

#: Every word of the names of base weights in Megatron-Core's GPT and hybrid models; numbers aside.
_BASE_WORD = re.compile(
    r"""
    decoder | embedding | word_embeddings | position_embeddings | output_layer | layers | mtp | mtp_model_layer |
    transformer_layer | eh_proj | [eh]norm | final_norm | final_layernorm | self_attention | mlp | mixer | router |
    (?:shared_)?experts | norm | (?:input|pre_mlp|post_mlp|post_self_attn|q|k|kv)_layernorm | linear_qkv | linear_proj |
    linear_fc[12] | linear_q_proj | linear_(?:q|kv)_(?:down|up)_proj | fc[12]_latent_proj | gate_weight | in_proj |
    out_proj | conv1d | (?:conv1d_|layer_norm_)?(?:weight|bias)(?:_[wv])? | expert_bias | A_log | D | dt_bias |
    z | x | B | C | dt
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Site:
    """A Megatron linear layer that has an adapter.

    `layer` is None where all layers are stacked along a leading axis; `expert` is None outside experts, and where they are
    stacked or share one adapter. `linear` has its name within the layer, without the expert's number.
    """

    layer: int | None
    linear: str
    expert: int | None
    projection: str | None
    #: The name in the checkpoint, for messages.
    name: str

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts."""
        return self.linear.startswith("mlp.experts.")

    @property
    def in_layers(self) -> bool:
        """Whether it belongs to the decoder's layers."""
        return self.name.startswith("decoder.layers.")


@dataclass(frozen=True)
class Matrix:
    """Where a tensor belongs: its site, `linear_in` (A) or `linear_out` (B), and which rows of it, "" for all."""

    site: Site
    side: str
    part: str


def adapters(checkpoint: Checkpoint, skip: Sequence[str]) -> tuple[list[Entry], list[str]]:
    """The tensors of adapters, and the names that the patterns of `skip` left out.

    Base weights and optimizer states are left aside, as are pickled objects that belong to no adapter or are the extra
    states of transformer-engine (of FP8; no weights).

    Raises:
        RunError: a name that is none of these or that two tensors have, a pattern of `skip` that leaves nothing out, or no
            adapter at all.
    """
    tensors = {entry.name: entry for entry in checkpoint.tensors if not _is_aside(entry.name)}
    objects = [name for name in checkpoint.objects if ".adapter." in name and "._extra_state" not in name]
    every = [*(entry.name for entry in checkpoint.tensors), *objects]
    names = [name for name in every if not _is_aside(name)]
    if unused := [pattern for pattern in skip if not any(fnmatchcase(name, pattern) for name in names)]:
        raise RunError(f"--skip '{unused[0]}' matches no adapter and no unknown tensor in {checkpoint.folder}")
    skipped = [name for name in names if any(fnmatchcase(name, pattern) for pattern in skip)]
    kept = [name for name in names if name not in set(skipped)]
    if twice := [name for name, count in Counter(kept).items() if count > 1]:
        keys = [entry.key for entry in checkpoint.tensors if entry.name == twice[0]]
        raise RunError(
            f"{checkpoint.folder}: {' and '.join(keys)} are both {twice[0]}, and which of them the model has is not said; "
            f"save the checkpoint again without one, or --skip '{twice[0]}' drops both"
        )
    if strange := [name for name in kept if name not in tensors or ".adapter." not in name]:
        kind = (
            "a tensor that is neither a known base weight nor an adapter"
            if strange[0] in tensors
            else "a pickled object"
        )
        raise RunError(f"{checkpoint.folder}: {strange[0]} is {kind}; --skip '{strange[0]}' drops it")
    if not kept:
        raise RunError(
            f"{checkpoint.folder}: {len(checkpoint.tensors)} tensors, no adapter to convert; give a LoRA checkpoint"
        )
    return [tensors[name] for name in kept], skipped


def _is_aside(name: str) -> bool:
    """Whether it is an optimizer's state or a base weight."""
    return bool(_OPTIMIZER.match(name)) or all(word.isdigit() or _BASE_WORD.fullmatch(word) for word in name.split("."))


def matrix(entry: Entry) -> Matrix:
    """Take a name apart.

    Raises:
        RunError: it is not a matrix of LoRA in a place that is known here.
    """
    if not (match := _ADAPTER.match(entry.name)):
        raise RunError(f"{entry.key}: no LoRA matrix, linear_in or linear_out; --skip '{entry.name}' drops it")
    name = match["linear"]
    layer = expert = None
    linear = name
    if inner := _LAYER.match(name):
        layer = int(inner["layer"]) if inner["layer"] else None
        linear = inner["inner"]
        if routed := _EXPERT.match(linear):
            expert = int(routed["expert"]) if routed["expert"] else None
            linear = f"mlp.experts.{routed['linear']}"
    return Matrix(Site(layer, linear, expert, match["projection"], name), match["side"], match["part"] or "")
