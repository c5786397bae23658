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
}
_KV_BYTES = {"f32": 4, "f16": 2}


def write_model(path: Path, shape: Mapping[str, Any]) -> None:
    """A GGUF file of random weights, or nothing at all when interrupted.

    shape: layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, weights (f32, f16, bf16).
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
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = _WEIGHTS[shape["weights"]]
        values = 0.02 * random.standard_normal((rows, columns), dtype=np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    matrix("token_embd.weight", shape["vocab"], hidden)
    vector("output_norm.weight", hidden)
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
    """

    def __init__(
        self,
        model: Path,
        *,
        tokens: int,
        batch: int,
        threads: int,
        kv: str,
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
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
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
