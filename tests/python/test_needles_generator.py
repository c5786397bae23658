"""The needle task: its documents, its training batches, and the model shipped to answer it."""

from __future__ import annotations

import hashlib
import importlib
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import SmolLM3ForCausalLM

from kvpager.cli import needles
from kvpager.cli.needles import NeedleTask

MODELS = Path(__file__).resolve().parents[2] / "models"


def from_models(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MODELS)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return from_models("train_tiny_retriever")


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    return from_models("retriever_eval")


@pytest.fixture(scope="module")
def shipped() -> SmolLM3ForCausalLM:
    return SmolLM3ForCausalLM.from_pretrained(needles.shipped_model_path(), dtype=torch.float32)


def parse(ids: np.ndarray) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """Key -> (position, value), read back from the tokens alone."""
    found = {}
    for start in np.flatnonzero(ids == needles.KEY):
        assert ids[start + 3] == needles.SEPARATOR
        assert ids[start + 7] == needles.END
        key = tuple(ids[start + 1 : start + 3])
        assert key not in found
        found[key] = (start, tuple(ids[start + 4 : start + 7]))
    return found


@given(
    tokens=st.integers(1, 3000),
    needle_count=st.integers(0, 64),
    seed=st.integers(0, 2**32),
)
def test_a_document_has_its_exact_length_and_every_answer_can_be_read_from_it(
    tokens: int, needle_count: int, seed: int
) -> None:
    task = NeedleTask(seed=seed)
    if needle_count > max(0, (tokens - 129) // 16):
        with pytest.raises(ValueError, match="do not fit"):
            task.document(tokens, needle_count)
        return
    document = task.document(tokens, needle_count)
    assert document.ids.shape == (tokens,)
    assert document.ids[0] == needles.BOS
    expected = {
        tuple(key): (position, tuple(value))
        for key, position, value in zip(
            document.keys, document.positions, document.values, strict=True
        )
    }
    assert parse(document.ids) == expected
    assert len(expected) == needle_count
    assert np.all(np.diff(document.positions) >= needles.NEEDLE_TOKENS)
    assert np.all(document.positions + needles.NEEDLE_TOKENS <= tokens - 128)


def test_filler_keys_and_values_use_content_tokens_only() -> None:
    document = NeedleTask(seed=1).document(4096, 64)
    markers = document.ids[document.ids < needles.FIRST_CONTENT]
    assert len(markers) == 1 + 3 * 64
    assert document.ids.max() < 1024
    for name in ("keys", "values"):
        assert getattr(document, name).min() >= needles.FIRST_CONTENT


@pytest.mark.parametrize("seed", range(5))
def test_needles_stay_inside_the_range_given_and_outside_the_ranges_avoided(seed: int) -> None:
    avoid = [(600, 1100), (0, 64), (700, 800), (1000, 1200), (3000, 4096), (50, 50)]
    document = NeedleTask(seed=seed).document(4096, 32, within=(32, 2048), avoid=avoid)
    for needle in range(32):
        start, stop = document.span(needle)
        assert document.ids[start] == needles.KEY
        assert document.ids[stop - 1] == needles.END
        assert start >= 32
        assert stop <= 2048
        assert not any(start < b and a < stop for a, b in avoid if a < b)
    assert {bool(p < 600) for p in document.positions} == {True, False}


def test_all_keys_differ_and_35_percent_are_near_misses_of_an_earlier_one() -> None:
    task = NeedleTask(seed=3)
    assert len({tuple(key) for key in task.keys(1000)}) == 1000
    pairs = np.array([task.keys(2) for _ in range(8000)])
    earlier, later = pairs[:, 0], pairs[:, 1]
    same_first = earlier[:, 0] == later[:, 0]
    same_second = earlier[:, 1] == later[:, 1]
    swapped = np.all(earlier == later[:, ::-1], axis=1)
    assert abs(np.mean(same_first | same_second | swapped) - 0.35) < 0.02
    assert abs(np.mean(same_first) - 0.14) < 0.015
    assert abs(np.mean(same_second) - 0.14) < 0.015
    assert abs(np.mean(swapped) - 0.07) < 0.015


def test_filler_follows_the_tables_the_shipped_model_was_trained_on() -> None:
    tables = np.random.default_rng(1234)
    successors = tables.integers(0, 1016, size=(1016, 4))
    ranks = tables.permutation(1016)
    filler = NeedleTask(seed=5).filler(200_000) - needles.FIRST_CONTENT
    follows = np.any(successors[filler[:-1]] == filler[1:, None], axis=1)
    # Half by the table, and a Zipf draw now and then hits a successor by chance.
    assert 0.495 < follows.mean() < 0.52
    drawn = np.bincount(filler[1:][~follows], minlength=1016) / np.sum(~follows)
    zipf = 1 / (ranks + 1.0) ** 0.8
    assert 0.5 * np.abs(drawn - zipf / zipf.sum()).sum() < 0.05


def test_the_same_seed_gives_the_same_documents_on_every_machine() -> None:
    def digest(seed: int) -> str:
        task = NeedleTask(seed=seed)
        documents = [task.document(2000, 16), task.document(1000, 4, within=(64, 512))]
        return hashlib.sha256(
            b"".join(document.ids.astype("<i8").tobytes() for document in documents)
        ).hexdigest()

    assert digest(6) == digest(6)
    assert digest(6) != digest(7)
    assert digest(6) == "dabffff8a1e013ec8b67f136c3e8ff23431e1b3648dc234512787f7a38d82ba4"


def test_a_question_and_its_answer_repeat_the_needle() -> None:
    task = NeedleTask(seed=8)
    document = task.document(1024, 4)
    start, stop = document.span(2)
    asked = np.concatenate([task.query(document.keys[2]), task.answer(document.values[2])])
    assert asked[0] == needles.QUESTION
    assert np.array_equal(asked[1:], document.ids[start + 1 : stop])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NeedleTask(vocab=63), "vocab must be at least 64, got 63"),
        (lambda: NeedleTask().document(0, 0), "tokens >= 1"),
        (lambda: NeedleTask().document(1024, -1), "needles >= 0"),
        (lambda: NeedleTask().document(1024, 16, within=(1000, 1024)), "0 places of 16 tokens"),
        (lambda: NeedleTask(vocab=64).keys(785), "too few keys for 785 needles"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_the_shipped_model_is_found_in_the_package_first_then_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "python" / "kvpager" / "cli" / "needles.py"
    packaged = module.parents[1] / "_models" / "tiny-retriever"
    checkout = tmp_path / "models" / "tiny-retriever"
    monkeypatch.setattr(needles, "__file__", str(module))
    with pytest.raises(FileNotFoundError, match="the tiny model") as missing:
        needles.shipped_model_path()
    assert str(packaged) in str(missing.value)
    assert str(checkout) in str(missing.value)
    for place in (checkout, packaged):
        place.mkdir(parents=True)
        (place / "config.json").touch()
        (place / "model.safetensors").touch()
        assert needles.shipped_model_path() == place
    (packaged / "model.safetensors").unlink()
    assert needles.shipped_model_path() == checkout


def test_training_questions_follow_their_needles_and_only_answers_carry_loss(
    training: ModuleType,
) -> None:
    sampler = training.BatchSampler(NeedleTask(seed=9), value_tokens=(2, 7))
    batches = [sampler.batch(16, tokens) for tokens in (96, 128, 512, 1024)]
    questions = 0
    for batch, tokens in zip(batches, (96, 128, 512, 1024), strict=True):
        assert batch.ids.shape == batch.parts.shape == batch.roles.shape == (16, tokens)
        for ids, parts, roles in zip(batch.ids, batch.parts, batch.roles, strict=True):
            assert ids[0] == needles.BOS
            known: dict[tuple[int, ...], list[int]] = {}
            marked = np.zeros(tokens, np.int64)
            starts = np.flatnonzero((ids == needles.KEY) | (ids == needles.QUESTION))
            for start in starts:
                end = start + int(np.argmax(ids[start:] == needles.END))
                key, value = tuple(ids[start + 1 : start + 3]), list(ids[start + 4 : end])
                assert 2 <= len(value) <= 7
                assert np.all(roles[start : start + 4] == 1)
                assert np.all(roles[start + 4 : end + 1] == 2)
                if ids[start] == needles.KEY:
                    known[key] = value
                    continue
                assert known[key] == value
                marked[start + 3 : end] = [1, 2, *[3] * (len(value) - 2), 4]
                questions += 1
            assert np.array_equal(parts, marked)
            assert np.sum(roles == 1) == 4 * len(starts)
    assert questions > 16 * 4


def test_the_shipped_model_answers_at_2k_tokens_in_stock_transformers(
    evaluation: ModuleType, shipped: SmolLM3ForCausalLM
) -> None:
    assert sum(p.numel() for p in shipped.parameters()) == 526_208
    result = evaluation.measure(shipped, NeedleTask(seed=10), 2048, 16, documents=1)
    assert result.exact_match >= 0.9
    # Summaries must be able to tell where a needle is, or no scorer can be judged by this model.
    assert result.chunk_recall["exact token maximum"] > 0.95
    assert result.chunk_recall["minmax"] > 0.7
    assert result.chunk_recall["minmax"] > result.chunk_recall["mean"] > 8 / 32


def test_the_shipped_model_cannot_answer_what_the_document_does_not_hold(
    evaluation: ModuleType, shipped: SmolLM3ForCausalLM
) -> None:
    task = NeedleTask(seed=11)
    document = task.document(1024, 8)
    for needle in range(8):
        start, stop = document.span(needle)
        document.ids[start:stop] = task.filler(stop - start)
    cache = evaluation.prefill(shipped, document.ids)
    for key, value in zip(document.keys, document.values, strict=True):
        query, answer = task.query(key), task.answer(value)
        assert not evaluation.ask(shipped, cache, query, answer)[0]
    assert cache.get_seq_length() == 1024


def test_one_forward_judges_an_answer_as_greedy_decoding_does(
    evaluation: ModuleType, shipped: SmolLM3ForCausalLM
) -> None:
    task = NeedleTask(seed=12)
    document = task.document(512, 16)
    for key, value in zip(document.keys[:6], document.values[:6], strict=True):
        query, answer = task.query(key), task.answer(value)
        prompt = torch.from_numpy(np.concatenate([document.ids, query]))[None]
        decoded = shipped.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=4,
        )[0, prompt.shape[1] :]
        wrong = answer.copy()
        wrong[1] ^= 1
        cache = evaluation.prefill(shipped, document.ids)
        for candidate in (answer, wrong):
            judged = evaluation.ask(shipped, cache, query, candidate)[0]
            assert judged == (decoded.tolist() == candidate.tolist())


