"""The user's handle of one conversation."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np
import torch

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.chat import (
    check_keeps,
    keep_messages,
    plan_turn,
    require_tokenizer,
    settled,
)
from kvpager._runtime.scheduling.completion import Completion
from kvpager._runtime.scheduling.decode import TextStream, TokenStream, begin_streams, require_text
from kvpager._runtime.scheduling.options import repeatable
from kvpager._runtime.scheduling.packing import read_logits
from kvpager._runtime.scheduling.prefill import prefill_all
from kvpager._runtime.scheduling.recompute import recomputing_damage
from kvpager._runtime.scheduling.stream import GeneratedToken, Generation
from kvpager._runtime.scheduling.trim import trim, trim_to_common
from kvpager._runtime.snapshots.freezing import check_metadata, freeze
from kvpager._runtime.snapshots.saving import SaveHandle, Saves
from kvpager._runtime.text.assembly import Assembly
from kvpager._runtime.text.template_input import ControlTokensAs
from kvpager._runtime.text.tokenizer import Message, Rendering
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import Integer, as_flag, as_integer, is_one_of, refusal
from kvpager._support.notebook import card, in_notebook
from kvpager._support.tokens import TextOrIds, TokenIds
from kvpager._support.words import counted
from kvpager.errors import InvalidArgumentError
from kvpager.pager import Ledger, Pin, Sequence
from kvpager.progress import Progress, check_progress, reporting_bytes
from kvpager.sampling import Sampling, fresh_seed
from kvpager.speculation.speculation import SpeculationStats
from kvpager.stores import SaveReport, SnapshotStore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvpager._runtime.scheduling.options import (
        ChatOptions,
        GenerateOptions,
        GenerationOptions,
        SeededOptions,
    )


_HELD = "the tokens the session holds"


class SaveOptions(TypedDict, total=False):
    """Options of `Session.save`, which explains them."""

    store: SnapshotStore | None
    upto: int | None
    overwrite: bool
    kv_dtype: str | None
    progress: Progress


@dataclass(frozen=True)
class Reuse:
    """How much of a text `Session.update` could reuse.

    Attributes:
        total: tokens of the text.
        computed: tokens whose K/V had to be computed.
        changed: position of the first token that differs; the session's old length if the new text
            only extends it.
    """

    total: int
    computed: int
    changed: int

    @property
    def reused(self) -> int:
        """Number of tokens that were not computed."""
        return self.total - self.computed


class Session:
    """Made by `Engine.session`, `Engine.restore` or `fork`. One thread at a time.

    The session's tokens are the committed ones, whose K/V the pager holds, and at most one
    *pending* token: the last one sampled, whose K/V the next forward computes. `tokens`, `length`
    and the prompt that `prefill` takes include it; `committed` does not. An operation that fails
    changes nothing, except that a prefill keeps what its earlier forwards committed; calling it
    again goes on from there.

    With `exact="reuse"` there may be *uncomputed* tokens between the two: decoded tokens whose K/V
    the session computes again, by itself, before a chunk is sealed or saved.
    """

    def __init__(self, core: EngineCore, transcript: Transcript, saves: Saves) -> None:
        """`saves`: the engine's, which waits for saves of its sessions."""
        self.transcript = transcript  # the runtime works on it and the core
        self.core = core
        self._engine_saves = saves
        self._saves = Saves()

    @property
    def sequence(self) -> Sequence:
        """The sequence with its K/V, for inspection; the session owns its chunks."""
        return self.transcript.sequence

    @property
    def committed(self) -> int:
        """Tokens of the session whose K/V the pager holds."""
        self._check_open()
        return self.transcript.committed

    @property
    def pending(self) -> int | None:
        """The token sampled last, if no forward has computed its K/V yet."""
        self._check_open()
        return self.transcript.pending

    @property
    def tokens(self) -> TokenIds:
        """All token ids [length] int32, the pending one included; a copy."""
        self._check_open()
        return self.transcript.tokens

    @property
    def length(self) -> int:
        """Number of tokens, the pending one included."""
        self._check_open()
        return self.transcript.length

    @property
    def closed(self) -> bool:
        """Whether `close` was called, on the session or on its engine."""
        return self.transcript.closed

    @property
    def sampling(self) -> Sampling:
        """Options of the last generation, or the restored ones; before the first, only its seed."""
        return self.transcript.sampling

    @property
    def speculation(self) -> SpeculationStats:
        """Counters of all generations that speculated."""
        return self.transcript.speculation

    @property
    def assembly(self) -> Assembly | None:
        """How `Engine.assemble` put it together; None for any other session."""
        return self.transcript.assembly

    @property
    def generation_start(self) -> int | None:
        """Where the last `generate` or `regenerate` began; None if it was cut or there was none."""
        return self.transcript.generation_start

    @property
    def tokens_computed(self) -> int:
        """Number of prompt tokens whose K/V were computed rather than shared."""
        return self.transcript.tokens_computed

    @property
    def restored_tokens(self) -> int:
        """Number of tokens whose K/V came from a snapshot or a store."""
        return self.transcript.restored_tokens

    @property
    def restored_tokens_consumed(self) -> int:
        """How many of `restored_tokens` have replaced a prefill."""
        return self.transcript.restored_tokens_consumed

    @property
    def recomputed_tokens(self) -> int:
        """Number of tokens computed again because their chunks in a snapshot are damaged."""
        return self.transcript.damage.tokens

    @property
    def logits(self) -> torch.Tensor:
        """Logits [vocab] after the last committed token, in the model's dtype; a copy.

        They are those of the last forward, or one reading row computes them again with the same
        bits. A pending token, which was sampled from these logits, stays pending.

        Raises:
            InvalidArgumentError: the session is empty.
        """
        self._check_open()
        if not self.length:
            raise InvalidArgumentError("logits: the session is empty; call prefill(ids) first")
        logits = self.transcript.known_logits
        return (read_logits(self.core, self.transcript) if logits is None else logits).clone()

    def prefill(self, ids: TextOrIds, *, progress: Progress = None) -> None:
        """Makes the session hold exactly the whole prompt `ids`, computing only what is missing.

        Args:
            ids: the whole prompt, [n] or [1, n]; the session's tokens must be its beginning.
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).

        Raises:
            PrefixMismatchError: `ids` is shorter than or differs from what the session holds;
                `.position` is the first token that differs. RestoreNotConsumedError for a restored
                session.
            InvalidArgumentError: no tokens, not integers, or an id outside the vocabulary.
            CapacityError: the tiers below the pool cannot hold the prompt; says how many bytes it
                needs.
            CorruptSnapshotError: a restored chunk it needs is damaged, and the session was restored
                with `on_corrupt="fail"`.
        """
        self._check_open()
        checked = self.core.read_ids(ids)
        prefill_all(self.core, [(self.transcript, checked)], progress)

    def append(self, ids: TextOrIds, *, progress: Progress = None) -> None:
        """Adds new tokens after the session's own, the pending one included.

        Args:
            ids: the new tokens alone, [n] or [1, n].
            progress: True for a bar on stderr, or a callable (tokens done, tokens in all).

        Raises:
            PagerError: as `prefill` does.
        """
        self._check_open()
        new = self.core.read_ids(ids, special_tokens=not self.length)
        self.prefill(np.concatenate([self.tokens, new]), progress=progress)

    @overload
    def generate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> TextStream: ...

    @overload
    def generate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        logprobs: Literal[False] = False,
        stream: Literal["tokens"],
        **options: Unpack[SeededOptions],
    ) -> TokenStream[int]: ...

    @overload
    def generate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        logprobs: Literal[True],
        stream: Literal["tokens"],
        **options: Unpack[SeededOptions],
    ) -> TokenStream[GeneratedToken]: ...

    def generate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        seed: Integer | None = None,
        logprobs: bool = False,
        stream: bool | Literal["tokens"] = False,
        **options: Unpack[GenerationOptions],
    ) -> Completion | TextStream | TokenStream[int] | TokenStream[GeneratedToken]:
        """Goes on with the text.

        Each token is part of the session as soon as it is produced: one that was interrupted, or
        whose iterator was abandoned, keeps the tokens it has.

        Args:
            max_new_tokens: most tokens to produce, at least 1; None: as generation_config says.
            seed: of sampling. By default an interrupted generation goes on with its own seed (also
                after a save), and every other call derives a new one from the last; a new session
                or fork takes its first from the system. `sampling.seed` is the seed in use; the
                same seed gives the same text again.
            logprobs: whether to compute the log-probability of each token.
            stream: False: produce all of it, and return a `Completion`. True: return an iterator of
                text, each piece as soon as it is complete. "tokens": one of token ids, with
                `logprobs` of `GeneratedToken(id, logprob)`. The iterators' `completion` is set when
                they have ended.
            **options: `kvpager.GenerationOptions`: temperature, top_k, top_p, min_p, penalties,
                logit_bias, logits_processor, generation_config, eos, stop, speculate and others.

        Raises:
            InvalidArgumentError: at the call, for an argument out of range, an unknown option or an
                empty session; from the iterator, for a proposer that misbehaves.
            CapacityError: at the call, if max_new_tokens more do not fit below the pool.
            NonFiniteError: as tokens are produced.
            CorruptSnapshotError: as tokens are produced, for the reasons of `prefill`; generate
                again to go on.
        """
        _check_stream(self.core, stream)
        begun = self._begin(max_new_tokens, seed, logprobs, stream, options)
        return begun if stream else begun.run()

    def _begin(
        self,
        max_new_tokens: Integer | None,
        seed: Integer | None,
        logprobs: bool,
        stream: object,
        options: Mapping[str, Any],
        called: float | None = None,
    ) -> TextStream | TokenStream[Any]:
        """The iterator of `generate`; of tokens, whose `run` gives the completion, for False.

        called: when the caller was, by `time.perf_counter`; None: now.
        """
        as_text = stream is True
        (one,) = begin_streams(
            self.core, [self.transcript], max_new_tokens, seed, logprobs, options, as_text=as_text
        )
        if called is not None:
            one.begun = called
        return TextStream(self.core, one) if as_text else TokenStream(self.core, one)

    @overload
    def chat(
        self,
        messages: str | SequenceOf[Message],
        max_new_tokens: Integer | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: str | SequenceOf[Message],
        max_new_tokens: Integer | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> TextStream: ...

    @overload
    def chat(
        self,
        messages: str | SequenceOf[Message],
        max_new_tokens: Integer | None = None,
        *,
        stream: Literal["tokens"],
        **options: Unpack[ChatOptions],
    ) -> TokenStream[int] | TokenStream[GeneratedToken]: ...

    def chat(
        self,
        messages: str | SequenceOf[Message],
        max_new_tokens: Integer | None = None,
        *,
        tools: SequenceOf[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        control_tokens: ControlTokensAs = "text",
        continue_final_message: bool = False,
        seed: Integer | None = None,
        logprobs: bool = False,
        stream: bool | Literal["tokens"] = False,
        turn: Integer | None = None,
        progress: Progress = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion | TextStream | TokenStream[int] | TokenStream[GeneratedToken]:
        """Answers a user's message, by the tokenizer's chat template.

        The session's K/V are used as far as the template's text of this turn begins with that of
        the last one; an answer keeps the tokens it was produced with. `messages` remembers the
        conversation, and `save` saves it.

        Args:
            messages: the user's next message; or the whole conversation, as a list of
                `{"role": ..., "content": ...}`, of which the session may hold a beginning.
            max_new_tokens: most tokens of the answer; by default 1,024, or what the model's
                positions leave.
            tools: for the template, as for `apply_chat_template`.
            chat_template_kwargs: its further arguments, such as `{"enable_thinking": False}`.
            control_tokens: what a control token in a message is, such as "<|im_end|>": "text", so
                that no text ends its message, or a token, with "tokens". Tokenizers that are not of
                the `tokenizers` library always make tokens.
            continue_final_message: go on with the last message, which is an assistant's.
            turn: which of the user's messages, from 1, this text is: it replaces that one and all
                that follows, so that the same call again answers again, and adds nothing. None:
                the next one; in a notebook the text of the last message is then refused, as it
                comes from a cell that was run twice.
            seed: of sampling; None: a fresh one, as for `generate`.
            logprobs: whether to compute the log-probability of each token.
            stream: False: return a `Completion`. True: an iterator of text. "tokens": one of token
                ids, or of `GeneratedToken`, as for `generate`.
            **options: `kvpager.GenerationOptions`: temperature, top_p, stop, grammar and others.
            progress: of the prefill: True for a bar on stderr, or a callable (tokens done, tokens
                in all).

        Raises:
            InvalidArgumentError: the engine has no tokenizer or the tokenizer no chat template, the
                template refuses the messages, the session has text from `prefill`, `append` or
                `generate` that the turn would drop, or as for `generate`; nothing was changed.
            CapacityError, CorruptSnapshotError: as for `prefill`; the message was not taken.
        """
        called = time.perf_counter()
        self._check_open()
        _check_stream(self.core, stream)
        check_progress(progress)
        chosen = repeatable(options)
        planned = plan_turn(
            self.core,
            self.transcript,
            self._from_turn(messages, turn),
            max_new_tokens,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            control_tokens=control_tokens,
            continue_final_message=continue_final_message,
            options=chosen,
            seed=seed,
            logprobs=logprobs,
        )
        check_keeps(self.core, self.transcript, planned)
        most, text = planned.generation.max_new_tokens, self.tokens
        before = self.transcript.conversation
        answered = settled(self.core, self.transcript)
        try:
            with self.transcript.reserve(max(len(planned.ids) + most, self.length)):
                self.update(planned.ids, progress=progress)
                begun = self._begin(most, seed, logprobs, stream, chosen, called)
        except BaseException:  # the message was not taken
            unchanged = not self.closed and np.array_equal(self.tokens, text)
            self.transcript.conversation = before if unchanged else replace(answered, untaken=True)
            raise
        self.transcript.conversation = planned.conversation
        return begun if stream else begun.run()

    def _from_turn(
        self, messages: str | SequenceOf[Message], turn: Integer | None
    ) -> str | SequenceOf[Message]:
        """The messages of a chat whose text is the user's message number `turn`, from 1."""
        if not isinstance(messages, str):
            if turn is not None:
                raise InvalidArgumentError(
                    f"turn is {turn!r}, and messages are a list; expected None, as a list is the "
                    "whole conversation"
                )
            return messages
        if turn is None and not in_notebook():
            return messages
        held = self.messages
        places = [n for n, message in enumerate(held) if message.get("role") == "user"]
        if turn is None:
            if places and held[places[-1]].get("content") == messages:
                last = len(places)
                raise InvalidArgumentError(
                    "messages is the text of the last message, as where a cell is run twice; "
                    f"expected another, turn={last} to answer again, or turn={last + 1} to add it"
                )
            return messages
        number = as_integer(turn, "turn", 1, len(places) + 1, what="a message of the user's")
        kept = held if number > len(places) else held[: places[number - 1]]
        return [*kept, {"role": "user", "content": messages}]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that `chat` has led, the last answer included; a copy.

        The last answer is what the session holds of it: it grows with `generate` until other tokens
        are added, and is cut by `trim`, `update` and `regenerate`. Earlier messages are changed by
        `chat`, to which other ones can be given, and `trim_messages`.
        """
        self._check_open()
        conversation = settled(self.core, self.transcript)
        return [copy.deepcopy(dict(message)) for message in conversation.messages]

    def trim_messages(self, count: Integer) -> None:
        """Keeps the first `count` messages of the conversation, 0 <= count <= their number.

        The session's text is cut where that of these messages ends or differs. As after `trim`,
        its K/V stay, and `chat` goes on from there.

        Raises:
            InvalidArgumentError: there are not so many messages, or the engine has no tokenizer.
        """
        self._check_open()
        require_tokenizer(self.core, "trim_messages")
        most = len(settled(self.core, self.transcript).messages)
        kept = as_integer(count, "count", 0, most, what="the conversation's messages")
        keep_messages(self.core, self.transcript, kept, Rendering(generation_prompt=False))

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's own JSON values; saved and restored with the session, copied by `fork`."""
        return self.transcript.metadata

    @metadata.setter
    def metadata(self, values: dict[str, Any]) -> None:
        check_metadata(values)
        self.transcript.metadata = values

    def trim(self, position: Integer) -> None:
        """Keeps the tokens [0, position), 0 <= position <= length.

        The text is always cut there. If a cache cannot keep all of the rest (chunks behind a window
        were released, recurrent states exist at fewer positions, the pool has no block to copy a
        part of a chunk), the next forward computes it again; if a companion cannot, only the
        companion is affected: see `kvpager.companions.CacheGroup`. `Engine.stats` counts the
        tokens.
        """
        self._check_open()
        cut = as_integer(position, "position", 0, self.length, what=_HELD)
        trim(self.core, self.transcript, cut)

    @overload
    def regenerate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        from_position: Integer | None = None,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Completion: ...

    @overload
    def regenerate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        from_position: Integer | None = None,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> TextStream: ...

    @overload
    def regenerate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        from_position: Integer | None = None,
        stream: Literal["tokens"],
        **options: Unpack[GenerateOptions],
    ) -> TokenStream[int] | TokenStream[GeneratedToken]: ...

    def regenerate(
        self,
        max_new_tokens: Integer | None = None,
        *,
        from_position: Integer | None = None,
        stream: bool | Literal["tokens"] = False,
        **options: Unpack[GenerateOptions],
    ) -> Completion | TextStream | TokenStream[int] | TokenStream[GeneratedToken]:
        """Drops the text generated last and produces another one instead, as `generate` does.

        Args:
            max_new_tokens: as for `generate`.
            from_position: where the new text begins, 1 .. length; None: where the last call of
                `generate` or `regenerate` began, also if it was before a save.
            stream: as for `generate`.
            **options: of `generate`; with a temperature each call gives another text, unless a
                `seed` is given.

        Raises:
            InvalidArgumentError: at the call, before anything is dropped: nothing was generated
                since the session or its last trim, or an argument is out of range.
            CapacityError: at the call, if max_new_tokens more do not fit below the pool; the
                session's text is as it was.
        """
        self._check_open()
        start = self.transcript.generation_start if from_position is None else from_position
        if start is None:
            raise InvalidArgumentError(
                "regenerate: the session has generated nothing since it began or was cut; give "
                "from_position"
            )
        start = as_integer(start, "from_position", 1, self.length, what=_HELD)
        chosen = repeatable(options)
        seed, logprobs = chosen.pop("seed", None), chosen.pop("logprobs", False)
        _check_stream(self.core, stream)
        generation = Generation.checked(self.core, max_new_tokens, chosen, logprobs=logprobs)
        generation.check_seed(seed)
        room = start + generation.max_new_tokens
        self.core.positions.check(room, "the text with max_new_tokens")
        transcript = self.transcript
        with transcript.reserve(room):
            text, begun = transcript.tokens, transcript.generation_start
            self.trim(start)
            try:
                begun_again = self._begin(max_new_tokens, seed, logprobs, stream, chosen)
            except BaseException:  # dropping shared chunks made no room
                transcript.set_text(text)
                transcript.generation_start = begun
                raise
        return begun_again if stream else begun_again.run()

    def update(self, ids: TextOrIds, *, progress: Progress = None) -> Reuse:
        """Makes the session hold exactly `ids`; keeps the K/V of the common prefix.

        For edited messages, reasoning that is dropped between turns, or a client that renders the
        whole conversation each time. `prefill` instead requires that the text only grows.

        Args:
            ids: the whole text, [n] or [1, n].
            progress: as for `prefill`.

        Raises:
            InvalidArgumentError: no tokens, not integers, an id outside the vocabulary, or an
                invalid `progress`; nothing was changed.
            CapacityError, CorruptSnapshotError: as for `prefill`; the common prefix is kept, and
                calling it again goes on from there.
        """
        self._check_open()
        new = self.core.read_ids(ids)
        check_progress(progress)
        self.core.positions.check(len(new), "ids")
        self.transcript.conversation = settled(self.core, self.transcript)
        changed = trim_to_common(self.core, self.transcript, new)
        before = self.tokens_computed
        self.prefill(new, progress=progress)
        return Reuse(total=len(new), computed=self.tokens_computed - before, changed=changed)

    def fork(self) -> Session:
        """Another session with the same tokens, which shares the sealed chunks.

        It has a seed of its own, unless `generate` is given one.
        """
        self._check_open()
        twin = self.transcript.fork()
        twin.sampling = replace(self.sampling, seed=fresh_seed())
        for companion in self.transcript.companions:
            twin.companions.append(companion.fork())
        return Session(self.core, twin, self._engine_saves)

    def pin(self, start: int, stop: int) -> Pin:
        """Keeps positions [start, stop) resident until the pin is released; changes no result.

        Whole chunks are kept: all that have one of the positions.

        Args:
            start: the first position.
            stop: behind the last one, at most the session's length.

        Raises:
            InvalidArgumentError: there are no such positions.
            CapacityError: says how many chunks are free to pin.
        """
        self._check_open()
        self.transcript.drop_accepted()
        sequence = self.sequence
        return recomputing_damage(self.core, [sequence], lambda: sequence.pin(start, stop))

    def ledger(self) -> Ledger:
        """One entry per chunk, in logical order: its tiers, provenance, score and so on.

        With recurrent layers also whether the state after it is kept (`checkpoint`).
        """
        self._check_open()
        self.transcript.drop_accepted()
        chunks = self.sequence.ledger()
        states = self.transcript.states
        if states is not None:
            kept = states.held(self.committed)
            for chunk in chunks:
                chunk.checkpoint = chunk.sealed and chunk.stop in kept
        return chunks

    @overload
    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        wait: Literal[True] = True,
        **options: Unpack[SaveOptions],
    ) -> SaveReport: ...

    @overload
    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        wait: Literal[False],
        **options: Unpack[SaveOptions],
    ) -> SaveHandle: ...

    @overload
    def save(
        self, name_or_path: str | os.PathLike[str], *, wait: bool, **options: Unpack[SaveOptions]
    ) -> SaveReport | SaveHandle: ...

    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        upto: int | None = None,
        overwrite: bool = False,
        kv_dtype: str | None = None,
        wait: bool = True,
        progress: Progress = None,
    ) -> SaveReport | SaveHandle:
        """Saves the session as it is now, atomically; after an error an older snapshot stays.

        Saves everything `Engine.restore` needs: tokens, K/V, summaries, the pending token and the
        sampler; and next to it, as NAME.draft and NAME.states, a draft model's cache and recurrent
        states (`SaveReport.companions`). With `wait=False` a thread writes the session as it was at
        the call, bit for bit, while the session goes on; `close` of the session or its engine waits
        for the thread.

        Args:
            name_or_path: the snapshot's name in `store`; without one, the path of a file.
            store: such as a DirectoryStore, which writes only chunks it does not have.
            upto: the first tokens alone, 1 .. length; None: all, the pending one included. With
                fewer, the restored session has no pending token and no `messages`.
            overwrite: in a directory store, also replace a snapshot of another salt or model.
            kv_dtype: "q8", "k8v4", "q4", or a float dtype (`PagerConfig.kv_dtype`): converts K/V to
                it while they are written; only `Engine.restore` with `on_mismatch` "approximate" or
                "convert" reads that, as an approximation. None: as they are.
            wait: True: return a report when it is saved; False: return a handle at once.
            progress: True for a bar on stderr, or a callable (bytes done, bytes in all); with
                `wait=False` the writing thread calls it. If it raises, the save stops.

        Raises:
            InvalidArgumentError: the session is empty, or an argument is invalid.
            StorageError: a system call failed; nothing of the new snapshot is left.
            CapacityError: the store's budget cannot hold it.
            CorruptSnapshotError: a restored chunk that has to be copied is damaged, and the session
                was restored with `on_corrupt="fail"`.
        """
        as_flag(wait, "wait")
        check_progress(progress)
        state = freeze(
            self.core,
            self.transcript,
            name_or_path,
            store=store,
            upto=upto,
            overwrite=overwrite,
            kv_dtype=kv_dtype,
        )
        if wait:
            with reporting_bytes(progress, "save") as report:
                return state.write(report)
        return SaveHandle(state, progress, self._saves, self._engine_saves)

    def close(self, *, forget: bool = False) -> None:
        """Waits for the session's saves, then releases its chunks. May be called twice.

        Does nothing in a forked child.

        Args:
            forget: whether chunks that no other session uses are not kept for prefix reuse, so that
                their memory goes back to the system and nothing of a deleted text stays.
        """
        if self.core.made_in.forked:
            return
        self._saves.wait()
        self.transcript.close(forget=forget)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "Session(closed)"
        return f"Session(length={self.length}, restored_tokens={self.restored_tokens})"

    def _repr_html_(self) -> str:
        """The conversation and the ledger, for notebooks."""
        if self.closed:
            return card(repr(self), ())
        messages = [(str(one.get("role")), one.get("content") or "") for one in self.messages]
        title = f"Session of {counted(self.length, 'token')}"
        if self.restored_tokens:
            title += f", {self.restored_tokens:,} of them restored"
        return card(title, messages, self.ledger()._repr_html_())

    def _check_open(self) -> None:
        self.core.check_open(self.transcript)

    def belongs_to(self, core: EngineCore) -> bool:
        """Whether it belongs to that engine."""
        return self.core is core


def _check_stream(core: EngineCore, stream: object) -> None:
    if not (isinstance(stream, bool) or is_one_of(stream, ("tokens",))):
        raise refusal("stream", stream, 'False, True (text) or "tokens"')
    if stream is True:
        require_text(has_text=core.tokenizer is not None)


def require_own(core: EngineCore, session: object) -> Transcript:
    """The transcript of an open session of this engine. Raises InvalidArgumentError."""
    core.check_open()
    if not isinstance(session, Session) or not session.belongs_to(core):
        raise refusal("session", session, "a session of this engine")
    core.check_open(session.transcript)
    return session.transcript
