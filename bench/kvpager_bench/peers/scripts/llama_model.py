"""A model in llama.cpp's own format, and its low-level interface as we need it.

Shared by the llama_* scripts. What a model of random weights computes is meaningless, what it costs
is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

_ARCHITECTURE = "qwen3"
_SEQUENCE = 0
_WEIGHTS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
}
_KV_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_KV_BYTES = {"f32": 4, "f16": 2}


_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def name_of(tensor: str) -> str:
    """What transformers calls a tensor of a GGUF file: "blk.0.attn_q.weight"."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    first, *middle, _ = tensor.split(".")
    if first != "blk":
        return f"{whole[first]}.weight"
    layer, part = middle
    return f"model.layers.{layer}.{_OF_LAYER[part]}.weight"


def write_model(
    path: Path, shape: Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> None:
    """A GGUF file, or nothing at all when interrupted.

    shape: layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, weights (f32, f16, bf16);
    and, where they are not the usual ones, rope_base, epsilon, tied (the head to the embedding).
    weights: by transformers' names, float32; random ones where they are not given.
    """
    hidden, dim = shape["hidden"], shape["head_dim"]
    q_rows, kv_rows = shape["heads"] * dim, shape["kv_heads"] * dim
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, _ARCHITECTURE)
    writer.add_block_count(shape["layers"])
    writer.add_context_length(131072)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(shape.get("epsilon", 1e-6))
    writer.add_rope_freq_base(shape.get("rope_base", 10000.0))
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(0)

    def given(name: str, expected: tuple[int, ...]) -> Any:
        assert weights is not None
        values = weights[name_of(name)]
        if values.shape != expected or values.dtype != np.float32:
            raise ValueError(f"{name_of(name)} is {values.dtype} {values.shape}, not {expected}")
        return values

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = _WEIGHTS[shape["weights"]]
        if weights is None:
            values = 0.02 * random.standard_normal((rows, columns), dtype=np.float32)
        else:
            values = given(name, (rows, columns))
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        values = np.ones(size, dtype=np.float32) if weights is None else given(name, (size,))
        writer.add_tensor(name, values)

    matrix("token_embd.weight", shape["vocab"], hidden)
    vector("output_norm.weight", hidden)
    if not shape.get("tied", True):
        matrix("output.weight", shape["vocab"], hidden)
    for layer in range(shape["layers"]):
        block = f"blk.{layer}."
        vector(f"{block}attn_norm.weight", hidden)
        vector(f"{block}ffn_norm.weight", hidden)
        vector(f"{block}attn_q_norm.weight", dim)
        vector(f"{block}attn_k_norm.weight", dim)
        matrix(f"{block}attn_q.weight", q_rows, hidden)
        matrix(f"{block}attn_k.weight", kv_rows, hidden)
        matrix(f"{block}attn_v.weight", kv_rows, hidden)
        matrix(f"{block}attn_output.weight", hidden, q_rows)
        matrix(f"{block}ffn_gate.weight", shape["intermediate"], hidden)
        matrix(f"{block}ffn_up.weight", shape["intermediate"], hidden)
        matrix(f"{block}ffn_down.weight", hidden, shape["intermediate"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


class Context:
    """A loaded model and one sequence.

    tokens: room in the KV cache, which is allocated and cleared here. kv: the type of K and V.
    flash: its flash attention, which codes of V need.
    """

    def __init__(
        self,
        model: Path,
        *,
        tokens: int,
        batch: int,
        threads: int,
        kv: str,
        flash: bool = True,
    ) -> None:
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        weights = llama_cpp.llama_model_default_params()
        weights.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), weights)
        if not self._model:
            raise RuntimeError(f"{model.name} cannot be loaded")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = tokens
        settings.n_batch = settings.n_ubatch = batch
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = _KV_TYPES[kv]
        # Its faster way on a CPU, too; and without it V is kept transposed, whose state is put
        # together element by element.
        settings.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        settings.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"no context of {tokens} tokens for {model.name}")
        self.batch = batch
        self.capacity = tokens
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def forward(self, ids: Sequence[int]) -> int:
        """Appends `ids` in batches; the token of the largest logit after them."""
        for start in range(0, len(ids), self.batch):
            part = ids[start : start + self.batch]
            array = (llama_cpp.llama_token * len(part))(*part)
            code = llama_cpp.llama_decode(
                self._context, llama_cpp.llama_batch_get_one(array, len(part))
            )
            if code:
                raise RuntimeError(f"llama_decode answered {code} at token {start}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def logits(self, ids: Sequence[int], last: int) -> Any:
        """Appends `ids` in batches; float32 [last, vocab], the logits after each of the last."""
        said = np.empty((last, self._vocab), dtype=np.float32)
        first = len(ids) - last
        batch = llama_cpp.llama_batch_init(self.batch, 0, 1)
        try:
            for start in range(0, len(ids), self.batch):
                part = ids[start : start + self.batch]
                batch.n_tokens = len(part)
                for row, token in enumerate(part):
                    batch.token[row] = token
                    batch.pos[row] = start + row
                    batch.n_seq_id[row] = 1
                    batch.seq_id[row][0] = _SEQUENCE
                    batch.logits[row] = start + row >= first
                code = llama_cpp.llama_decode(self._context, batch)
                if code:
                    raise RuntimeError(f"llama_decode answered {code} at token {start}")
                for row in range(max(0, first - start), len(part)):
                    found = llama_cpp.llama_get_logits_ith(self._context, row)
                    said[start + row - first] = np.ctypeslib.as_array(found, shape=(self._vocab,))
        finally:
            llama_cpp.llama_batch_free(batch)
        return said

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def save(self, path: Path, ids: Sequence[int]) -> int:
        """Writes the sequence's state; bytes of the file."""
        array = (llama_cpp.llama_token * len(ids))(*ids)
        size = llama_cpp.llama_state_seq_save_file(
            self._context, str(path).encode(), _SEQUENCE, array, len(ids)
        )
        if not size:
            raise RuntimeError(f"the state was not saved to {path.name}")
        return int(size)

    def load(self, path: Path) -> int:
        """Reads a sequence's state; tokens in it."""
        array = (llama_cpp.llama_token * self.capacity)()
        count = ctypes.c_size_t()
        size = llama_cpp.llama_state_seq_load_file(
            self._context,
            str(path).encode(),
            _SEQUENCE,
            array,
            self.capacity,
            ctypes.byref(count),
        )
        if not size:
            raise RuntimeError(f"the state in {path.name} was not restored")
        return count.value


def write_state(path: Path, shape: Mapping[str, Any], tokens: int, kv: str) -> int:
    """The state file of a sequence of `tokens` random K/V, as llama_state_seq_save_file writes it.

    For contexts whose prefill takes too long; bytes of the file. The layout is that of the pinned
    version, which refuses another one.
    """
    random = np.random.default_rng(tokens)
    row = shape["kv_heads"] * shape["head_dim"]
    dtype = {"f32": np.float32, "f16": np.float16}[kv]
    cells = np.zeros((tokens, 3), dtype=np.int32)  # position, sequences in it, the sequence
    cells[:, 0] = np.arange(tokens)
    cells[:, 1] = 1
    with path.open("wb") as file:
        head = (llama_cpp.LLAMA_STATE_SEQ_MAGIC, llama_cpp.LLAMA_STATE_SEQ_VERSION, tokens)
        file.write(struct.pack("<3I", *head))
        file.write(random.integers(0, shape["vocab"], tokens, dtype=np.int32).tobytes())
        file.write(struct.pack("<2I", 1, tokens))  # streams, cells
        file.write(cells.tobytes())
        file.write(struct.pack("<2I", 0, shape["layers"]))  # V is not transposed
        for _ in range(2 * shape["layers"]):  # K of every layer, then V
            file.write(struct.pack("<iQ", _KV_TYPES[kv], row * _KV_BYTES[kv]))
            values = random.standard_normal((tokens, row), dtype=np.float32)
            file.write(values.astype(dtype).tobytes())
        return file.tell()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Its warnings and errors are shown when a script fails; what it tells besides is a lot."""
    if level >= 3:
        with contextlib.suppress(UnicodeDecodeError):
            print(text.decode(), end="", file=sys.stderr)
