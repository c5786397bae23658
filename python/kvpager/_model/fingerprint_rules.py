"""The meaning of each field of a fingerprint, and what to do if it differs.

Separate from `identity.fingerprint`, which computes them, so that stores need not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Rule:
    """The meaning of one field of a fingerprint, and what to do if it differs.

    Attributes:
        meaning: what the field holds.
        waivable: False: the K/V mean something else, and the snapshot is always refused. True: only
            last bits may differ, so `on_mismatch="approximate"` accepts it; its chunks are then
            never shared as exact.
        remedy: what to do about a mismatch.
        only_on: whose fingerprints have it: a kind of device, or "codes", those of K/V in fewer
            bits; "converted", those of converted K/V; "linear", those whose linear layers are
            kvpager's own products; empty: all.
        follows: it changes with waivable fields, and is waived only together with one of them.
    """

    meaning: str
    waivable: bool = False
    remedy: str = "load the model and settings it was saved with"
    only_on: str = ""
    follows: bool = False

    @property
    def on_mismatch(self) -> str:
        """In one word: "refuse", or "waivable"."""
        return "waivable" if self.waivable else "refuse"


_MODEL = "load the model it was saved with"
_KV_DTYPE = "set PagerConfig.kv_dtype to the value it was saved with"
_SAME_BUILD = "use the release it was saved with"

# Every field of `describe`, in its order. A field that is not here is refused where it differs.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "architecture": Rule("class of the model", remedy=_MODEL),
        "weights": Rule(
            "digest of every parameter and buffer as it is in memory, adapters included",
            remedy="load the weights (and adapters) it was saved with",
        ),
        "additions": Rule(
            "digest of what was added to the model: adapters and their settings, custom modules, "
            "hooks, replaced methods; empty for none",
            remedy="activate the adapters it was saved with, as they were, without other hooks",
        ),
        "model_config": Rule("digest of what the model's configuration changes", remedy=_MODEL),
        "model_dtype": Rule("dtype the model computes in", remedy=_MODEL),
        "rope": Rule("parameters of the rotary embedding", remedy=_MODEL),
        "layers": Rule("layers of a chunk", remedy=_MODEL),
        "kv_heads": Rule("key/value heads of a layer", remedy=_MODEL),
        "k_dim": Rule("head_dim of keys", remedy=_MODEL),
        "v_dim": Rule("head_dim of values", remedy=_MODEL),
        "k_dtype": Rule("dtype keys are kept in", remedy=_KV_DTYPE),
        "v_dtype": Rule("dtype values are kept in", remedy=_KV_DTYPE),
        "kv_rotation": Rule(
            "which of keys and values are rotated before they become codes",
            remedy="set PagerConfig.kv_rotation to the value it was saved with",
            only_on="codes",
        ),
        "float_layers": Rule(
            "layers that are no codes, and their dtype",
            remedy="set PagerConfig.float_layers to the value it was saved with",
            only_on="codes",
        ),
        "kv_converted": Rule(
            "what K/V were kept in before they were converted to these dtypes",
            waivable=True,
            remedy="use a snapshot that was saved without a kv_dtype of its own",
            only_on="converted",
        ),
        "chunk_tokens": Rule(
            "tokens per chunk",
            remedy="set PagerConfig.chunk_tokens to the value it was saved with",
        ),
        "exact": Rule(
            'what decided the row count of a forward: "rows" (one of those proven), "aligned" (a '
            'chunk of one sequence, of a model with recurrent layers), or "none"',
            waivable=True,
            remedy="set PagerConfig.exact to the mode it was saved with",
        ),
        "linear": Rule(
            "whose products linear layers are, where they are not torch's, and their version",
            waivable=True,
            remedy="set PagerConfig.linear to what it was saved with",
            only_on="linear",
        ),
        "rows": Rule(
            "class of row counts that forwards have, by the smallest that was proven to be of it",
            waivable=True,
            remedy="set PagerConfig.rows and PagerConfig.small_rows to what it was saved with",
        ),
        "head_rows": Rule(
            "the same, of the output head",
            waivable=True,
            remedy="set PagerConfig.small_rows to what it was saved with",
        ),
        "selection": Rule(
            "what a row attends to",
            remedy="set PagerConfig.selection to the one it was saved with",
        ),
        "scorer": Rule("what made the summaries", remedy="prefill the text again"),
        "salt": Rule(
            "digest of the tenant's salt, made slowly; empty for none, and in a snapshot whose "
            "session section has it",
            remedy="use the salt it was saved under",
        ),
        "behaviour": Rule(
            "digest of what a forward of made-up tokens gives, and of all arguments of its "
            "attention calls",
            follows=True,
            remedy="load the model as it was, with its adapters, hooks and patches",
        ),
        "device": Rule(
            "kind of device that computed it",
            waivable=True,
            remedy="use the device it was saved on",
        ),
        "chunks_per_split": Rule("chunks per partial sum of attention", remedy=_SAME_BUILD),
        "kernel_version": Rule(
            "version of our own arithmetic; of tensor cores with that word",
            waivable=True,
            remedy="use the kvpager it was saved by, and PagerConfig.attention as it was",
        ),
        "torch_version": Rule("release of torch", waivable=True, remedy=_SAME_BUILD),
        "transformers_version": Rule("release of transformers", waivable=True, remedy=_SAME_BUILD),
        "processor": Rule(
            "instruction sets, or the GPU, that torch's matrix products choose by; with recurrent "
            "layers on the CPU also where weights begin within a cache line",
            waivable=True,
            remedy="use a processor or GPU like the one it was saved on, and load the model alike",
        ),
        "threads": Rule(
            "threads of torch, on the CPU",
            waivable=True,
            remedy="call torch.set_num_threads with the value it was saved with",
        ),
        "mkl_cbwr": Rule(
            "MKL_CBWR in the environment",
            waivable=True,
            remedy="start the process with the value it was saved with",
        ),
        "matmul_precision": Rule(
            "torch's float32 matmul precision",
            waivable=True,
            remedy="call torch.set_float32_matmul_precision with the value it was saved with",
        ),
        "cuda": Rule(
            "releases of CUDA and cuBLAS, on a GPU",
            waivable=True,
            remedy=_SAME_BUILD,
            only_on="cuda",
        ),
        "cuda_settings": Rule(
            "switches of torch's matrix products, on a GPU",
            waivable=True,
            remedy="set them, and CUBLAS_WORKSPACE_CONFIG, as they were when it was saved",
            only_on="cuda",
        ),
    }
)
# Numerics: another value may change last bits, and a caller may accept that.
WAIVABLE = tuple(name for name, rule in RULES.items() if rule.waivable)
FOLLOWING = tuple(name for name, rule in RULES.items() if rule.follows)
# Fields that a conversion changes, and the one that it adds.
CONVERTIBLE = ("k_dtype", "v_dtype", "kv_rotation", "float_layers")
CONVERTED = "kv_converted"
# What a caller may say of a difference: kvpager._model.identity.fingerprint.compare.
ON_MISMATCH = ("refuse", "approximate", "convert")
