"""The two-hop task: its texts, its training batches, and the model shipped to answer it."""

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

MODELS = Path(__file__).resolve().parents[2] / "models"


def from_models(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MODELS)
        return importlib.import_module(name)


two_hop = from_models("two_hop_task")
TwoHopTask = two_hop.TwoHopTask


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return from_models("train_two_hop")


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    return from_models("two_hop_eval")


@pytest.fixture(scope="module")
def shipped() -> SmolLM3ForCausalLM:
    return SmolLM3ForCausalLM.from_pretrained(two_hop.shipped_model_path(), dtype=torch.float32)


def definitions(ids: np.ndarray) -> dict[tuple[int, ...], tuple[int, int]]:
    """Alias -> (index, value), read back from the tokens alone."""
    found = {}
    for start in np.flatnonzero(ids == needles.KEY):
        if ids[start + 3] == needles.SEPARATOR:
            assert ids[start + 5] == needles.END
            alias = tuple(ids[start + 1 : start + 3].tolist())
            assert alias not in found
            found[alias] = (int(start), int(ids[start + 4]))
    return found


def references(ids: np.ndarray) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """Key -> (index, alias), read back from the tokens alone."""
    found = {}
    for start in np.flatnonzero(ids == needles.KEY):
        if ids[start + 3] == two_hop.REFERENCE:
            assert ids[start + 6] == needles.END
            key = tuple(ids[start + 1 : start + 3].tolist())
            assert key not in found
            found[key] = (int(start), tuple(ids[start + 4 : start + 6].tolist()))
    return found


