"""A tiny random model of each supported family, built from its configuration.

A row is the prefix of the family's classes in transformers and the fields in which its tiny model
differs from `COMMON`. Where a quarter of a head is turned, heads are larger: of two elements it
would not show in which way they are paired. A family has one row, or one for each layout that its
models come in: then their names are the family's with the layout in brackets.
"""

import pytest
import torch
import transformers
from conftest import INITIALIZER_RANGE, VOCAB_SIZE
from transformers import AutoModelForCausalLM

from streamchat import UnsupportedModelError
from streamchat.model.families import check_config

NATIVE_WINDOW = 8

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT_J = {
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 64,
    "n_positions": 512,
    "rotary_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
LOCAL = {"sliding_window": NATIVE_WINDOW}
"""With `layer_types` of one local layer and a full one."""
SCALED_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}

ROWS = {
    "arcee": ("Arcee", {"head_dim": 8}),
    "bloom": ("Bloom", {}),
    "codegen": ("CodeGen", GPT_J),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", LOCAL),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8}),
    "exaone4": ("Exaone4", {**LOCAL, "head_dim": 8, "sliding_window_pattern": None}),
    "falcon (rw)": (
        "Falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon (7b)": ("Falcon", {}),
    "falcon (40b)": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {**LOCAL, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("Gemma3Text", {**LOCAL, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_neox": ("GPTNeoX", {"hidden_size": 64}),
    "gpt_oss": (
        "GptOss",
        {**LOCAL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gptj": ("GPTJ", GPT_J),
    "granite": ("Granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": ("Helium", {"head_dim": 8}),
    "llama": ("Llama", {}),
    "llama4_text": (
        "Llama4Text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "moe_layers": [0],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 64,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
    "ministral": ("Ministral", {**LOCAL, "head_dim": 8}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 8, "sliding_window": None, "rope_parameters": SCALED_QUERIES},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mpt": ("Mpt", {"max_seq_len": 512, "attn_config": {"clip_qkv": 4.0}}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {"clip_qkv": 4.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", LOCAL),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"rope_parameters": LONGROPE}),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "stablelm": ("StableLm", {"hidden_size": 64}),
    "starcoder2": ("Starcoder2", {}),
}

NO_GROUPS = ("bloom", "codegen", "falcon", "gpt_neox", "gptj", "mpt", "persimmon")
"""Families without the field `num_key_value_heads`."""


def family_of(name):
    """The family that a row is of."""
    return name.partition(" ")[0]


def skip_without_interface(name):
    """GPT-J and CodeGen can be streamed with newer releases of transformers only."""
    try:
        check_config(family_config(name))
    except UnsupportedModelError as error:
        if "has no interface for its attention" not in str(error):
            raise
        pytest.skip(str(error))


def family_config(name, *, num_layers=2, **overrides):
    """Configuration of the tiny model of a family."""
    prefix, extra = ROWS[name]
    fields = {**COMMON, **extra, **overrides}
    if family_of(name) in NO_GROUPS:
        del fields["num_key_value_heads"]
    if fields.get("sliding_window") == NATIVE_WINDOW:
        kinds = ["sliding_attention", "full_attention"]
        fields["layer_types"] = kinds[-num_layers:]
    if "no_rope_layers" in fields:
        fields["no_rope_layers"] = fields["no_rope_layers"][:num_layers]
    layers = "n_layer" if extra is GPT_J else "num_hidden_layers"
    return getattr(transformers, f"{prefix}Config")(**fields, **{layers: num_layers})


def family_model(name, *, num_layers=2, dtype=torch.float32, **overrides):
    """Tiny random model of a family, not prepared."""
    skip_without_interface(name)
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(family_config(name, num_layers=num_layers, **overrides))
        .to(dtype)
        .eval()
    )


ONE_OF_EACH_KIND = (
    "llama",
    "cohere",  # pairs
    "falcon (40b)",  # wrapped
    "gemma2",  # soft-capping, native windows
    "gpt_neox",  # a part of each head
    "gpt_oss",  # learned sinks
    "llama4_text",  # experts, scaled queries in some layers
    "mpt",  # ALiBi
    "phi3",  # longrope
    "smollm3",  # layers without angles
)


def all_slowly(names):
    """Parameters for a test that all families pass: one of each kind by default, all with slow."""
    return [
        pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow)
        for name in names
    ]
