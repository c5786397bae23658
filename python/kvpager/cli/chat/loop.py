"""What is typed is answered, or does what a command says."""

from __future__ import annotations

import argparse
import itertools
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from kvpager._support.words import byte_size, counted, duration, span
from kvpager.cli.chat.lines import is_interactive, read_message
from kvpager.cli.chat.screen import printable, show_whole, showing, shows_markdown
from kvpager.cli.chat.signals import Signals
from kvpager.cli.chat.talk import Talk
from kvpager.cli.failure import CliError
from kvpager.cli.output import note
from kvpager.cli.parser import suggestion
from kvpager.cli.terminal import shows_progress
from kvpager.errors import PagerError

if TYPE_CHECKING:
    from kvpager.pager import ChunkInfo

COMMANDS = ("/regenerate", "/undo", "/save", "/load", "/ledger", "/help")
_HELP = """\
/regenerate [T]  another answer to the last message, at temperature T
/undo            takes the last message and its answer back
/save NAME       saves a copy; the conversation itself is saved after each turn
/load [NAME]     goes on with another conversation; without a name, lists them
/ledger          where the chunks of the KV cache are
/help            this list
Ctrl-C stops an answer and keeps what was said of it; Ctrl-D leaves.
A line that ends with a backslash goes on in the next one."""

_LONG = 4000  # characters of a message whose prefill shows a bar
_SHOWN = 2000  # characters of an earlier message
_LISTED = 20  # conversations
_STRIP = 64  # chunks in a line
# Mark, attribute of a chunk, and words, from the fastest tier to the slowest.
_TIERS = (
    ("#", "resident", "in the pool"),
    ("+", "on_host", "in host memory"),
    ("-", "on_disk", "on disk"),
    ("s", "in_snapshot", "in the snapshot"),
    (".", "released", "released"),
)


