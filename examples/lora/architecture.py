"""Where each of Megatron's linear layers is in a Hugging Face model, by the model's architecture.

Names are those of Megatron-Bridge's mapping of the same architecture (megatron/bridge/models, 0.6.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from examples.errors import RunError


class Layout(Enum):
    """What the output rows of a Megatron linear layer are."""

    PLAIN = auto()
    QKV = auto()
    GATED = auto()
    MAMBA = auto()


@dataclass(frozen=True)
class Linear:
    """The Hugging Face modules of one Megatron linear layer, in the order of its layout; `{}` is an expert's number."""

    modules: tuple[str, ...]
    layout: Layout = Layout.PLAIN


@dataclass(frozen=True)
class Architecture:
    """The prefix of a layer with `{}` for its number, and its linear layers by Megatron's name within the layer."""

    layer: str
    linears: Mapping[str, Linear]

    def linear(self, name: str) -> Linear | None:
        """None for a layer that has no counterpart, or none that PEFT can adapt, as routers."""
        return self.linears.get(name)


#: Megatron's adapters of one projection of a fused layer (CanonicalLoRA), as places in the layer's modules.
CANONICAL = {"adapter_q": 0, "adapter_k": 1, "adapter_v": 2, "adapter_gate": 0, "adapter_up": 1}

#: Whole names outside the layers.
OUTPUT_LAYER, LM_HEAD = "output_layer", "lm_head"


def _attention(at: str) -> dict[str, Linear]:
    return {
        "self_attention.linear_qkv": Linear((f"{at}q_proj", f"{at}k_proj", f"{at}v_proj"), Layout.QKV),
        "self_attention.linear_proj": Linear((f"{at}o_proj",)),
    }


def _gated(megatron: str, hf: str) -> dict[str, Linear]:
    return {
        f"{megatron}linear_fc1": Linear((f"{hf}gate_proj", f"{hf}up_proj"), Layout.GATED),
        f"{megatron}linear_fc2": Linear((f"{hf}down_proj",)),
    }


def _ungated(megatron: str, hf: str) -> dict[str, Linear]:
    return {
        f"{megatron}linear_fc1": Linear((f"{hf}up_proj",)),
        f"{megatron}linear_fc2": Linear((f"{hf}down_proj",)),
    }


_DENSE = Architecture("model.layers.{}.", _attention("self_attn.") | _gated("mlp.", "mlp."))
_EXPERTS = Architecture(_DENSE.layer, {**_DENSE.linears, **_gated("mlp.experts.", "mlp.experts.{}.")})
_SHARED = Architecture(_DENSE.layer, {**_EXPERTS.linears, **_gated("mlp.shared_experts.", "mlp.shared_experts.")})
_NEMOTRON_H = Architecture(
    "backbone.layers.{}.",
    {
        **_attention("mixer."),
        **_ungated("mlp.", "mixer."),
        **_ungated("mlp.experts.", "mixer.experts.{}."),
        **_ungated("mlp.shared_experts.", "mixer.shared_experts."),
        "mlp.fc1_latent_proj": Linear(("mixer.fc1_latent_proj",)),
        "mlp.fc2_latent_proj": Linear(("mixer.fc2_latent_proj",)),
        "mixer.in_proj": Linear(("mixer.in_proj",), Layout.MAMBA),
        "mixer.out_proj": Linear(("mixer.out_proj",)),
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "NemotronHForCausalLM": _NEMOTRON_H,
    "LlamaForCausalLM": _DENSE,
    "MistralForCausalLM": _DENSE,
    "Qwen2ForCausalLM": _DENSE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "Glm4MoeForCausalLM": _SHARED,
}


def architecture(names: list[str]) -> Architecture:
    """The first known one of config.json's `architectures`.

    Raises:
        RunError: none is known.
    """
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise RunError(
        f"config.json: architectures {names} are not known here; known are {', '.join(sorted(ARCHITECTURES))}"
    )
