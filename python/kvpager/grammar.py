"""Text of a grammar: what may follow is decided at the sampler, so that tokens stay reproducible.

Masks come from llguidance (https://github.com/guidance-ai/llguidance), which is installed with
`pip install llguidance`.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpager._runtime.logits.processors import Logits
from kvpager._runtime.text.tokenizer import Tokenizer
from kvpager._runtime.text.tool_formats import JSON_SPACING
from kvpager._support.arguments import listed, refusal, require_unicode
from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError

_MOST_COMPILED = 64  # grammars that are kept for each tokenizer
_MOST_ITEMS = 10_000  # that a parser is at; each optional property of an object is four


@dataclass(frozen=True)
class Grammar:
    """The texts that may be generated, as the option `grammar`; made by the class methods.

    A token is forbidden (its logit is -inf) if no text of the grammar could begin with the text and
    that token. End tokens are allowed where the text is complete. Bias, penalties and processors
    come before it, the temperature after it.

    Attributes:
        source: as llguidance reads it: JSON text, or Lark.
        name: of the option, as errors have it.
    """

    source: str
    name: str = field(default="grammar", compare=False)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema allows, with a blank behind ":" and "," and none elsewhere.

        Raises InvalidArgumentError for a schema that is no JSON, or that uses what cannot be
        enforced; the error comes with the first generation if only the tokenizer can tell.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidArgumentError(f"grammar: the schema is no JSON: {error}") from error
        if not isinstance(schema, (Mapping, bool)):
            raise InvalidArgumentError(f"grammar: the schema is {schema!r}; expected an object")
        matcher = _library().LLMatcher
        try:
            text = json.dumps(schema, allow_nan=False)
            source = matcher.grammar_from_json_schema(text, overrides=JSON_SPACING)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"grammar: the schema is no JSON: {error}") from error
        return cls._checked(source)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole, in the syntax of Rust's `regex`."""
        if not isinstance(pattern, str):
            raise refusal("pattern", pattern, "text")
        require_unicode(pattern, "pattern")
        return cls._checked(_library().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Grammar:
        """One of these texts."""
        given = listed(texts, "texts", "a list of texts")
        if not given or not all(isinstance(text, str) and text for text in given):
            raise refusal("texts", texts, "a list of texts, none of them empty")
        return cls.lark("start: " + " | ".join(json.dumps(text) for text in given))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar in llguidance's variant of Lark, of its rule `start`."""
        if not isinstance(text, str):
            raise refusal("text", text, "text")
        require_unicode(text, "text")
        return cls._checked(_library().LLMatcher.grammar_from_lark(text))

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Text of a grammar in llama.cpp's GBNF, of its rule `root`; Lark is taken as well."""
        if not isinstance(text, str):
            raise refusal("text", text, "text")
        require_unicode(text, "text")
        _library()
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return cls.lark(any_to_lark(text))
        except InvalidArgumentError:
            raise
        except Exception as error:  # of a library that has no type of its own for them
            raise _refused(f"it is no GBNF: {error}") from error

    @classmethod
    def either(cls, first: Grammar, second: Grammar) -> Grammar:
        """Text of one grammar or of another; errors have the name of the first."""
        parts = [{**_part(one.source), "name": name} for one, name in ((first, "a"), (second, "b"))]
        source = {"grammars": [{"lark_grammar": "start: @a | @b"}, *parts]}
        return cls(json.dumps(source), first.name)

    def refused(self, error: BaseException) -> bool:
        """Whether an error of a generation is that this grammar cannot be followed."""
        return isinstance(error, InvalidArgumentError) and str(error).startswith(f"{self.name}: ")

    @classmethod
    def _checked(cls, source: str) -> Grammar:
        wrong, messages = _library().LLMatcher.validate_grammar_with_warnings(source)
        if wrong:
            raise _refused(messages[0])
        return cls(source)


class Constraint:
    """A grammar over one generation's tokens. It follows the text, forwards and back."""

    def __init__(self, name: str, fresh: Callable[[], Any], start: int, *, has_end: bool) -> None:
        """Begins with no tokens.

        Args:
            name: of the grammar.
            fresh: makes a matcher of llguidance, at the beginning of the text.
            start: position of the first token.
            has_end: whether an end token ends the generation.
        """
        self._name = name
        self._fresh = fresh
        self._matcher = fresh()
        self._start = start
        self._has_end = has_end
        self._consumed: list[int] = []

    def __call__(self, tokens: TokenIds, values: Logits) -> Logits:
        """Forbids what may not follow `tokens`, the whole text [n]; logits [vocab] in place.

        Raises:
            InvalidArgumentError: llguidance can follow the text no further; says why.
        """
        mask = self._asked(tokens[self._start :].tolist(), lambda: self._matcher.compute_bitmask())
        bits = np.frombuffer(mask, dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(values)].astype(bool)
        values[: len(allowed)][~allowed] = -np.inf
        values[len(allowed) :] = -np.inf
        return values

    def ended(self, produced: Sequence[int]) -> bool:
        """Whether nothing can follow these tokens, the generation's own, not even an end token."""
        if self._has_end:
            return False
        return bool(self._asked(list(produced), lambda: self._matcher.is_stopped()))

    def _asked(self, tokens: list[int], ask: Callable[[], Any]) -> Any:
        """Returns `ask()` once the matcher has followed these tokens.

        Matchers of one grammar share what their lexer has built, whose size is limited; one that
        has failed allows nothing but the end. Then a new one follows the text again.
        """
        for _ in range(2):
            self._follow(tokens)
            result = ask()
            if not self._matcher.is_error():
                return result
            why = self._matcher.get_error()
            self._matcher, self._consumed = self._fresh(), []
        raise _refused(why, self._name)

    def _follow(self, wanted: list[int]) -> None:
        common = 0
        for one, other in zip(self._consumed, wanted):
            if one != other:
                break
            common += 1
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        for token in wanted[common:]:
            if self._matcher.is_stopped() or not self._matcher.consume_token(token):
                break
            self._consumed.append(token)


class Compiler:
    """Grammars for one tokenizer and its end tokens. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        """Reads the tokenizer, which takes up to a second.

        Raises:
            InvalidArgumentError: it is none of transformers' fast tokenizers.
        """
        _library()
        from llguidance.hf import from_tokenizer

        try:
            self._tokens = from_tokenizer(
                tokenizer.wrapped, n_vocab=vocab_size, eos_token=sorted(ends) or None
            )
        except Exception as error:  # of a library that reads a file of another
            raise InvalidArgumentError(
                f"grammar: it needs a fast tokenizer that llguidance can read, not "
                f"{type(tokenizer.wrapped).__name__} ({error})"
            ) from error
        self._has_end = bool(ends)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar. Raises InvalidArgumentError if that fails; says why."""
        self._matcher(grammar)

    def constraint(self, grammar: Grammar, start: int) -> Constraint:
        """Makes the constraint of a generation whose first token is at position `start`.

        Errors: as `check`.
        """
        given = self._matcher(grammar).deep_copy()

        def fresh() -> Any:
            nonlocal given
            first, given = given, None
            return self._compile(grammar).deep_copy() if first is None else first

        return Constraint(grammar.name, fresh, start, has_end=self._has_end)

    def _matcher(self, grammar: Grammar) -> Any:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> Any:
        """A new matcher, which is kept in the place of an older one."""
        library = _library()
        limits = library.LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False)

        def new() -> Any:
            return library.LLMatcher(self._tokens, grammar.source, log_level=0, limits=limits)

        matcher = new()
        begun = matcher.deep_copy()
        for step in range(2):  # some limits of the parser are met behind the first token
            mask = np.frombuffer(begun.compute_bitmask(), dtype=np.uint8)
            if begun.is_error():
                if step and "lexer error" in begun.get_error():  # full on this path, not on each
                    matcher = new()
                    break
                raise _refused(begun.get_error(), grammar.name)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if begun.is_stopped() or not len(allowed):
                break
            begun.consume_token(int(allowed[0]))
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


_compilers: weakref.WeakKeyDictionary[Tokenizer, dict[frozenset[int], Compiler]] = (
    weakref.WeakKeyDictionary()
)
_compilers_lock = threading.Lock()


def compiler_of(tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> Compiler:
    """The compiler for a tokenizer; made once. Errors: as `Compiler`."""
    with _compilers_lock:
        known = _compilers.setdefault(tokenizer, {})
        if ends not in known:
            known[ends] = Compiler(tokenizer, vocab_size, ends)
        return known[ends]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidArgumentError(
            "grammar: it needs the package llguidance; pip install llguidance"
        ) from error
    return llguidance


def _part(source: str) -> dict[str, Any]:
    """A grammar's source as one of several in a common one."""
    if not source.startswith("{"):
        return {"lark_grammar": source}
    (part,) = json.loads(source)["grammars"]
    return {key: value for key, value in part.items() if value is not None}


def _refused(message: str, name: str = "grammar") -> InvalidArgumentError:
    plain = re.split("<(?:non-verbose|backtrace|state)", message)[0]  # what is for its authors
    return InvalidArgumentError(f"{name}: " + " ".join(plain.split())[:500])
