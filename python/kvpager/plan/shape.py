"""What a model takes, in numbers: parameters by what they are for, and the shape of its K/V.

A shape is read from a configuration alone. The model is built without memory for its weights, so
that what is counted is what transformers would load, whatever the architecture.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpager import _core
from kvpager._model import pretrained
from kvpager._model.layout import Layout
from kvpager.errors import InvalidArgumentError, UnsupportedModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST_LAYERS = 1024  # of a Layout


@dataclass(frozen=True)
class ModelShape:
    """A causal LM as far as memory goes.

    Attributes:
        name: class of the model.
        dtype: of its weights: "float32", "bfloat16" or "float16".
        layers, hidden, intermediate: as in the configuration.
        q_heads, kv_heads: attention heads of a layer, and key/value heads.
        k_dim, v_dim: elements of a key and of a value.
        vocab: token ids.
        max_positions: the longest context it was made for; 0 if its configuration does not say.
        layer_parameters: elements of all layers together, experts apart; every row goes through
            them.
        embedding_parameters: elements of the token embedding, of which a row reads one line.
        head_parameters: elements of the output head; the embedding's where `tied`.
        tied: the head is the embedding, and is in memory once.
        experts, experts_per_token: of a layer with experts, and how many of them a row takes.
        expert_layers: layers that have experts.
        expert_parameters: elements of one expert of one layer.
        gathers_experts: forwards copy the matrices of the experts that their rows chose, for each
            row: on a GPU, and on a CPU where they are none of kvpager's products.
    """

    name: str
    dtype: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    vocab: int
    max_positions: int
    layer_parameters: int
    embedding_parameters: int
    head_parameters: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    expert_parameters: int = 0
    gathers_experts: bool = True

    @property
    def parameters(self) -> int:
        """Elements in memory."""
        head = 0 if self.tied else self.head_parameters
        return self.layer_parameters + self.all_expert_parameters + self.embedding_parameters + head

    @property
    def all_expert_parameters(self) -> int:
        """Elements of all experts of all layers."""
        return self.expert_layers * self.experts * self.expert_parameters

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the weights."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self.parameters * self.dtype_bytes


@dataclass(frozen=True)
class KvShape:
    """Bytes of K/V and of key summaries, as a pager lays them out.

    Attributes:
        layers: of the model.
        chunk_tokens: tokens of a chunk.
        chunk_bytes: a chunk in the pool, the padding of its tiles included.
        slice_bytes: its part of one layer, of the largest one.
        token_bytes: a token's K/V, as a full cache holds them.
        summary_bytes: summaries of one chunk, of all layers and heads.
    """

    layers: int
    chunk_tokens: int
    chunk_bytes: int
    slice_bytes: int
    token_bytes: int
    summary_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, chunk_tokens: int, kv_dtype: str) -> KvShape:
        """The K/V of a model, kept in `kv_dtype` ("auto": the weights')."""
        layout = Layout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            chunk_tokens=chunk_tokens,
            k_dim=shape.k_dim,
            v_dim=shape.v_dim,
            k_dtype=shape.dtype,
            v_dtype=shape.dtype,
        )
        return cls.of_layout(layout.kept_as(kv_dtype).native())

    @classmethod
    def of_layout(cls, layout: _core.Layout) -> KvShape:
        """The same of a layout of the core."""
        pages = layout.layers * layout.kv_heads
        return cls(
            layers=layout.layers,
            chunk_tokens=layout.chunk_tokens,
            chunk_bytes=layout.chunk_bytes,
            slice_bytes=layout.largest_slice_bytes,
            token_bytes=layout.token_bytes,
            summary_bytes=pages * _summary_bytes(layout),
        )

    def chunks(self, tokens: int) -> int:
        """Chunks that hold so many tokens."""
        return -(-tokens // self.chunk_tokens)


def _summary_bytes(layout: _core.Layout) -> int:
    """Bytes of the summary of one (chunk, layer, kv head), as csrc/kernels/bits2.cc lays it out."""
    dims = -(-layout.k_dim // 32) * 32
    return dims * layout.chunk_tokens // 4 + -(-(3 * dims + 8) // 64) * 64


def read_shape(path: str | Path, dtype: str = "auto", *, exact: bool = True) -> ModelShape:
    """The shape of the model that a configuration describes. No weights are read or made.

    Args:
        path: a folder with a config.json, such a file under any name, or a GGUF file.
        dtype: of the weights; "auto": the configuration's, float32 if it names none.
        exact: whether the engine is to keep its promise; see `PagerConfig.exact`.

    Raises:
        InvalidArgumentError: there is no such file, or it describes no causal LM.
        UnsupportedModelError: an engine would refuse the model; says why and what to do.
    """
    config = _read_config(Path(path))
    wanted = _dtype_of(config, dtype)
    model = _without_weights(config, wanted, path)
    if exact and _has_experts(config):
        model.set_experts_implementation("batched_mm")  # what exactness asks for
    return shape_of(model, wanted, exact=exact, loaded=False)


def shape_of(
    model: Any, dtype: str = "auto", *, exact: bool = True, loaded: bool = True
) -> ModelShape:
    """The shape of a transformers causal LM, whether or not its weights are in memory.

    Raises:
        UnsupportedModelError: an engine would refuse it, or it has recurrent layers, whose states
            are not counted here.
    """
    from kvpager._model.seam.expert_products import takes_experts
    from kvpager._model.seam.linear import has_fast_products
    from kvpager._model.seam.recurrent import is_recurrent
    from kvpager._model.seam.support import why_inexact_experts, why_unsupported

    if is_recurrent(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}: a plan does not count layers that carry a state; try the "
            'model itself, with Engine(model, exact="reuse", pool_tokens=...)'
        )
    own_experts = takes_experts(model) and has_fast_products(model.dtype)
    why_not = why_unsupported(model.eval() if not loaded else model, loaded=loaded)
    if exact and not own_experts:
        why_not = why_not or why_inexact_experts(model)
    if why_not:
        raise UnsupportedModelError(f"{type(model).__name__}: {why_not}")
    config = copy.copy(model.config)
    # What differs from layer to layer is taken as the configuration has it for all of them.
    config.allow_global_per_layer_attribute_access = True
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    by_module = [
        [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
        for module in model.modules()
    ]
    experts = [parameter for those in by_module for parameter in those]
    layers_with_experts = sum(map(bool, by_module))
    number = experts[0].shape[0] if experts else 0
    of_experts = sum(parameter.numel() for parameter in experts)
    tied = head.weight is embedding.weight or bool(getattr(config, "tie_word_embeddings", False))
    in_layers = (
        sum(parameter.numel() for parameter in model.parameters())
        - embedding.weight.numel()
        - (0 if head.weight is embedding.weight else head.weight.numel())
        - of_experts
    )
    q_heads = int(config.num_attention_heads)
    k_dim, v_dim = _head_dims(config)
    return ModelShape(
        name=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        q_heads=q_heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or q_heads),
        k_dim=k_dim,
        v_dim=v_dim,
        vocab=int(embedding.weight.shape[0]),
        max_positions=int(getattr(config, "max_position_embeddings", None) or 0),
        layer_parameters=in_layers,
        embedding_parameters=embedding.weight.numel(),
        head_parameters=head.weight.numel(),
        tied=tied,
        experts=number,
        experts_per_token=int(getattr(config, "num_experts_per_tok", 0) or 0) if number else 0,
        expert_layers=layers_with_experts,
        expert_parameters=of_experts // (number * layers_with_experts) if number else 0,
        gathers_experts=not own_experts,
    )


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    if path.suffix == pretrained.GGUF:
        config = pretrained.load_config(path)
        config.dtype = "bfloat16"  # what it is loaded in
        return config
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidArgumentError(
            f"{path}: there is no {'config.json in it' if path.is_dir() else 'such file or folder'}"
            "; expected the folder of a transformers causal LM or its config.json (nothing is "
            "downloaded)"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InvalidArgumentError(
            f"{file}: it has no model_type; expected the configuration of a transformers model"
        )
    with _complaints_of(file):
        values.pop("transformers_version", None)
        return AutoConfig.for_model(**values)


def _without_weights(config: Any, dtype: str, path: str | Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # each is made, if without weights
        raise InvalidArgumentError(
            f"{path}: num_hidden_layers is {layers}; expected 1 to {_MOST_LAYERS}"
        )
    with _complaints_of(path), torch.device("meta"):
        model: Any = AutoModelForCausalLM
        return model.from_config(config, dtype=getattr(torch, dtype))


@contextmanager
def _complaints_of(path: str | Path) -> Iterator[None]:
    """Turns what transformers says of a configuration into a refusal."""
    try:
        yield
    except Exception as error:  # whatever an architecture makes of numbers it did not expect
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidArgumentError(
            f"{path}: transformers cannot make a causal LM of it: {reason[:300]}"
        ) from error


def _dtype_of(config: Any, wanted: str) -> str:
    if wanted == "auto":
        wanted = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if wanted not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"its dtype is {wanted}; choose one of {', '.join(DTYPE_BYTES)} with --dtype"
        )
    return wanted


def _has_experts(config: Any) -> bool:
    return any(
        (getattr(config, name, None) or 0) > 1
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )


def _head_dims(config: Any) -> tuple[int, int]:
    rope = getattr(config, "qk_rope_head_dim", None)
    if rope:  # latent attention, whose keys and values are as heads see them
        return int(config.qk_nope_head_dim) + int(rope), int(config.v_head_dim)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(dim), int(dim)
