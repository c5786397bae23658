"""Models with low-rank adapters, as PEFT puts them into a model."""

from __future__ import annotations

import warnings

import peft
import pytest
import torch
from reference_models import build


def with_adapters(*names, architecture="llama"):
    """A model with these adapters loaded, none of them zero, and the first one active."""
    model = build(architecture)
    for name in names:
        add(model, name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.set_adapter(names[0])
    return model.eval()


def add(model, name, r=4):
    """Loads one more."""
    config = peft.LoraConfig(r=r, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.add_adapter(config, adapter_name=name)
        except ValueError as error:
            if "The version of PEFT" not in str(error):
                raise
            pytest.skip("this release of transformers has no PEFT that it takes")


def layers_of(model):
    """The layers that adapters were put into."""
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]


def merge(model):
    """Adds the active adapter to the weights it was put beside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in layers_of(model):
            layer.merge()
