"""Converts a transformers GenerationConfig to options; refuses unsupported fields by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from transformers import GenerationConfig

MODEL = "model"
AUTO: Final = "auto"

ConfigLike: TypeAlias = "GenerationConfig | Literal['auto', 'model'] | None"

HONOURED = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "sequence_bias",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "eos_token_id",
    "stop_strings",
    "max_new_tokens",
)

_BEAMS = "is read by beam search only, which is refused with num_beams"
_GUESSES = "asks for guesses that a forward verifies; `speculate=` does, with the same text"
_OUTPUTS = "chooses what is returned; `logprobs=` and `top_logprobs=` do"
_CACHE = "chooses a cache; the pager is one"
_SPEED = "changes the time, not the text"

# Of `model.generate`, where neither a config nor the model's own says anything.
DEFAULTS_OF_TRANSFORMERS: Mapping[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}

# Fields that do not change the text, with the reason.
IGNORED: Mapping[str, str] = {
    "max_length": "max_new_tokens counts the tokens, as in transformers where both are given",
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "diversity_penalty": "is read with num_beam_groups only, which is refused",
    "renormalize_logits": "adds the same number to all logits, which changes no choice",
    "remove_invalid_values": "logits that are not finite are a NonFiniteError",
    "use_cache": _CACHE,
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "prefill_chunk_size": _SPEED,
    "compile_config": _SPEED,
    "disable_compile": _SPEED,
    "low_memory": "is read by contrastive search only, which is refused with penalty_alpha",
    "continuous_batching_config": _SPEED,
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "output_scores": _OUTPUTS,
    "output_logits": _OUTPUTS,
    "return_dict_in_generate": _OUTPUTS,
    "pad_token_id": "sessions have no padding",
    "bos_token_id": "a prompt is used as it is given",
    "decoder_start_token_id": "is of models with an encoder, which engines refuse",
    "use_mtp": _GUESSES,
    "is_assistant": _GUESSES,
    "num_assistant_tokens": _GUESSES,
    "num_assistant_tokens_schedule": _GUESSES,
    "assistant_confidence_threshold": _GUESSES,
    "prompt_lookup_num_tokens": _GUESSES,
    "max_matching_ngram_size": _GUESSES,
    "assistant_early_exit": _GUESSES,
    "assistant_lookbehind": _GUESSES,
    "target_lookbehind": _GUESSES,
    "speculation_type": _GUESSES,
    "transformers_version": "says who wrote the file",
}

# Fields that change the text, and the values besides None with which they do not.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "constraints": (),
    "force_words_ids": (),
    "assistant_ensemble_weight": (),
}

# Likewise, of sampling alone.
REFUSED_OF_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}


def options_of(config: object, model: Any) -> dict[str, Any]:
    """The options that `model.generate` would use with this config; see `GenerationOptions`.

    What the config leaves at None is taken from the model's own, then from the defaults of
    transformers, as `model.generate` does.

    Args:
        config: a GenerationConfig; "model" for the model's own; "auto" for that where it samples,
            else no options; None for no options.
        model: a transformers model.

    Raises:
        InvalidArgumentError: no config, or one that asks for what is not honoured; names every such
            field with its value.
    """
    own = getattr(model, "generation_config", None)
    is_text = isinstance(config, str)
    if config is None or (is_text and config == AUTO and not getattr(own, "do_sample", False)):
        return {}
    if is_text and config == AUTO:
        config = own
    elif is_text and config == MODEL:
        if own is None:
            raise InvalidArgumentError(
                'generation_config is "model", but the model has no generation_config'
            )
        config = own
    from transformers import GenerationConfig

    if not isinstance(config, GenerationConfig):
        raise InvalidArgumentError(
            f"generation_config is {config!r}; expected a transformers GenerationConfig, "
            '"auto", "model" or None'
        )
    values = _resolved(config, own)
    _refuse_others(values, GenerationConfig)
    options: dict[str, Any] = _filters(values)
    if values.get("repetition_penalty") is not None:
        options["repetition_penalty"] = values["repetition_penalty"]
    ends = values.get("eos_token_id")
    if ends is not None:
        options["eos"] = ends
    if values.get("sequence_bias"):
        options["logit_bias"] = {ids[0]: bias for ids, bias in _biases(values["sequence_bias"])}
    if forbidden := [*_listed(values.get("suppress_tokens")), *_bad_words(values)]:
        options["suppress_tokens"] = forbidden
    if first := _listed(values.get("begin_suppress_tokens")):
        options["begin_suppress_tokens"] = first
    if strings := values.get("stop_strings"):
        options["stop"] = [strings] if isinstance(strings, str) else list(strings)
    if values.get("max_new_tokens") is not None:
        options["max_new_tokens"] = values["max_new_tokens"]
    return options


def _resolved(config: Any, own: Any) -> dict[str, Any]:
    """The config's fields; where they are None, the model's, then the defaults of transformers."""
    values = dict(vars(config))
    for others in ({} if own is None else vars(own), DEFAULTS_OF_TRANSFORMERS):
        for name, value in others.items():
            if values.get(name) is None:
                values[name] = value
    return values


def _filters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, top_k, top_p and min_p; without do_sample they are not read."""
    if not values.get("do_sample"):
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: values[name] for name in names if values.get(name) is not None}


def _refuse_others(values: Mapping[str, Any], kind: type[GenerationConfig]) -> None:
    """Raises InvalidArgumentError for fields that would change the text and are not honoured."""
    refused = dict(REFUSED)
    if values.get("do_sample"):
        refused.update(REFUSED_OF_SAMPLING)
    known = {*HONOURED, *IGNORED, *REFUSED, *REFUSED_OF_SAMPLING}
    # A field of a later transformers; what a model's file has beside them, transformers ignores.
    refused.update({name: () for name in vars(kind()) if name[0] != "_" and name not in known})
    found = [
        f"{name}={values[name]!r}"
        for name, neutral in refused.items()
        if values.get(name) is not None and values[name] not in neutral
    ]
    for name, sequences in (
        ("sequence_bias", [ids for ids, _ in _biases(values.get("sequence_bias"))]),
        ("bad_words_ids", values.get("bad_words_ids") or ()),
    ):
        longer = [list(ids) for ids in sequences if len(ids) != 1]
        if longer:
            found.append(f"{name} of {len(longer)} sequences of several tokens, {longer[0]} first")
    if found:
        raise InvalidArgumentError(
            f"generation_config has {', '.join(found)}: not supported. Honoured are "
            f"{', '.join(HONOURED)}, the biases of single tokens only; unset the others, use "
            "logits_processor=, or generation_config=None to use none of it"
        )


def _biases(given: Any) -> list[tuple[tuple[int, ...], float]]:
    """(token ids, bias) of a dictionary, or of a list of pairs."""
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    return [(tuple(ids), bias) for ids, bias in pairs]


def _bad_words(values: Mapping[str, Any]) -> list[int]:
    """Single tokens of bad_words_ids; transformers leaves out those that end the text."""
    ends = set(_listed(values.get("eos_token_id")))
    return [ids[0] for ids in values.get("bad_words_ids") or () if ids[0] not in ends]


def _listed(given: Any) -> list[int]:
    if given is None:
        return []
    if hasattr(given, "tolist"):
        given = given.tolist()
    return list(given) if isinstance(given, Iterable) else [given]
