"""The subject of a verification: a model, a configuration, prompts, and their cold runs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpager._model.weights import numerics
from kvpager._support.children import Job, run_children
from kvpager._support.tokens import TokenIds, TokenIdsLike, as_token_ids
from kvpager.config import PagerConfig, describe_selection
from kvpager.errors import InvalidArgumentError
from kvpager.verify.child import save_buffers
from kvpager.verify.recording import Recording, cold_run
from kvpager.verify.sweep import EFFORTS, Effort, Sweep

if TYPE_CHECKING:
    from kvpager.engine import Engine
    from kvpager.session import Session

_SALTS = itertools.count()  # of this process: no two runs of a harness share a chunk
_CHILD = "kvpager.verify.child"
_EVERYTHING = 1 << 40  # tokens


class Subject:
    """A model and a configuration, which make engines and cold runs for relations.

    A context manager. Engines are opened at their first use and closed together; cold runs are
    cached. Several engines may share the model.
    """

    def __init__(
        self,
        model: Any,
        config: PagerConfig,
        *,
        folder: str | Path | None = None,
        prompts: Iterable[TokenIdsLike] | None = None,
        effort: Effort = "short",
        seed: int = 0,
        engine: Engine | None = None,
        label: str = "",
    ) -> None:
        """Opens the first engine, which checks the model.

        Args:
            model: a transformers causal LM, as for `Engine`, on the device to verify.
            config: under which it is to keep its promise; `config.exact` says what is promised.
            folder: the model's, for runs in fresh processes; by default it is saved to a temporary
                one when such a run is wanted.
            prompts: token ids; the first takes the place of a random long prompt. Short ones, and
                those that are missing, are made up.
            effort: "start", "short" or "full": how much is tried.
            seed: of made-up prompts and of disturbances.
            engine: one that is open already and stays so; `model` and `config` are then its own.
            label: reported with the selection, if one model is verified more than once.

        Raises:
            InvalidArgumentError: `config.exact` is False, which promises nothing.
            UnsupportedModelError: the engine refuses the model.
        """
        if effort not in EFFORTS:
            raise InvalidArgumentError(
                f"effort is {effort!r}; expected {', '.join(map(repr, EFFORTS))}"
            )
        if config.exact is False:
            raise InvalidArgumentError(
                "exact is False, which promises nothing, so there is nothing to verify; set "
                'PagerConfig.exact to "all" or "reuse"'
            )
        self.model = model
        # All bits of a text are compared, so no chunk may be released behind a window.
        self.config = config.replace(rewind_tokens=_EVERYTHING) if engine is None else config
        self.effort: Effort = effort
        self.seed = seed
        self.lengths: set[int] = set()  # of texts that were compared, in tokens
        self._label = label
        self._given_folder = None if folder is None else Path(folder)
        self._given_prompts = list(prompts or ())
        self._stack = ExitStack()
        self._engines: dict[tuple[tuple[str, Any], ...], Engine] = {}
        self._cold: dict[bytes, Recording] = {}
        self._workdir: Path | None = None
        if engine is not None:
            self._engines[()] = engine
        try:
            self._prepare()
        except BaseException:
            self._stack.close()
            raise

    def _prepare(self) -> None:
        engine = self.engine()
        if engine.core.facts.recurrence is None:
            # M follows the pool's size where it is left to the engine; here one M is meant.
            self.config = self.config.replace(rows=engine.rows)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        self.sweep = Sweep.of(self.config, engine.row_counts.ladder, self.effort, longest)
        self.prompt = self._long_prompt(engine.vocab_size)

    @property
    def selection(self) -> str:
        """Describes what rows attend to, in one line."""
        return ", ".join(filter(None, (describe_selection(self.config.selection), self._label)))

    @property
    def device(self) -> str:
        """Where the model is and attention runs: "cpu", "cuda:0 (NVIDIA H100 ...)", "shim"."""
        device = self.model.device
        if device.type == "cpu":
            return "shim" if self.config.device == "shim" else "cpu"
        return f"{device} ({numerics.describe_processor(device)})"

    @property
    def all_exact(self) -> bool:
        """Whether decode, speculation, re-scoring and packing are promised too."""
        return self.config.exact == "all"

    def engine(self, **changes: Any) -> Engine:
        """An engine under the configuration with some options changed; one for equal changes."""
        changes = {
            name: value for name, value in changes.items() if getattr(self.config, name) != value
        }
        key = tuple(sorted(changes.items()))
        if key not in self._engines:
            self._engines[key] = self._stack.enter_context(self.fresh_engine(**changes))
        return self._engines[key]

    def fresh_engine(self, **changes: Any) -> Engine:
        """A new engine that is not shared; the caller closes it."""
        from kvpager.engine import Engine

        return Engine(self.model, self.config.replace(**changes))

    def session(self, engine: Engine | None = None, salt: str | None = None) -> Session:
        """An empty session of `engine`, by default the subject's.

        It shares chunks with none but those of the same `salt`.
        """
        engine = engine or self.engine()
        return engine.adopt(engine.pager.sequence(salt=salt or new_salt()))

    def cold(self, ids: TokenIds) -> Recording:
        """The recording of a cold run of these tokens; computed once."""
        key = np.asarray(ids, dtype=np.int32).tobytes()
        self.lengths.add(len(ids))
        if key not in self._cold:
            longer = self._longer(key)
            self._cold[key] = longer or cold_run(self.engine(), ids, new_salt())
        return self._cold[key]

    def _longer(self, key: bytes) -> Recording | None:
        """A cold run of a text that begins with these tokens serves as well, once proven so.

        Not where layers are recurrent: there a text's tail is computed otherwise than its chunks.
        """
        if self.engine().core.facts.recurrence is not None:
            return None
        return next((run for ids, run in self._cold.items() if ids.startswith(key)), None)

    def forget(self) -> None:
        """Drops all cold runs but the long prompt's."""
        kept = self.prompt.tobytes()
        self._cold = {ids: run for ids, run in self._cold.items() if ids == kept}

    def ids(self, length: int, seed: int) -> TokenIds:
        """Made-up token ids [length], the same for the same seed."""
        random = np.random.default_rng((self.seed, seed))
        return random.integers(0, self.engine().vocab_size, length).astype(np.int32)

    def under(self, **changes: Any) -> Subject:
        """Another subject: the same model under a changed configuration."""
        return Subject(
            self.model,
            self.config.replace(**changes),
            folder=self.folder,
            prompts=self._given_prompts,
            effort=self.effort,
            seed=self.seed,
        )

    def again(self, label: str) -> Subject:
        """Another subject: the same model and configuration, other made-up tokens."""
        return Subject(
            self.model,
            self.config,
            folder=self._given_folder,
            prompts=self._given_prompts,
            effort=self.effort,
            seed=self.seed + 1,
            label=label,
        )

    @property
    def workdir(self) -> Path:
        """A folder for files of this run; it goes with the subject."""
        if self._workdir is None:
            self._workdir = Path(
                self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpager-verify-"))
            )
        return self._workdir

    @property
    def folder(self) -> Path:
        """The model's folder; if it has none, it is saved to a temporary one."""
        if self._given_folder is not None:
            return self._given_folder
        folder = self.workdir / "model"
        if not folder.is_dir():
            with _without_progress_bars():
                self.model.save_pretrained(folder)
            save_buffers(self.model, folder)
        return folder

    def in_fresh_processes(self, *jobs: tuple[Mapping[str, str], Sequence[Job]]) -> list[Any]:
        """Runs tasks, each list in a process of its own with the given environment beside ours.

        Returns, for each list, one result per task; see `child.py`.

        Raises:
            ChildError: a process or a task failed; says which and why.
        """
        about = {
            "model": str(self.folder),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "experts": getattr(self.model.config, "_experts_implementation", None),
            "threads": torch.get_num_threads(),
            "device": str(self.model.device),
            "weights": self.engine().fingerprint["weights"],
        }
        each = [(environment, {**about, "tasks": list(tasks)}) for environment, tasks in jobs]
        return run_children(_CHILD, each, self.workdir)

    def close(self) -> None:
        """Closes the engines it opened, and removes its files."""
        self._cold.clear()
        self._engines.clear()
        self._stack.close()

    def __enter__(self) -> Subject:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _long_prompt(self, vocab_size: int) -> TokenIds:
        length = self.sweep.length
        made_up = self.ids(length, seed=0)
        if not self._given_prompts:
            return made_up
        given = as_token_ids(self._given_prompts[0], vocab_size, "prompts[0]")[:length]
        return np.concatenate([given, made_up[len(given) :]])


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def new_salt() -> str:
    """Returns a salt that no other sequence of this process has."""
    return f"verify {next(_SALTS)}"