class Loop:
    """Reads lines, until there are no more or the user leaves."""

    def __init__(self, args: argparse.Namespace, talk: Talk, signals: Signals) -> None:
        """`args`: of the command line; `signals`: entered."""
        self._args = args
        self._talk = talk
        self._signals = signals
        self._recomputed = 0  # damaged tokens of the session that were mentioned
        self._run: dict[str, Callable[[str], object]] = dict(
            zip(
                COMMANDS,
                (
                    self._regenerate,
                    self._undo,
                    self._save,
                    self._load,
                    self._ledger,
                    lambda _: _tell(_HELP),
                ),
            )
        )

    def run(self) -> None:
        """Returns when there are no more lines, or the user leaves.

        Raises:
            KeyboardInterrupt, PagerError: where no person types; what was said is saved.
        """
        interrupts = 0  # since the last message
        while interrupts < 2:
            try:
                with self._signals.heard():
                    line = read_message()
            except EOFError:
                if is_interactive():
                    _tell("")  # the prompt's line ends
                break
            except KeyboardInterrupt:
                if not is_interactive():
                    raise
                interrupts += 1
                _tell("" if interrupts > 1 else "\nCtrl-C again leaves, and so does Ctrl-D")
                continue
            if not line.strip():
                continue
            interrupts = 0
            try:
                if is_interactive() and line.startswith("/"):
                    self._command(line)
                else:
                    bar = len(line) > _LONG and shows_progress(self._args)
                    self._answer(self._talk.say(line, progress=bar))
            except KeyboardInterrupt:
                if not is_interactive():
                    raise
                interrupts = 1
            except (CliError, PagerError) as error:
                if not is_interactive():
                    raise
                _tell(f"kvpager: {' '.join(str(error).split())}")

    def load(self, name: str | None) -> None:
        """Goes on with a conversation, or the last one, and shows its last turn; see `Talk`."""
        talk, start = self._talk, time.perf_counter()
        if name is None:
            talk.load_last()
        else:
            talk.load(name)
        seconds = time.perf_counter() - start
        if talk.name is None:
            return
        messages, restored = talk.session.messages, talk.session.restored_tokens
        note(
            self._args,
            f"goes on with {talk.name}: {counted(len(messages), 'message')}, "
            f"{counted(restored, 'token')} restored in {duration(seconds)}",
        )
        self._note_damage()
        if is_interactive():
            for message in messages[-2:]:
                text = str(message["content"])
                text = text if len(text) <= _SHOWN else f"... {text[-_SHOWN:]}"
                if message["role"] == "user":
                    print(f"> {printable(text)}", flush=True)
                else:
                    show_whole(text)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._run:
            raise CliError(f"unknown command {name}{suggestion(name, COMMANDS)}")
        self._run[name](rest.strip())

    def _regenerate(self, temperature: str) -> None:
        options = {}
        if temperature:
            try:
                options["temperature"] = float(temperature)
            except ValueError:
                raise CliError(f"temperature is {temperature!r}; expected a number") from None
        before = self._talk.session.messages[-1:]
        self._answer(self._talk.answer_again(**options))
        if self._talk.session.messages[-1:] == before:
            _tell("the same answer: it is the likeliest; /regenerate 0.5 draws another")

    def _undo(self, _: str) -> None:
        taken = self._talk.take_back()
        self._talk.save()
        left = counted(len(self._talk.session.messages), "message")
        _tell(f"took back {textwrap.shorten(taken, 50, placeholder=' ...')!r}; {left} left")

    def _save(self, name: str) -> None:
        if name:
            self._talk.save_as(name)
        else:
            self._talk.save()
        _tell(f"saved as {name or self._talk.name}")

    def _load(self, name: str) -> None:
        if name:
            self._talk.save()
            self.load(name)
            return
        found = self._talk.saved()
        for entry in found[:_LISTED]:
            mark = "*" if entry.name == self._talk.name else " "
            size, age = byte_size(entry.bytes_own), span(time.time() - entry.last_used)
            _tell(f"{mark} {entry.name:<40} {entry.tokens:>8,} tokens {size:>10} {age:>5} ago")
        if len(found) > _LISTED:
            _tell(f"  and {len(found) - _LISTED} older ones")
        if not found:
            _tell("no conversation is saved yet")

    def _ledger(self, _: str) -> None:
        session = self._talk.session
        chunks = session.ledger()
        held = session.core.facts.layout.token_bytes * session.committed
        _tell(
            f"{counted(session.length, 'token')} in {counted(len(chunks), 'chunk')}, "
            f"{byte_size(held)} of K/V"
        )
        marks = [_tier(chunk) for chunk in chunks]
        for start in range(0, len(marks), _STRIP):
            _tell("  " + "".join(marks[start : start + _STRIP]))
        counts = Counter(marks)
        tiers = [f"{mark} {words}: {counts[mark]}" for mark, _, words in _TIERS if counts[mark]]
        grades = Counter(chunk.provenance for chunk in chunks)
        _tell("; ".join([*tiers, *(f"{grade}: {count}" for grade, count in grades.items())]))

    def _answer(self, pieces: Generator[str, None, None]) -> None:
        """Shows an answer, and saves the conversation. Raises KeyboardInterrupt: it was stopped."""
        start, first = time.perf_counter(), 0.0
        try:
            with closing(pieces), self._signals.heard():
                head = next(pieces, "")  # computes the prompt
                first = time.perf_counter()
                with showing() as show:
                    for piece in itertools.chain([head], pieces):
                        show(piece)
        except KeyboardInterrupt:
            _tell("stopped" if first else "stopped before the answer; the message was not taken")
            raise
        finally:
            end = time.perf_counter()
            self._talk.save()
        self._note_damage()
        if is_interactive():
            facts = "; ".join(self._facts(first - start, end - first))
            note(self._args, f"\x1b[2m{facts}\x1b[0m" if shows_markdown() else facts)

    def _note_damage(self) -> None:
        """Mentions what was damaged since the last call; another session begins at 0."""
        count, before = self._talk.session.recomputed_tokens, self._recomputed
        self._recomputed = count
        if count > before:
            tokens = counted(count - before, "token")
            note(self._args, f"{tokens} of the saved conversation were damaged: computed again")

    def _facts(self, first_s: float, rest_s: float) -> Iterator[str]:
        turn = self._talk.turn
        more = turn.tokens - 1
        yield f"{turn.computed_tokens:,} of {counted(turn.prompt_tokens, 'prompt token')} computed"
        yield f"first token after {duration(first_s)}"
        if more > 0 and rest_s > 0:
            yield f"{more / rest_s:.1f} tokens/s after it"
        if turn.finish_reason == "length":
            yield f"cut after {counted(turn.tokens, 'token')} (--max-new-tokens)"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tier(chunk: ChunkInfo) -> str:
    return next((mark for mark, name, _ in _TIERS if getattr(chunk, name)), "?")
