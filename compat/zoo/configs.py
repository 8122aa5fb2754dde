"""Which architectures there are, and a configuration of each that fits a test: transformers' own, with small values.

Runs on what is installed, or on the release that comes first on the path.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from ultra_patches.errors import one_line

#: What a configuration has of these becomes small. Widths of convolutions stay as they are: kernels depend on them.
SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "ffn_hidden_size": 128, "ffn_dim": 128,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "depth": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "num_heads": 4, "head_dim": 32, "n_embd": 64, "n_inner": 128,
    "d_model": 64, "embed_dim": 64, "word_embed_proj_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64, "expert_ffn_hidden_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "moe_latent_size": 32, "zero_expert_num": 0,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 2, "state_size": 16, "time_step_rank": 4, "mamba_dt_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "hybrid_override_pattern": "ME*-", "max_position_embeddings": 256, "n_positions": 256, "max_sequence_length": 256,
    "sliding_window": 64, "num_nextn_predict_layers": 0, "query_pre_attn_scalar": 32, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    "image_size": 56, "patch_size": 14, "projection_dim": 64, "out_hidden_size": 64, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0], "image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12,
    "vision_end_token_id": 13, "image_token_index": 10, "audio_token_id": 14,
}  # fmt: skip
#: What follows from others, and is given where the rule's values do not fit together.
MROPE = [4, 6, 6]
#: Architectures whose rule needs more, by transformers' model type.
MORE: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": None, "num_hidden_layers": 4, "mamba_num_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "phimoe": {"num_local_experts": 4},
    "opt": {"word_embed_proj_dim": 64},
}


class NotMadeError(Exception):
    """Why there is no small model of an architecture, in one line."""


def architectures() -> dict[str, str]:
    """Every architecture that vLLM's registry names, with its kind; those that share a class, once."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    kinds = {
        "text": "_TEXT_GENERATION_MODELS",
        "multimodal": "_MULTIMODAL_MODELS",
        "draft": "_SPECULATIVE_DECODING_MODELS",
    }
    found: dict[str, str] = {}
    seen: set[object] = set()
    for kind, table in kinds.items():
        for name, place in getattr(registry, table, {}).items():
            # (module, class), the key of most tables; a later table may name a class again.
            if place not in seen:
                seen.add(place)
                found[name] = kind
    return found


def small(architecture: str, kind: str) -> tuple[Any, Any]:
    """Transformers' model class and a small configuration. Raises NotMadeError with the reason."""
    import transformers

    if kind == "draft":
        raise NotMadeError("a draft is loaded beside its target, which a model alone does not have")
    model_type = _model_types().get(architecture)
    if model_type is None:
        raise NotMadeError("transformers has no class of this name, so that nothing says what its checkpoint holds")
    try:
        config = _shrunk(transformers.AutoConfig.for_model(model_type), MORE.get(model_type, {}))
    except Exception as error:
        raise NotMadeError(f"the rule's values make no configuration: {one_line(error)}") from error
    config.architectures = [architecture]
    return getattr(transformers, architecture), config


def _shrunk(config: Any, more: dict[str, Any]) -> Any:
    given = {name: value for name, value in SMALL.items() if getattr(config, name, None) is not None}
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            given[name] = _shrunk(inner, {}).to_dict()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        given["rope_parameters"] = {**rope, "mrope_section": MROPE}
    return type(config)(**given, **{name: value for name, value in more.items() if value is not None})


@cache
def _model_types() -> dict[str, str]:
    """Transformers' model type by the name of the class that generates with it."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, str] = {}
    for table in (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ):
        for model_type, names in _items(getattr(auto, table, {})):
            for name in names:
                found.setdefault(name, model_type)
    return found


def _items(table: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    for model_type, names in table.items():
        yield model_type, tuple(names) if isinstance(names, (tuple, list)) else (names,)