@given(
    documents=st.lists(st.integers(1, 600), min_size=2, max_size=7),
    facts=st.integers(0, 12),
    local=st.integers(0, 6),
    system=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_every_answer_can_be_read_from_the_text_and_takes_two_hops(
    documents: list[int], facts: int, local: int, system: int, seed: int
) -> None:
    task = TwoHopTask(seed=seed)
    half = (len(documents) + 1) // 2
    slots = [tokens // two_hop.SLOT_TOKENS for tokens in documents]
    if min(sum(slots[:half]), sum(slots[half:])) < facts:
        with pytest.raises(ValueError, match="do not fit"):
            task.text(documents, facts, local=local, system=system)
        return
    if min(sum(slots[:half]), sum(slots[half:])) < facts + 2 * local + len(documents):
        local = 0  # whether they fit depends on where the others are
    text = task.text(documents, facts, local=local, system=system)
    assert [len(ids) for ids in text.documents] == documents
    assert len(text.system) == system
    assert text.ids[0] == needles.BOS
    assert np.sum(text.ids == needles.BOS) == 1
    told, referred = definitions(text.ids), references(text.ids)
    assert len(text.facts) == len(told) == len(referred) == facts + local
    assert sum(fact.is_local for fact in text.facts) == local
    for fact in text.facts:
        start, alias = referred[tuple(fact.query[1:3].tolist())]
        assert start == text.position(fact.reference)
        assert alias == tuple(fact.alias.tolist())
        assert told[alias] == (text.position(fact.definition), fact.value)
        assert fact.query.tolist() == [needles.QUESTION, *fact.key, needles.SEPARATOR]
        assert fact.answer.tolist() == [fact.value, needles.END]
        assert text.ids[text.position(fact.resolving)] == alias[1]
        assert text.position(fact.definition) < text.position(fact.reference)


def test_no_document_holds_both_hops_of_a_fact_across_documents() -> None:
    text = TwoHopTask(seed=1).text([300, 500, 400, 200, 600], 20, local=6)
    told = [definitions(ids) for ids in text.documents]
    referred = [references(ids) for ids in text.documents]
    for fact in text.facts:
        key, alias = tuple(fact.key.tolist()), tuple(fact.alias.tolist())
        holders = [alias in definition for definition in told]
        users = [key in reference for reference in referred]
        assert sum(holders) == sum(users) == 1
        assert (holders.index(True), users.index(True)) == (fact.definition[0], fact.reference[0])
        assert (holders == users) == fact.is_local
        if not fact.is_local:
            assert fact.definition[0] < 3 <= fact.reference[0]


def test_either_half_of_the_documents_may_be_reordered() -> None:
    text = TwoHopTask(seed=2).text([300, 300, 300, 300], 12)
    first, second, third, fourth = text.documents
    ids = np.concatenate([text.system, second, first, fourth, third])
    told, referred = definitions(ids), references(ids)
    for fact in text.facts:
        start, alias = referred[tuple(fact.key.tolist())]
        assert told[alias][1] == fact.value
        assert told[alias][0] < start


def test_names_and_values_use_content_tokens_and_come_in_near_misses() -> None:
    text = TwoHopTask(seed=3).text([4000, 4000], 200)
    assert np.sum(text.ids < needles.FIRST_CONTENT) == 1 + 3 * 200 + 3 * 200
    names = np.array([name for fact in text.facts for name in (fact.key, fact.alias)])
    assert names.min() >= needles.FIRST_CONTENT
    assert min(fact.value for fact in text.facts) >= needles.FIRST_CONTENT
    assert len({tuple(name) for name in names.tolist()}) == 400
    # Any two of 400 random names share a first token by chance in about one of six.
    shared = len(names) - len(set(names[:, 0].tolist()))
    assert shared / len(names) > 0.25
    values = [fact.value for fact in text.facts]
    assert 0.1 < 1 - len(set(values)) / len(values) < 0.4


def test_facts_reach_all_parts_of_the_documents() -> None:
    task = TwoHopTask(seed=4)
    places = [
        place[1]
        for _ in range(20)
        for fact in task.text([800, 800], 24).facts
        for place in (fact.definition, fact.reference)
    ]
    shares = np.histogram(places, bins=8, range=(0, 800))[0] / len(places)
    assert np.all(np.abs(shares - 1 / 8) < 0.035)


def test_the_same_seed_gives_the_same_texts_on_every_machine() -> None:
    def digest(seed: int) -> str:
        text = TwoHopTask(seed=seed).text([300, 500, 200], 8, local=3)
        facts = np.array([[*fact.key, *fact.alias, fact.value] for fact in text.facts])
        return hashlib.sha256(
            text.ids.astype("<i8").tobytes() + facts.astype("<i8").tobytes()
        ).hexdigest()

    assert digest(5) == digest(5)
    assert digest(5) != digest(6)
    assert digest(5) == "e47453dab17a56f1e83697b5ae94cae01ded4bf7edbdf2685917336a50520aa3"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TwoHopTask(vocab=63), "vocab must be at least 64, got 63"),
        (lambda: TwoHopTask().text([100], 1), "at least 2 documents, got 1"),
        (lambda: TwoHopTask().text([100, 0], 1), "at least 1 token, got one of 0"),
        (lambda: TwoHopTask().text([100, 100], -1), "facts >= 0"),
        (lambda: TwoHopTask().text([100, 100], 1, local=-1), "local >= 0"),
        (lambda: TwoHopTask().text([100, 100], 1, system=0), "system >= 1"),
        (lambda: TwoHopTask().text([100, 13], 1), "takes 14 tokens of a document"),
        (lambda: TwoHopTask().text([27, 27], 0, local=1), "takes 14 tokens of a document"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_the_shipped_model_is_the_one_trained_on_this_task() -> None:
    path = two_hop.shipped_model_path()
    assert path.name == "tiny-two-hop"
    assert (path / "model.safetensors").is_file()
    with pytest.raises(FileNotFoundError, match="tiny-three-hop"):
        needles.shipped_model_path("tiny-three-hop")


def test_training_questions_come_last_and_only_answers_carry_loss() -> None:
    batches = from_models("two_hop_batches")
    sampler = batches.TwoHopSampler(TwoHopTask(seed=7))
    for tokens in (96, 128, 512):
        batch = sampler.batch(16, tokens)
        assert batch.ids.shape == batch.parts.shape == batch.questions.shape == (16, tokens)
        for ids, parts, questions in zip(batch.ids, batch.parts, batch.questions, strict=True):
            assert ids[0] == needles.BOS
            asked = np.flatnonzero(ids == needles.QUESTION)
            assert np.array_equal(questions[asked], np.arange(1, len(asked) + 1))
            assert np.array_equal(np.flatnonzero(questions), np.arange(asked[0], tokens))
            document = ids[: asked[0]]
            told, referred = definitions(document), references(document)
            assert len(told) == len(referred) >= len(asked)
            marked = np.zeros(tokens, np.int64)
            for start in asked:
                at, alias = referred[tuple(ids[start + 1 : start + 3].tolist())]
                assert told[alias][0] < at
                assert ids[start + 3 : start + 6].tolist() == [
                    needles.SEPARATOR,
                    told[alias][1],
                    needles.END,
                ]
                marked[start + 3 : start + 5] = batches.VALUE, batches.ANSWER_END
            assert np.array_equal(parts, marked)


def test_a_blind_question_sees_itself_and_the_first_token_alone(training: ModuleType) -> None:
    seen = training.blind_mask(torch.tensor([[0, 0, 0, 1, 1, 2]]))[0, 0]
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]


def test_a_short_training_run_learns_and_leaves_a_stock_model(
    training: ModuleType, tmp_path: Path
) -> None:
    guessing = math.log(1024)
    assert training.train(tmp_path, training.smoke_recipe(), seed=0) < guessing - 2
    reloaded = SmolLM3ForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config.no_rope_layers == [1, 0, 1, 0]
    assert sum(p.numel() for p in reloaded.parameters()) == 724_608


def test_the_shipped_model_answers_what_it_read_whole_and_not_what_it_read_in_parts(
    evaluation: ModuleType, shipped: SmolLM3ForCausalLM
) -> None:
    assert sum(p.numel() for p in shipped.parameters()) == 724_608
    result = evaluation.measure(shipped, TwoHopTask(seed=9), 2048, 4, facts=16, texts=2)
    assert result.whole >= 0.9
    assert result.alone <= 0.3
    assert result.alone_local >= 0.9


def test_documents_encoded_alone_at_their_place_are_those_at_zero_with_keys_rotated(
    evaluation: ModuleType, shipped: SmolLM3ForCausalLM
) -> None:
    text = TwoHopTask(seed=10).text([100, 120], 2)
    stitched = evaluation.encode_alone(shipped, text)
    start = text.starts[1]
    alone = evaluation.prefill(shipped, text.documents[1])
    cos, sin = shipped.model.rotary_emb(torch.zeros(1), torch.tensor([[start]]))
    for number, layer in enumerate(alone.layers):
        keys = layer.keys
        if shipped.config.no_rope_layers[number]:
            half = keys.shape[-1] // 2
            turned = torch.cat([-keys[..., half:], keys[..., :half]], dim=-1)
            keys = keys * cos + turned * sin
        placed = stitched.layers[number]
        torch.testing.assert_close(placed.keys[:, :, start:], keys, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(placed.values[:, :, start:], layer.values, rtol=1e-4, atol=1e-3)


def test_documents_that_were_read_alone_answer_together_in_any_order() -> None:
    """One document says which alias a key stands for, another one the alias's value."""
    from transformers import AutoModelForCausalLM

    import kvpager
    from kvpager.cli.needles import BOS, END, KEY, SEPARATOR, NeedleTask

    facts, stands_for = 4, 6
    model = AutoModelForCausalLM.from_pretrained(needles.shipped_model_path("tiny-two-hop"))
    task = NeedleTask(seed=0)
    keys, aliases = np.split(task.keys(2 * facts), 2)
    values = task.filler(facts).tolist()
    system = np.array([BOS, *task.filler(127)])
    with kvpager.Engine(model, pool_tokens=16384) as engine:
        for n in range(facts):
            value = [KEY, *aliases[n], SEPARATOR, values[n], END]
            key = [KEY, *keys[n], stands_for, *aliases[n], END]
            second = np.concatenate([task.filler(256), value, task.filler(250)])
            first = np.concatenate([task.filler(50 * n), key, task.filler(505 - 50 * n)])
            engine.cache_segment(second, name=f"value-{n}")
            engine.cache_segment(first, name=f"key-{n}")
        for n in range(facts):
            found = task.rng.permutation(facts)  # both of each, in another order every time
            names = [f"{kind}-{i}" for kind in ("value", "key") for i in found]
            with engine.assemble([system, *names, task.query(keys[n])]) as session:
                assert session.generate(2, eos=END).tokens.tolist() == [values[n], END]
                assert session.assembly is not None
                assert session.assembly.tokens == 4228
                assert session.assembly.rows < 4228 / 6
