"""Models, stores and contents that several Python tests use."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadline: how long an example takes is the machine's affair. `make fuzz` asks for its profile.
settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """The folder of a tiny Llama model with random weights and 64 token ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def author():
    """Makes contents to save, and checks what is read back."""
    from small_store import Author

    return Author()


@pytest.fixture
def folder(tmp_path):
    """Where `store` is, or a store will be."""
    return tmp_path / "store"


@pytest.fixture
def store(folder):
    """An empty directory store."""
    from kvpager.stores import DirectoryStore

    return DirectoryStore(folder)
