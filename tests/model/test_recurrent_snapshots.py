"""States of recurrent layers in snapshots: saved beside the K/V, read when they are needed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from recurrent_models import CHUNK, build_recurrent, make_recurrent_engine
from reference_models import prompt

from kvpager import _core
from kvpager._model.seam.state import RecurrentState, Slot, StateShape
from kvpager._runtime.recurrent.saved_states import SavedStates, StateFormat, freeze_states
from kvpager.errors import (
    CorruptSnapshotError,
    FingerprintMismatchError,
    UnsupportedVersionError,
)
from kvpager.pager import SnapshotInfo
from kvpager.stores import DirectoryStore

LENGTH = 9 * CHUNK + 5
EVERY = 2


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_next",
        pytest.param("mamba2", marks=pytest.mark.deep),
        pytest.param("jamba", marks=pytest.mark.deep),
    ],
)
def model(request):
    return build_recurrent(request.param)


@pytest.fixture(scope="module")
def hybrid():
    return build_recurrent("qwen3_next")


def make(model, **options):
    return make_recurrent_engine(model, pool_tokens=512, checkpoint_chunks=EVERY, **options)


def cold(model, ids):
    with make(model) as engine, engine.session() as session:
        session.prefill(ids)
        return session.logits


@pytest.fixture(params=["file", "store"])
def place(request, tmp_path):
    """Where a session is saved: (name or path, store)."""
    if request.param == "file":
        return str(tmp_path / "chat.kvsnap"), None
    return "chat", DirectoryStore(tmp_path / "store")


def test_a_restored_session_goes_on_where_it_was(model, closing, place):
    name, store = place
    with make(model) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        report = session.save(name, store=store)
        assert [one.name for one in report.companions] == [f"{name}.states"]
        expected = session.generate(CHUNK, eos=None).tokens.tolist()

    engine = closing(make(model))
    session = engine.restore(name, store=store)
    ids = session.tokens
    session.prefill(ids)
    assert session.generate(CHUNK, eos=None).tokens.tolist() == expected
    # What was saved of the tail is not gone on from: its rows are computed by one forward.
    assert engine.stats()["state_tokens_recomputed"] <= CHUNK
    session.trim(5 * CHUNK + 3)
    assert_same_bits(session.logits, cold(model, prompt(LENGTH)[: 5 * CHUNK + 3]), "cut")
    assert engine.stats()["state_tokens_recomputed"] <= CHUNK
    engine.pager.check_invariants()


def test_a_restored_session_is_extended_as_a_cold_run(model, closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    with make(model) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.generate(7, eos=None).tokens.tolist()
        session.save(path)
        pending = session.pending
    engine = closing(make(model))
    session = engine.restore(path)
    assert session.pending == pending
    ids = np.concatenate([session.tokens, prompt(CHUNK, seed=1)])
    session.prefill(ids)
    assert engine.core.runner.rows_used < 3 * CHUNK
    assert_same_bits(session.logits, cold(model, ids), "extended")


def test_states_are_read_when_they_are_needed(hybrid, closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
    engine = closing(make(hybrid))
    session = engine.restore(path)
    reader = session.transcript.states._saved._reader  # nobody else needs to see it
    assert reader.payload_bytes_read == 0
    session.trim(6 * CHUNK)
    session.append(prompt(3, seed=1))
    assert reader.payload_bytes_read == engine.core.state_context.format.layout.chunk_bytes


def test_a_save_of_a_beginning_has_the_states_of_that_beginning(hybrid, closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path, upto=5 * CHUNK + 2)
    engine = closing(make(hybrid))
    session = engine.restore(path)
    assert SnapshotInfo.of(_core.SnapshotReader.open(f"{path}.states")).session["positions"] == [
        2 * CHUNK,
        4 * CHUNK,
    ]
    session.append(prompt(3, seed=1))
    assert_same_bits(session.logits, cold(hybrid, session.tokens), "a saved beginning")


def test_a_session_restored_and_saved_again_keeps_its_states(hybrid, closing, tmp_path):
    first, second = str(tmp_path / "one.kvsnap"), str(tmp_path / "two.kvsnap")
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(first)
    with make(hybrid) as engine:
        engine.restore(first).save(second)
    one, two = (
        SnapshotInfo.of(_core.SnapshotReader.open(f"{path}.states")) for path in (first, second)
    )
    assert one.session["positions"] == two.session["positions"]
    assert one.reader.hashes == two.reader.hashes


@pytest.mark.parametrize("how", ["missing", "damaged", "of another save"])
def test_without_its_states_a_session_is_restored_and_computes_them(
    hybrid, closing, tmp_path, caplog, how
):
    path = tmp_path / "chat.kvsnap"
    states = tmp_path / "chat.kvsnap.states"
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
        if how == "of another save":
            other = engine.session()
            other.prefill(prompt(LENGTH, seed=4))
            other.save(tmp_path / "other.kvsnap")
    if how == "missing":
        states.unlink()
    elif how == "damaged":
        raw = bytearray(states.read_bytes())
        raw[-20] ^= 1
        states.write_bytes(raw)
    else:
        states.write_bytes((tmp_path / "other.kvsnap.states").read_bytes())
    engine = closing(make(hybrid))
    with caplog.at_level(logging.WARNING, "kvpager"):
        session = engine.restore(path)
    assert "states" in caplog.text
    session.append(prompt(3, seed=1))
    assert_same_bits(session.logits, cold(hybrid, session.tokens), f"states {how}")
    assert engine.stats()["state_tokens_recomputed"] == LENGTH


def test_in_place_of_a_damaged_state_the_one_before_it_is_used(hybrid, closing, tmp_path, caplog):
    path = tmp_path / "chat.kvsnap"
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
        last = engine.core.state_context.format.pack(
            session.transcript.states.at(9 * CHUNK)
        ).tobytes()
    states = tmp_path / "chat.kvsnap.states"
    raw = states.read_bytes()
    at = raw.find(last[:4096])
    assert at > 0
    states.write_bytes(raw[: at + 8] + bytes([raw[at + 8] ^ 1]) + raw[at + 9 :])
    engine = closing(make(hybrid))
    session = engine.restore(path)
    with caplog.at_level(logging.WARNING, "kvpager"):
        session.append(prompt(3, seed=1))
    assert f"no state at position {9 * CHUNK}" in caplog.text
    assert_same_bits(session.logits, cold(hybrid, session.tokens), "a damaged state")
    assert engine.stats()["state_tokens_recomputed"] == CHUNK + 5


def test_damaged_chunks_are_computed_again_from_a_state(hybrid, closing, tmp_path):
    path = tmp_path / "chat.kvsnap"
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
        key = session.sequence.read_kv(1, 3 * CHUNK, 4 * CHUNK)[0].numpy()
    raw = bytearray(path.read_bytes())
    at = raw.find(np.ascontiguousarray(key[:, 0].T).tobytes())  # [k_dim][chunk_tokens]
    assert at > 0
    raw[at] ^= 1
    path.write_bytes(raw)
    engine = closing(make(hybrid))
    session = engine.restore(path, on_corrupt="recompute")
    session.append(prompt(3, seed=1))
    assert_same_bits(session.logits, cold(hybrid, session.tokens), "a damaged chunk")
    assert session.recomputed_tokens == CHUNK


def test_a_damaged_tail_is_computed_again(hybrid, closing, tmp_path):
    path = tmp_path / "chat.kvsnap"
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
        key = session.sequence.read_kv(1, 9 * CHUNK, LENGTH)[0].numpy()
    raw = bytearray(path.read_bytes())
    at = raw.find(np.ascontiguousarray(key[:, 0].T)[0].tobytes())
    assert at > 0
    raw[at] ^= 1
    path.write_bytes(raw)
    engine = closing(make(hybrid))
    with pytest.raises(CorruptSnapshotError):
        engine.restore(path)
    session = engine.restore(path, on_corrupt="recompute")
    assert session.length == LENGTH
    assert_same_bits(session.logits, cold(hybrid, prompt(LENGTH)), "a damaged tail")


def test_forks_of_a_restored_session_share_its_saved_states(hybrid, closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
    engine = closing(make(hybrid))
    twin = engine.restore(path).fork()
    twin.trim(4 * CHUNK)
    twin.append(prompt(2, seed=1))
    assert engine.stats()["state_tokens_recomputed"] == 0
    assert_same_bits(twin.logits, cold(hybrid, twin.tokens), "a fork")


def test_what_is_restored_as_approximate_shares_no_state(hybrid, closing, tmp_path, monkeypatch):
    path = str(tmp_path / "chat.kvsnap")
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    engine = closing(make(hybrid))
    session = engine.restore(path, on_mismatch="approximate")
    session.trim(4 * CHUNK)
    session.append(prompt(2 * CHUNK, seed=1))
    assert engine.stats()["checkpoints_restored"] == 1
    assert engine.stats()["checkpoint_states"] > 0
    assert engine.core.checkpoints.held(engine.pager.chain_hashes(session.tokens)) == []
    other = engine.session()
    other.prefill(session.tokens)
    assert_same_bits(other.logits, cold(hybrid, other.tokens), "beside an approximate session")


# Of the format.

SHAPE = StateShape(
    slots=(
        Slot(0, "conv_states.0", (1, 6, 3), torch.bfloat16),
        Slot(0, "recurrent_states.0", (1, 2, 5, 7), torch.float32),
        Slot(3, "conv_states.0", (1, 6, 3), torch.bfloat16),
    ),
    hidden=Slot(-1, "hidden", (33,), torch.float16),
)


def a_state(position, seed=0):
    generator = torch.Generator().manual_seed(seed)
    *tensors, hidden = (
        torch.randn(slot.shape, generator=generator).to(slot.dtype)
        for slot in (*SHAPE.slots, SHAPE.hidden)
    )
    return RecurrentState(position, tuple(tensors), hidden)


def saved(tmp_path, states, **changes):
    frozen = freeze_states(StateFormat(SHAPE), states, exact=True, fingerprint="{}")
    path = str(tmp_path / "x.kvsnap")
    writer = _core.SnapshotWriter(path, frozen.content.layout)
    session = changes.get("session", frozen.session)
    which = list(range(frozen.content.chunks))
    writer.write_content(frozen.content, which, frozen.fingerprint, session)
    writer.publish()
    return SnapshotInfo.of(_core.SnapshotReader.open(path))


def test_a_state_is_unpacked_as_it_was_packed():
    state_format = StateFormat(SHAPE)
    state = a_state(32)
    again = state_format.unpack(32, state_format.pack(state))
    assert again.position == 32
    for one, other in zip((*again.tensors, again.hidden), (*state.tensors, state.hidden)):
        assert_same_bits(one, other, "a packed state")


def test_large_states_have_a_layout_too():
    slot = Slot(0, "recurrent_states.0", (1, 64, 128, 256), torch.float32)
    layout = StateFormat(StateShape((slot,), SHAPE.hidden)).layout
    assert layout.chunk_bytes == 2 * slot.nbytes


def test_saved_states_are_found_by_name(tmp_path):
    keys = [bytes([100 + i]) * 32 for i in range(3)]
    states = [(key, a_state(16 * (i + 1), i)) for i, key in enumerate(keys)]
    info = saved(tmp_path, states)
    here = [bytes([i]) * 32 for i in range(3)]  # what the text is called where they are read
    states = SavedStates(StateFormat(SHAPE), info, dict(zip(keys, here)))
    assert states.held([here[0], b"?" * 32, here[2]]) == [16, 48]
    assert states.read(b"?" * 32) is None
    assert_same_bits(states.read(here[2]).hidden, a_state(48, 2).hidden, "a saved state")


def test_states_of_another_shape_are_refused(tmp_path):
    info = saved(tmp_path, [(b"a" * 32, a_state(16))])
    other = StateShape(SHAPE.slots[:2], SHAPE.hidden)
    with pytest.raises(FingerprintMismatchError) as error:
        SavedStates(StateFormat(other), info, {})
    assert error.value.field == "state"


@pytest.mark.parametrize("positions", ["[16,32]", "[]", "16", "[-16]", '["16"]', "null", "[true]"])
def test_positions_that_are_not_one_for_each_state_are_refused(tmp_path, positions):
    frozen = freeze_states(
        StateFormat(SHAPE), [(b"a" * 32, a_state(16))], exact=True, fingerprint="{}"
    )
    session = frozen.session.replace('"positions":[16]', f'"positions":{positions}')
    info = saved(tmp_path, [(b"a" * 32, a_state(16))], session=session)
    with pytest.raises(CorruptSnapshotError, match=r"session\.positions"):
        SavedStates(StateFormat(SHAPE), info, {})


def test_a_format_of_the_future_is_refused(tmp_path):
    frozen = freeze_states(
        StateFormat(SHAPE), [(b"a" * 32, a_state(16))], exact=True, fingerprint="{}"
    )
    session = frozen.session.replace('"version":1', '"version":2')
    info = saved(tmp_path, [(b"a" * 32, a_state(16))], session=session)
    with pytest.raises(UnsupportedVersionError, match=r"session\.version is 2"):
        SavedStates(StateFormat(SHAPE), info, {})


def test_states_of_another_engine_are_refused(hybrid, closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    with make(hybrid, salt="one") as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
    info = SnapshotInfo.of(_core.SnapshotReader.open(f"{path}.states"))
    engine = closing(make(hybrid, salt="another"))
    session = engine.session()
    with pytest.raises(FingerprintMismatchError) as error:
        session.transcript.states.attach(info, [])
    assert error.value.field == "salt"


def test_states_of_another_release_are_refused(hybrid, closing, tmp_path, monkeypatch):
    path = str(tmp_path / "chat.kvsnap")
    with make(hybrid) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save(path)
    info = SnapshotInfo.of(_core.SnapshotReader.open(f"{path}.states"))
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    engine = closing(make(hybrid))
    session = engine.session()
    with pytest.raises(FingerprintMismatchError, match="torch_version"):
        session.transcript.states.attach(info, [])


def test_states_that_are_not_exact_are_refused_for_a_text_that_is(hybrid, closing, tmp_path):
    engine = closing(make(hybrid))
    session = engine.session()
    session.prefill(prompt(CHUNK))
    frozen = freeze_states(
        engine.core.state_context.format,
        [(b"a" * 32, session.transcript.states.at(CHUNK))],
        exact=False,
        fingerprint=engine.pager.fingerprint_json,
    )
    path = str(tmp_path / "x.kvsnap")
    writer = _core.SnapshotWriter(path, frozen.content.layout)
    writer.write_content(frozen.content, [0], frozen.fingerprint, frozen.session)
    writer.publish()
    info = SnapshotInfo.of(_core.SnapshotReader.open(path))
    with pytest.raises(CorruptSnapshotError, match="not exact"):
        session.transcript.states.attach(info, [b"a" * 32])


def test_saving_a_part_of_a_text_counts_as_no_cut(hybrid, closing, tmp_path):
    engine = closing(make(hybrid))
    session = engine.session()
    session.prefill(prompt(LENGTH))
    session.generate(CHUNK, eos=None).tokens.tolist()
    before = engine.stats()["tokens_reprefilled"]
    session.save(tmp_path / "part.kvsnap", upto=session.committed - 1)
    assert engine.stats()["tokens_reprefilled"] == before
    session.trim(session.committed - 1)  # which is one
    assert engine.stats()["tokens_reprefilled"] > before
