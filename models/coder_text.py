"""What tiny-coder reads: its tokenizer, conversations about sources, windows of packed tokens."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1 and 2
VOCABULARY = 4096
CONVERSATION_SHARE = 0.2  # of the tokens that are trained on
LONGEST_FUNCTION = 3000  # characters that an assistant is asked for

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

Ids = NDArray[np.int64]
Conversation = list[dict[str, str]]


def train_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `texts`, with the chat template; it codes every text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = wrapped(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    return made


@dataclass(frozen=True)
class Function:
    """A documented function of a source."""

    name: str
    source: str
    summary: str  # its docstring's first paragraph, on one line
    module: str


def functions(name: str, source: str) -> list[Function]:
    """Every documented function of a source that parses and is not longer than an answer may be."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # lib2to3 keeps sources of Python 2
        return []
    lines = source.splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring, end = ast.get_docstring(node), node.end_lineno
        if not docstring or end is None:
            continue
        margin = node.col_offset
        body = "\n".join(line[margin:] for line in lines[node.lineno - 1 : end])
        summary = " ".join(docstring.split("\n\n")[0].split())
        if summary and len(body) <= LONGEST_FUNCTION and len(summary) <= 400:
            found.append(Function(node.name, body, summary, name))
    return found


def conversations(
    texts: Sequence[tuple[str, str]], rng: np.random.Generator, excerpt_characters: int
) -> Iterator[Conversation]:
    """Endless conversations about the functions of `texts`, drawn with `rng`.

    A third begin with an excerpt of a source, up to `excerpt_characters` long, and ask for
    functions that are in it; the others ask for functions by name or by what they do.
    """
    documented = [(source, found) for name, source in texts if (found := functions(name, source))]
    everything = [function for _, found in documented for function in found]
    while True:
        turns = int(rng.integers(1, 5))
        if rng.random() < 1 / 3:
            source, found = documented[int(rng.integers(len(documented)))]
            length = int(excerpt_characters * rng.uniform(0.1, 1.0))
            start = int(rng.integers(max(1, len(source) - length)))
            start = source.rfind("\n", 0, start) + 1
            excerpt = source[start : start + length].rpartition("\n")[0]
            shown = [f for f in found if f"def {f.name}(" in excerpt]
            if not shown:
                continue
            chosen = [shown[int(i)] for i in rng.permutation(len(shown))[:turns]]
            dialogue = [turn for function in chosen for turn in _about(function, rng)]
            dialogue[0]["content"] = f"```python\n{excerpt}\n```\n{dialogue[0]['content']}"
        else:
            chosen = [everything[int(i)] for i in rng.integers(len(everything), size=turns)]
            dialogue = [turn for function in chosen for turn in _about(function, rng)]
        yield dialogue


def _about(function: Function, rng: np.random.Generator) -> Conversation:
    """A question about `function`, and its answer."""
    code = f"```python\n{function.source}\n```"
    stem = function.module.removesuffix(".py").replace("/", ".")
    cut = max(1, function.source.count("\n") // 2)
    lines = function.source.split("\n")
    forms: tuple[tuple[str, str], ...] = (
        (f"What does `{function.name}` do?", function.summary),
        (f"What does this function do?\n{code}", function.summary),
        (f"Write the docstring of `{function.name}`.", f'"""{function.summary}"""'),
        (f"Show me the source of `{function.name}` in {stem}.", code),
        (f"Write a function `{function.name}`: {function.summary}", code),
        (
            "Complete this code:\n```python\n" + "\n".join(lines[:cut]) + "\n```",
            "```python\n" + "\n".join(lines[cut:]) + "\n```",
        ),
    )
    question, answer = forms[int(rng.integers(len(forms)))]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class Corpus:
    """The training texts as tokens, laid out into windows for a stage of the training."""

    def __init__(
        self, texts: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self._texts = texts
        self._seed = seed
        self._encode: Callable[[str], Any] = tokenizer.backend_tokenizer.encode
        self._template: Callable[..., Any] = tokenizer.apply_chat_template
        self._sources = [self._ids(source) for _, source in texts]

    def _ids(self, text: str) -> Ids:
        return np.array(self._encode(text + END_OF_TEXT).ids, dtype=np.int64)

    def windows(self, stage: int, count: int, tokens: int) -> Ids:
        """[count, tokens]: sources and conversations, packed, shuffled; the same for the same seed.

        Windows are cut from one stream, wherever a text ends: attention reaches from a text into
        the one before it in a window, with END_OF_TEXT between them.
        """
        rng = np.random.default_rng([self._seed, stage])
        talk = conversations(self._texts, rng, excerpt_characters=int(1.5 * tokens))
        pieces: list[Ids] = []
        wanted = count * tokens
        total = talked = 0
        while total < wanted:
            for index in rng.permutation(len(self._sources)):
                pieces.append(self._sources[int(index)])
                total += len(pieces[-1])
                while talked < CONVERSATION_SHARE * total:
                    pieces.append(self._ids(self._template(next(talk), tokenize=False)))
                    total += len(pieces[-1])
                    talked += len(pieces[-1])
                if total >= wanted:
                    break
        stream = np.concatenate(pieces)[:wanted].reshape(count, tokens)
        return stream[rng.permutation(count)]  # or step after step would read one file
