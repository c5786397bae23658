"""Decides before anything runs which models can keep the promise, with reasons and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpager._model.seam.recurrent import is_recurrent
from kvpager._model.weights.numerics import tunes_kernels
from kvpager._model.weights.supported import (
    compiled_part,
    has_expert_weights,
    placement_problems,
    weight_problems,
)
from kvpager.errors import UnsupportedModelError

_PLAIN_LAYERS = ("full_attention", "sliding_attention")
_MOVING_ROPE = ("dynamic", "longrope")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_WORDS = ("expert", "moe", "router")  # of names of modules and of their classes


def check_supported(model: Any, *, one_at_a_time: bool = False) -> PreTrainedModel:
    """Returns the model, typed; of one that peft has wrapped, the model inside.

    With `one_at_a_time` a forward has tokens of one sequence only if the model has recurrent
    layers, so that it may have them.

    Raises:
        UnsupportedModelError: the token at a position would not be a pure function of the tokens
            before it, or the model is not of a kind that is run here. Says why and what to do.
    """
    model = _unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        remedy = ", as AutoModelForCausalLM.from_pretrained(...) returns"
        if hasattr(model, "_orig_mod"):
            remedy = ", and this one is compiled: pass its _orig_mod"
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}; expected a transformers causal LM{remedy}"
        )
    if why_not := why_unsupported(model, one_at_a_time=one_at_a_time):
        raise UnsupportedModelError(f"{type(model).__name__}: {why_not}")
    return model


def _unwrapped(model: Any) -> Any:
    """The model inside a `PeftModel`, whose adapters are layers of it."""
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__} whose adapter puts vectors before every prompt "
            "(prompt learning), which are no tokens; expected adapters of layers, such as LoRA"
        )
    return model.get_base_model()


def require_exact_experts(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if rows that share an expert change one another's results."""
    if why_not := why_inexact_experts(model):
        raise UnsupportedModelError(f"{type(model).__name__}: {why_not}")


def why_unsupported(
    model: PreTrainedModel, *, loaded: bool = True, one_at_a_time: bool = False
) -> str:
    """Why `check_supported` refuses a model, and what to do; empty if it does not.

    With `loaded` False its weights may be nowhere: what is asked is whether it would be refused
    once they are in memory.
    """
    problems = _problems(model, loaded, one_at_a_time)
    return next(("; ".join(filter(None, problem)) for problem in problems), "")


def rope_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Reason and remedy for every rope_type of a configuration that is none of a position alone."""
    for rope_type in sorted(_rope_types(config)):
        if rope_type in _MOVING_ROPE:
            yield (
                f"RoPE type {rope_type!r} computes its frequencies from the longest position of "
                "the whole forward, so that a key depends on what else was in it",
                'use "default", "linear", "llama3" or "yarn" in config.rope_parameters',
            )


def has_experts(model: Any) -> bool:
    """Whether rows choose among several experts.

    Some configurations number experts, and a switch beside that number leaves them out.
    """
    if not any((getattr(model.config, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        return False
    return any(
        has_expert_weights(module)
        or any(word in f"{name} {type(module).__name__}".lower() for word in _EXPERT_WORDS)
        for name, module in model.named_modules()
        if name
    )


def require_known_experts(model: Any, modules: Iterable[torch.nn.Module]) -> None:
    """Raises UnsupportedModelError if rows choose among experts that no module of these holds.

    Then there is nothing to try alone, and a whole model proves too little about experts.
    """
    if has_experts(model) and not any(map(has_expert_weights, modules)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its experts are not held together as matrices of one module, "
            "so their rows could not be shown to be independent; use an architecture of "
            'transformers whose experts run with "batched_mm"'
        )


def _problems(
    model: PreTrainedModel, loaded: bool, one_at_a_time: bool
) -> Iterator[tuple[str, str]]:
    config = model.config
    yield from _kind_problems(model)
    if loaded:
        yield from placement_problems(model)
        yield from _tuning_problems()
    recurrent = is_recurrent(model)
    mixing = sorted(set(getattr(config, "layer_types", None) or ()) - set(_PLAIN_LAYERS))
    if recurrent and not one_at_a_time:
        kinds = ", ".join(mixing) or "linear_attention"
        yield (
            f"layers of type {kinds} mix rows or keep state other than K/V, so that a row's bits "
            "depend on what its forward holds",
            'use exact="reuse", under which a forward holds tokens of one sequence, and states are '
            "kept between chunks",
        )
    elif mixing and not recurrent:
        yield (_layer_problem(config, mixing), "")
    yield from rope_problems(config)


def _layer_problem(config: Any, kinds: list[str]) -> str:
    chunk = getattr(config, "attention_chunk_size", None)
    if kinds == ["chunked_attention"]:
        return (
            f"layers of type chunked_attention let a row see its own stretch of {chunk} positions "
            "alone, and attention here is over every key up to a row's own, or over the last ones "
            "of a window"
        )
    return (
        f"layers of type {', '.join(kinds)} are not known here: what they attend to, or keep "
        "beside K/V, would be lost"
    )


def _kind_problems(model: Any) -> Iterator[tuple[str, str]]:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield "an encoder-decoder has no causal prefix to keep", "use a decoder-only causal LM"
    if config.get_text_config() is not config:
        yield (
            "a model of several parts (vision, audio, text) embeds more than token ids",
            "load its text model alone, with AutoModelForCausalLM",
        )
    if model.get_output_embeddings() is None:
        yield (
            "it has no language-model head",
            "load it with AutoModelForCausalLM rather than AutoModel",
        )
    if not getattr(config, "is_causal", True):
        yield "its attention is not causal", "use a causal LM"
    if compiled := compiled_part(model):
        yield (
            f"{compiled} is compiled (torch.compile, model.compile()), and what a compiler makes "
            "of it depends on the row count and cannot be watched",
            "load the model again and leave it uncompiled",
        )
    yield from weight_problems(model)
    if model.training:
        yield "it is in training mode (dropout is random)", "call model.eval() first"


def _tuning_problems() -> Iterator[tuple[str, str]]:
    if tunes_kernels():
        yield (
            "torch.cuda.tunable times kernels and takes the fastest, so that a row's bits depend "
            "on the run",
            "call torch.cuda.tunable.enable(False), or unset PYTORCH_TUNABLEOP_ENABLED",
        )


def why_inexact_experts(model: PreTrainedModel) -> str:
    """Why rows of a model change one another's results in its experts; empty if they do not.

    It is asked where transformers runs them, of a model whose forwards hold several sequences.
    """
    implementation = getattr(model.config, "_experts_implementation", None)
    if is_recurrent(model) or not has_experts(model) or implementation == "batched_mm":
        return ""
    settable: Any = getattr(type(model), "_can_set_experts_implementation", None)
    if settable is not None and not settable():
        return (
            "rows that share an expert change one another's results, and transformers has no other "
            "way to run the experts of this architecture"
        )
    return (
        f"its experts run with {implementation or 'eager'!r}, where rows that share an expert "
        'change one another\'s results; call model.set_experts_implementation("batched_mm") first'
    )


def _rope_types(config: Any) -> set[str]:
    """Every rope_type the configuration names: one for all layers, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return {
        str(parameters.get("rope_type", parameters.get("type", "default")))
        for parameters in nested or [rope]
    }
