"""Where each client is installed, and what was tried with it.

`python -m server.clients` in `tests` installs all of them (`make clients`); with `--table` it
prints the table of docs/how_to/http_server.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_ROOT = FOLDER.parents[2]
_INSTALLED = _ROOT / "build" / "clients"
_LONGEST = 600.0
_WRITTEN = {"api": "API", "json": "JSON"}


@dataclass(frozen=True)
class Client:
    """A client. packages: what pip installs; the first one is the one whose version is named."""

    name: str
    title: str
    packages: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Its trials; routers share theirs."""
        name = "router" if self.name.endswith("_router") else self.name
        return FOLDER / f"{name}_client.py"

    @property
    def tried(self) -> list[str]:
        """What its script tries, in words."""
        names = re.findall(r"^(?:async )?def try_(\w+)\(", self.script.read_text("utf-8"), re.M)
        words = [name.split("_") for name in names]
        return [" ".join(_WRITTEN.get(word, word) for word in name) for name in words]

    @property
    def is_made(self) -> bool:
        """Whether `make clients` made an environment for it, or it needs none."""
        return not self.packages or (_INSTALLED / self.name / "bin" / "python").exists()

    @property
    def python(self) -> Path | None:
        """The interpreter that has it: of `make clients`, or this one; None where neither has."""
        if self.packages and self.is_made:
            return _INSTALLED / self.name / "bin" / "python"
        try:
            for package in self._distributions:
                importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None
        return Path(sys.executable)

    @property
    def version(self) -> str:
        """The version of its first package, where it is installed."""
        if not self.packages:
            return ""
        code = f"import importlib.metadata as m; print(m.version({self._distributions[0]!r}))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    @property
    def _distributions(self) -> list[str]:
        return [re.split(r"[\[<>=]", package)[0] for package in self.packages]

    def install(self) -> None:
        """Makes its environment."""
        folder = _INSTALLED / self.name
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
        try:
            subprocess.run([*pip, "--quiet", *self.packages], check=True)
        except subprocess.CalledProcessError:
            (folder / "bin" / "python").unlink()  # half an environment is none
            raise

    def run(self, url: str, model: Path) -> subprocess.CompletedProcess[str]:
        """Runs its script against the server at `url`, whose model lies in `model`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI_"))}
        offline = {
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "DO_NOT_TRACK": "1",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        return subprocess.run(
            [self.python, self.script, url, model],
            env={**kept, **offline},
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            check=False,
        )


CLIENTS = (
    Client("openai", "openai", ("openai",)),
    Client("anthropic", "anthropic", ("anthropic",)),
    Client("litellm", "litellm", ("litellm",)),
    Client("litellm_proxy", "litellm's proxy", ("litellm[proxy]",)),
    Client("langchain", "LangChain", ("langchain", "langchain-openai", "langchain-anthropic")),
    Client("llama_index", "LlamaIndex", ("llama-index-llms-openai-like", "llama-index-core")),
    Client("pydantic_ai", "pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("instructor", "instructor", ("instructor",)),
    Client("openai_agents", "openai-agents", ("openai-agents",)),
    Client("open_webui", "Open WebUI (its requests)"),
    Client("lm_eval", "lm_eval", ("lm_eval[api]", "transformers<5.24")),
    Client("vllm_router", "vllm-router", ("vllm-router",)),
    Client("sglang_router", "sglang-router", ("sglang-router",)),
)
