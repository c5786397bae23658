"""Small tokenizers with the settings of those that open models have, trained on the licence."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
THINK = "<think>"  # an added token that is not special

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Each with what the model ends an answer with, and what the template puts before and behind it.
TEMPLATES = {
    "chatml": (CHATML, "{}<|im_end|>"),
    "inst": (INST, " {} </s>"),
    "plain": (PLAIN, " {}"),
}

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_LINES = (Path(__file__).resolve().parents[2] / "LICENSE").read_text().splitlines(keepends=True)


def _byte_level(pre, *, normalizer=None, prefix=False, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer, trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _split(*patterns):
    parts = [pre_tokenizers.Split(Regex(one), "isolated") for one in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=False)])


def _pieces(*, normalizer=None, pre=None, unigram=False):
    """As SentencePiece makes them: spaces are letters, bytes the fallback."""
    model = models.Unigram() if unigram else models.BPE(unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fallback = [] if unigram else [f"<0x{byte:02X}>" for byte in range(256)]
    if unigram:
        return tokenizer, trainers.UnigramTrainer(
            vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    return tokenizer, trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL + fallback, show_progress=False
    )


def _word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=SPECIAL, show_progress=False
    )


def _metaspace(scheme, **options):
    return _pieces(pre=pre_tokenizers.Metaspace(prepend_scheme=scheme, **options))


_LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
_T5 = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
_DEEPSEEK = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _GPT2)  # noqa: RUF001

MADE = {
    "gpt2": lambda: _byte_level(None),
    "prefix-space": lambda: _byte_level(None, prefix=True),
    "llama3": lambda: _byte_level(_split(_LLAMA3), ignore_merges=True),
    "qwen": lambda: _byte_level(_split(_QWEN), normalizer=normalizers.NFC()),
    "deepseek": lambda: _byte_level(_split(*_DEEPSEEK)),
    "llama2-legacy": lambda: _pieces(normalizer=_LEGACY),
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-first-whole": lambda: _metaspace("first", split=False),
    "metaspace-always": lambda: _metaspace("always"),
    "metaspace-never": lambda: _metaspace("never"),
    "gemma": lambda: _pieces(
        normalizer=normalizers.Replace(" ", "▁"),
        pre=pre_tokenizers.Split(" ", "merged_with_previous"),
    ),
    "unigram-t5": lambda: _pieces(
        normalizer=_T5, pre=pre_tokenizers.Metaspace(prepend_scheme="always"), unigram=True
    ),
    "unigram-first": lambda: _pieces(
        normalizer=normalizers.Strip(left=False, right=True),
        pre=pre_tokenizers.Metaspace(prepend_scheme="first"),
        unigram=True,
    ),
    "wordpiece": _word_piece,
    "strips": lambda: _byte_level(None),
    "greedy-marks": lambda: _metaspace("first"),
    "normalized-marks": lambda: _pieces(normalizer=_LEGACY),
    "cut-and-padded": lambda: _byte_level(_split(_LLAMA3)),
    "split-specials": lambda: _metaspace("first"),
}
# Added tokens that reach beyond their text, or are one only among certain neighbours.
_ADDED = {
    "strips": [
        AddedToken("<|left|>", lstrip=True, special=True),
        AddedToken("<|right|>", rstrip=True, special=True),
        AddedToken("<|left|>x", single_word=True),
        AddedToken("user", single_word=True),
    ],
    "greedy-marks": [
        AddedToken("<|im_end|>\n", special=True),
        AddedToken("a<|im_end", special=True),
        AddedToken("\n<|im_start|>user", single_word=True, special=True),
    ],
    "normalized-marks": [AddedToken("[INST]", normalized=True), AddedToken("<|im_", special=False)],
}


@cache
def wrapped(name, template):
    """A transformers tokenizer of these settings, with a chat template."""
    tokenizer, trainer = MADE[name]()
    tokenizer.train_from_iterator(_LINES, trainer)
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    for token in _ADDED.get(name, ()):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if name == "cut-and-padded":
        tokenizer.enable_truncation(7)
        tokenizer.enable_padding(length=40)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.split_special_tokens = name == "split-specials"
    made.chat_template = TEMPLATES[template][0]
    return made
