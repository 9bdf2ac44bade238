"""Tiny random models, built from configurations: nothing is downloaded."""

import os

# Before torch is imported: its threads must not spin while another test's process needs the CPU.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from streamchat.model.prepare import prepare

VOCAB_SIZE = 101

# At the usual 0.02 a wrong position moves a logit by 0.004 only; at 0.3 by 12.
INITIALIZER_RANGE = 0.3

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
}


def tiny_model(family="llama", *, num_layers=1, seed=0, **overrides):
    """A prepared random model of `family` with 4 query heads on 2 key/value heads."""
    config_class, model_class, extra = FAMILIES[family]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **extra,
        **overrides,
    }
    torch.manual_seed(seed)
    return prepare(model_class(config_class(**fields)).eval())


def random_ids(length, *, batch_size=1, seed=1):
    """Token ids, shape (batch_size, length), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch_size, length), generator=generator)


@pytest.fixture(scope="session")
def one_layer():
    return tiny_model(num_layers=1)


@pytest.fixture(scope="session")
def two_layers():
    return tiny_model(num_layers=2)