def test_a_short_training_run_goes_through_all_stages_and_learns(
    training: ModuleType, tmp_path: Path
) -> None:
    guessing = math.log(1024)
    assert training.train(tmp_path, training.smoke_recipe(), seed=0) < guessing - 0.5
    reloaded = SmolLM3ForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config.no_rope_layers == [1, 0]
    assert sum(p.numel() for p in reloaded.parameters()) == 526_208


def test_salience_is_low_when_values_stand_out_from_filler(training: ModuleType) -> None:
    roles = torch.tensor([[0, 0, 1, 2, 2]])
    keys = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [9.0, 9.0], [2.0, 0.0], [0.0, 2.0]]])
    assert training.key_salience(keys, roles) == pytest.approx(0.25)
    assert training.key_salience(keys * 3, roles) == pytest.approx(0.25)


def test_chunk_recall_counts_the_heads_that_rank_the_source_chunk_among_the_best_eight(
    evaluation: ModuleType,
) -> None:
    keys = torch.zeros(2, 20 * 64 + 7, 4)
    keys[:, 10 * 64 : 19 * 64, :2] = 1.0  # nine chunks of both heads match both queries somewhat
    keys[0, 5 * 64 + 9, 0] = 3.0  # one key of head 0 matches best, in a chunk of zeros
    query = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0] * 2])
    recall = evaluation.chunk_recall(query, keys, torch.tensor([5 * 64 + 9]))
    assert recall == {"mean": 0.0, "minmax": 0.5, "exact token maximum": 0.5}
    elsewhere = evaluation.chunk_recall(query, keys, torch.tensor([19 * 64]))
    assert elsewhere == {"mean": 0.0, "minmax": 0.0, "exact token maximum": 0.0}
