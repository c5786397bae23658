"""Draft models that agree with a target more or less often, and what is seen of their work."""

from __future__ import annotations

import copy

import torch
from reference_models import make_engine

from kvpager.drafts import DraftModel


def noisy(model, amount, seed=0):
    """The same model with noise on its weights, so that it often guesses right."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += amount * parameter.std() * noise.to(parameter.dtype)
    return twin


def shallow(model, layers):
    """The same model without its last layers."""
    twin = copy.deepcopy(model)
    twin.model.layers = twin.model.layers[:layers]
    twin.config.num_hidden_layers = layers
    return twin


def drafted_engine(model, draft, *, guess_cost=0.0, draft_options=None, **options):
    """An engine that guesses with `draft`, by default as if that cost nothing."""
    settings = {"pool_tokens": 1024, **options}
    drafting = DraftModel(draft, guess_cost=guess_cost, **(draft_options or {}))
    return make_engine(model, draft=drafting, **settings)


def draft_of(session):
    """The companion of a session; empty where it was not needed yet."""
    return session.core.drafter.of(session.transcript)


class Seen:
    """By how much an engine's counters grow in a `with` block."""

    def __init__(self, engine):
        self.engine = engine

    def __enter__(self):
        self._before = self.engine.stats()
        return self

    def __exit__(self, *error):
        after = self.engine.stats()
        for name in (
            "model_forwards",
            "speculation_forwards",
            "speculation_proposed",
            "speculation_accepted",
            "draft_forwards",
            "draft_tokens_fed",
            "trim_primary_refused",
            "trim_companion_refused",
            "tokens_reprefilled",
        ):
            setattr(self, name, after[name] - self._before[name])
