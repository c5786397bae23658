"""A session's life: prompts, the pending token, trim, fork, save, restore, interruptions."""

from __future__ import annotations

import ctypes
import gc
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits, assert_same_session
from reference_models import VOCAB, build, make_engine, prompt

import kvpager
from kvpager import Engine, InvalidArgumentError, PagerConfig, PrefixMismatchError
from kvpager._model.watch.looks import only_looks


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model))


@pytest.fixture
def session(engine):
    session = engine.session()
    session.prefill(prompt(50))
    return session


def test_prefill_of_the_tokens_held_computes_nothing(engine, session):
    forwards = engine.core.runner.forwards
    session.prefill(prompt(50))
    assert engine.core.runner.forwards == forwards
    assert session.length == 50


def test_prefill_computes_only_what_follows(engine, session):
    forwards = engine.core.runner.forwards
    session.prefill(np.concatenate([prompt(50), prompt(engine.rows, seed=1)]))
    assert engine.core.runner.forwards == forwards + 1


def test_a_prompt_that_diverges_is_refused_at_the_token_where_it_does(session):
    ids = prompt(60)
    ids[17] = (ids[17] + 1) % VOCAB
    with pytest.raises(PrefixMismatchError, match=r"ids\[17\].*trim\(17\)") as refused:
        session.prefill(ids)
    assert refused.value.position == 17
    assert session.length == 50


def test_a_prompt_shorter_than_what_is_held_is_refused(session):
    with pytest.raises(PrefixMismatchError, match=r"20 tokens.*trim\(20\)") as refused:
        session.prefill(prompt(50)[:20])
    assert refused.value.position == 20


def test_the_last_sampled_token_is_pending_until_the_next_forward(session):
    produced = session.generate(3, eos=None).tokens.tolist()
    assert session.pending == produced[-1]
    assert session.tokens.tolist() == [*prompt(50), *produced]
    assert (session.length, session.committed) == (53, 52)
    session.prefill(session.tokens)
    assert session.pending is None
    assert (session.length, session.committed) == (53, 53)


def test_a_prompt_without_the_pending_token_is_refused(session):
    session.generate(3, eos=None).tokens.tolist()
    with pytest.raises(PrefixMismatchError, match="trim"):
        session.prefill(session.tokens[:-1])


def test_append_puts_new_tokens_after_the_pending_one(engine, session):
    produced = session.generate(2, eos=None).tokens.tolist()
    session.append([5, 6])
    whole = engine.session()
    whole.prefill([*prompt(50), *produced, 5, 6])
    assert_same_session(session, whole, "append")


def test_generation_goes_on_where_it_stopped(engine, session):
    first = [
        *session.generate(4, eos=None, stream="tokens"),
        *session.generate(4, eos=None, stream="tokens"),
    ]
    whole = engine.session()
    whole.prefill(prompt(50))
    assert first == whole.generate(8, eos=None).tokens.tolist()


def test_an_abandoned_iterator_leaves_the_tokens_it_yielded(engine, session):
    stream = session.generate(20, eos=None, stream="tokens")
    taken = [next(stream), next(stream), next(stream)]
    stream.close()
    assert session.tokens[50:].tolist() == taken
    rest = session.generate(5, eos=None).tokens.tolist()
    whole = engine.session()
    whole.prefill(prompt(50))
    assert taken + rest == whole.generate(8, eos=None).tokens.tolist()


def test_logits_stay_those_the_pending_token_was_chosen_from(session):
    before = session.logits
    token = next(session.generate(1, eos=None, stream="tokens"))
    assert_same_bits(session.logits, before, "logits")
    assert token == before.argmax()
    assert session.pending == token


def test_logits_are_a_copy(session):
    session.logits.zero_()
    assert session.logits.abs().max() > 0


def test_trim_forgets_what_follows_and_the_pending_token(engine, session):
    session.generate(2, eos=None).tokens.tolist()
    session.trim(33)
    assert session.length == session.committed == 33
    assert session.pending is None
    session.append(prompt(50)[33:])
    whole = engine.session()
    whole.prefill(prompt(50))
    assert_same_session(session, whole, "trimmed and fed again")


def test_trim_to_the_length_keeps_the_pending_token_and_to_the_committed_drops_it(session):
    next(session.generate(1, eos=None, stream="tokens"))
    session.trim(session.length)
    assert session.pending is not None
    session.trim(session.committed)
    assert session.pending is None
    assert session.length == 50


@pytest.mark.parametrize("position", [-1, 51, True])
def test_trim_outside_the_session_is_refused(session, position):
    with pytest.raises(InvalidArgumentError, match="position is"):
        session.trim(position)


def test_a_fork_continues_alike_and_apart(engine, session):
    next(session.generate(1, eos=None, stream="tokens"))
    twin = session.fork()
    assert (
        twin.generate(5, eos=None).tokens.tolist() == session.generate(5, eos=None).tokens.tolist()
    )
    twin.append(prompt(40, seed=4))
    assert session.length == 56
    assert_same_session(session, session.fork(), "fork")


def test_a_restored_session_goes_on_with_the_same_bits(model, engine, session, tmp_path, closing):
    next(
        session.generate(
            1, temperature=0.8, top_k=50, top_p=0.9, seed=11, eos=None, stream="tokens"
        )
    )
    written = session.save(tmp_path / "turn.kvsnap").bytes_written
    assert written == (tmp_path / "turn.kvsnap").stat().st_size
    other = closing(make_engine(model, pool_tokens=512, host_bytes="64MiB"))
    again = other.restore(tmp_path / "turn.kvsnap")
    assert again.pending == session.pending
    assert again.sampling == kvpager.sampling.Sampling(0.8, 50, 0.9, 11)
    assert (again.restored_tokens, again.restored_tokens_consumed) == (50, 0)
    longer = np.concatenate([session.tokens, prompt(30, seed=2)])
    forwards = other.core.runner.forwards
    again.prefill(longer)
    assert other.core.runner.forwards - forwards == 1
    assert again.restored_tokens_consumed == 50
    session.prefill(longer)
    assert_same_session(again, session, "restored")
    options = {"temperature": 0.9, "eos": None}
    assert (
        again.generate(6, **options).tokens.tolist()
        == session.generate(6, **options).tokens.tolist()
    )


def test_a_restore_that_the_prompt_cannot_use_is_refused_not_computed_again(
    engine, session, tmp_path
):
    session.save(tmp_path / "turn.kvsnap")
    again = engine.restore(tmp_path / "turn.kvsnap")
    forwards = engine.core.runner.forwards
    ids = prompt(80)
    ids[3] = (ids[3] + 1) % VOCAB
    with pytest.raises(kvpager.RestoreNotConsumedError, match="restored token 3"):
        again.prefill(ids)
    with pytest.raises(kvpager.RestoreNotConsumedError, match="40 tokens"):
        again.prefill(prompt(50)[:40])
    assert engine.core.runner.forwards == forwards
    assert again.restored_tokens_consumed == 0


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"version": 2}, kvpager.UnsupportedVersionError, "session.version is 2"),
        ({"pending": VOCAB}, kvpager.CorruptSnapshotError, "session.pending is 300"),
        ({"pending": True}, kvpager.CorruptSnapshotError, "session.pending is True"),
        ({"generation_start": 99}, kvpager.CorruptSnapshotError, "session.generation_start is 99"),
        ({"sampling": 3}, kvpager.CorruptSnapshotError, "session.sampling is 3"),
        ({"sampling": {"heat": 1}}, kvpager.CorruptSnapshotError, "session.sampling.*heat"),
        ({"sampling": {"top_p": 2}}, kvpager.CorruptSnapshotError, "session.sampling.*top_p"),
    ],
)
def test_a_session_section_that_cannot_be_is_refused_by_name(
    engine, session, tmp_path, state, error, message
):
    session.sequence.save(tmp_path / "odd", session=state)
    with pytest.raises(error, match=message):
        engine.restore(tmp_path / "odd", on_corrupt="recompute")
    session.sequence.save(tmp_path / "bare")  # a pager's own, without any
    assert engine.restore(tmp_path / "bare").tokens.tolist() == session.tokens.tolist()


def test_what_was_trimmed_from_a_restored_session_does_not_count_as_consumed(
    engine, session, tmp_path
):
    session.save(tmp_path / "turn.kvsnap")
    again = engine.restore(tmp_path / "turn.kvsnap")
    again.trim(20)
    again.append(prompt(60, seed=8))
    assert again.restored_tokens_consumed == 20


class ModelError(Exception):
    """What a test throws from the middle of the model."""


@pytest.mark.parametrize("interruption", [ModelError, KeyboardInterrupt])
def test_an_exception_in_the_middle_of_a_forward_leaves_the_session_as_it_was(
    model, engine, session, interruption
):
    next(session.generate(1, eos=None, stream="tokens"))
    tokens, logits = session.tokens.tolist(), session.logits

    def interrupt(*_):
        raise interruption

    handle = model.model.layers[1].mlp.register_forward_hook(only_looks(interrupt))
    try:
        with pytest.raises(interruption):
            session.append([7, 8, 9])
        with pytest.raises(interruption):
            session.generate(2, eos=None).tokens.tolist()
    finally:
        handle.remove()
    assert session.tokens.tolist() == tokens
    assert_same_bits(session.logits, logits, "logits")
    engine.pager.check_invariants()
    session.append([7, 8, 9])
    whole = engine.session()
    whole.prefill([*tokens, 7, 8, 9])
    assert_same_session(session, whole, "after an interruption")


def test_a_non_finite_key_aborts_the_forward_and_names_layer_and_position(model, engine, session):
    def poison(module, arguments, output):
        output[0, 1, 0] = float("nan")
        return output

    handle = model.model.layers[2].self_attn.k_proj.register_forward_hook(only_looks(poison))
    try:
        with pytest.raises(kvpager.NonFiniteError, match=r"layer 2.*position 51"):
            session.append([7, 8, 9])
    finally:
        handle.remove()
    assert session.length == 50
    session.append([7, 8, 9])
    assert session.length == 53


def test_a_prefill_that_fails_midway_goes_on_from_its_last_forward(model, engine):
    session, calls = engine.session(), []

    def fail_third(*_):
        calls.append(1)
        if len(calls) == 3:
            raise ModelError

    handle = model.model.layers[0].register_forward_hook(only_looks(fail_third))
    ids = prompt(5 * engine.rows)
    try:
        with pytest.raises(ModelError):
            session.prefill(ids)
        assert session.length == 2 * engine.rows
        session.prefill(ids)
    finally:
        handle.remove()
    assert session.length == len(ids)
    assert len(calls) == 6


@pytest.mark.parametrize("trimmed", [18, 50])
def test_logits_are_not_taken_for_those_of_other_tokens_after_a_failure(
    model, engine, session, trimmed
):
    calls = []

    def fail_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise ModelError

    session.trim(trimmed)
    handle = model.model.layers[0].register_forward_hook(only_looks(fail_second))
    try:
        with pytest.raises(ModelError):
            session.append(prompt(engine.rows + 1, seed=6))
    finally:
        handle.remove()
    assert session.length == trimmed + engine.rows
    whole = engine.session()
    whole.prefill(session.tokens)
    assert_same_session(session, whole, "after a failure midway")


def test_progress_counts_every_token_once(engine):
    calls = []
    engine.session().prefill(prompt(70), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 70), (32, 70), (64, 70), (70, 70)]


def test_progress_true_draws_a_bar_on_stderr(engine, capsys):
    engine.session().prefill(prompt(70), progress=True)
    captured = capsys.readouterr()
    assert "prefill" in captured.err
    assert "70/70" in captured.err
    assert captured.out == ""


def test_progress_of_another_kind_is_refused(engine):
    with pytest.raises(InvalidArgumentError, match="progress is 3"):
        engine.session().prefill(prompt(5), progress=3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([1, VOCAB], rf"ids\[1\] is {VOCAB}.*0 to {VOCAB - 1}"),
        ([4, -1], r"ids\[1\] is -1"),
        ([1.0, 2.0], "float64"),
        ([True, False], "bool"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "bfloat16"),
        ([[1, 2], [3, 4]], r"shape \[2, 2\]"),
        ("text", "tokenizer"),
        ([[1, 2], [3]], "sequence of token ids"),
        ([2**70], "expected"),
        (7, "shape"),
    ],
)
def test_ids_that_are_no_tokens_are_refused_before_anything_changes(engine, session, ids, message):
    forwards = engine.core.runner.forwards
    for call in (session.prefill, session.append, engine.score):
        with pytest.raises(InvalidArgumentError, match=message):
            call(ids)
    assert session.length == 50
    assert engine.core.runner.forwards == forwards


@pytest.mark.parametrize("convert", [list, np.int32, torch.as_tensor, lambda ids: ids[None]])
def test_ids_come_as_lists_arrays_tensors_and_batches_of_one(engine, convert):
    session = engine.session()
    session.prefill(convert(prompt(20)))
    assert session.tokens.tolist() == prompt(20).tolist()


def test_an_empty_session_has_nothing_to_generate_save_or_show(engine, tmp_path):
    session = engine.session()
    for call in (
        lambda: session.generate(1, stream="tokens"),
        lambda: session.save(tmp_path / "x.kvsnap"),
        lambda: session.logits,
    ):
        with pytest.raises(InvalidArgumentError, match="empty"):
            call()


def test_score_needs_two_tokens(engine):
    with pytest.raises(InvalidArgumentError, match="at least 2"):
        engine.score([5])


def test_closed_sessions_and_engines_say_so(model):
    engine = make_engine(model)
    session = engine.session()
    session.prefill(prompt(10))
    other = engine.session()
    session.close()
    session.close()
    told = ["tokens", "length", "committed", "pending", "logits", "messages"]
    calls = [
        *(partial(getattr, session, name) for name in told),
        lambda: session.append([3]),
        lambda: session.generate(3),
        lambda: session.trim(0),
        lambda: session.pin(0, 1),
        session.fork,
        session.ledger,
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="session is closed"):
            call()
    engine.close()
    engine.close()
    assert other.closed
    for call in (engine.session, engine.stats, lambda: other.append([3])):
        with pytest.raises(InvalidArgumentError, match="engine is closed"):
            call()


def test_a_session_that_nobody_holds_gives_its_chunks_up(engine):
    before = engine.stats()["free_blocks"]
    engine.session().prefill(prompt(5))
    assert engine.stats()["free_blocks"] == before


def test_a_session_of_another_engine_is_refused(model, engine, closing):
    stranger = closing(make_engine(model)).session()
    with pytest.raises(InvalidArgumentError, match="expected a session of this engine"):
        engine.prefill_many([(stranger, prompt(5))])


def test_a_session_named_twice_is_refused(engine, session):
    with pytest.raises(InvalidArgumentError, match="twice"):
        engine.prefill_many([(session, prompt(50)), (session, prompt(50))])
    with pytest.raises(InvalidArgumentError, match="twice"):
        engine.generate_many([session, session], 3)


def test_a_prompt_that_the_tiers_cannot_hold_is_refused_at_admission(model, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes=0))
    session = engine.session()
    with pytest.raises(kvpager.CapacityError, match="bytes"):
        session.prefill(prompt(400))
    assert session.length == 0
    assert engine.core.runner.forwards == 0
    session.prefill(prompt(30))


def test_a_refused_admission_takes_no_shared_chunks_either(model, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes=480 << 10))
    engine.session().prefill(prompt(64))
    session = engine.session()
    with pytest.raises(kvpager.CapacityError, match="bytes"):
        session.prefill(np.concatenate([prompt(64), prompt(400, seed=1)]))
    assert session.length == 0
    session.prefill(prompt(70))
    assert engine.stats()["prefix_tokens_reused"] >= 64


def test_changing_torchs_threads_under_an_engine_is_refused(engine, session):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(InvalidArgumentError, match=rf"set_num_threads\({threads}\)"):
            session.append([3])
    finally:
        torch.set_num_threads(threads)
    session.append([3])


def test_autocast_around_an_engine_is_refused(session):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InvalidArgumentError, match="autocast"):
            session.append([3])
        with torch.autocast("cpu", enabled=False):
            session.append([3])


def test_changing_torchs_matmul_precision_under_an_engine_is_refused(session):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(InvalidArgumentError, match=r"precision.*'medium', but was"):
            session.append([3])
    finally:
        torch.set_float32_matmul_precision(before)
    session.append([3])


@pytest.mark.parametrize(
    ("switch", "refused"),
    [
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", ""),  # of a GPU alone
        ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "'medium', but was 'highest'"),
        ("torch.backends.fp32_precision = 'tf32'", "'high', but was 'highest'"),
    ],
    ids=["of-a-gpu", "of-mkldnn", "of-all"],
)
def test_new_names_of_torchs_precision_are_understood(switch, refused):
    """In a process of its own: torch refuses to tell the old names from then on."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from kvpager import InvalidArgumentError\n"
        "from reference_models import build, make_engine, prompt\n"
        "model = build('llama')\n"
        "session = make_engine(model).session()\n"
        "session.prefill(prompt(20))\n"
        f"{switch}\n"
        "try:\n"
        "    session.append([3])\n"
        "    print('went on')\n"
        "except InvalidArgumentError as error:\n"
        "    print(error)\n"
        "make_engine(model).session().prefill(prompt(20))\n"
        "print('anew')\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (refused or "went on") in said
    assert said.endswith("anew\n")


def test_switching_mkldnn_off_under_an_engine_is_refused(session, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        with pytest.raises(InvalidArgumentError, match=r"mkldnn\.enabled is False, but was True"):
            session.append([3])
    session.append([3])


def test_flushing_denormals_under_an_engine_is_refused(session):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        with pytest.raises(InvalidArgumentError, match=r"set_flush_denormal.* is True, but was"):
            session.append([3])
    finally:
        torch.set_flush_denormal(False)
    session.append([3])


@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "to zero"])
def test_another_rounding_mode_under_an_engine_is_refused(session, mode):
    """A library of C in the same thread may have left it."""
    if platform.machine() != "x86_64":
        pytest.skip("this processor has other numbers for its modes")
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(mode) == 0
    try:
        with pytest.raises(InvalidArgumentError, match=r"rounding to nearest.* is False, but was"):
            session.append([3])
    finally:
        libm.fesetround(0)
    session.append([3])


def test_weights_that_are_trained_under_an_engine_are_refused(closing):
    """What reinforcement learning does between two rollouts."""
    model = build("llama")
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    for call in (
        lambda: session.append([3]),
        lambda: engine.score([1, 2, 3]),
        lambda: engine.run([[1, 2]], 3),
    ):
        with pytest.raises(InvalidArgumentError, match="weights were changed"):
            call()
    assert session.length == 20
    engine.close()
    again = closing(make_engine(model)).session()
    again.prefill(prompt(20))


def test_engine_options_come_by_name_and_a_wrong_name_suggests_the_right_one(model):
    with pytest.raises(InvalidArgumentError, match="did you mean pool_tokens"):
        Engine(model, pool_token=512)
    with pytest.raises(InvalidArgumentError, match="PagerConfig"):
        Engine(model, {"pool_tokens": 512})
    with pytest.raises(InvalidArgumentError, match="threads is 0"):
        make_engine(model, threads=0)
    with pytest.raises(InvalidArgumentError, match="salt is 3"):
        make_engine(model, salt=3)
    with make_engine(model) as engine:
        assert engine.config == PagerConfig(
            pool_tokens=96, rows=32, chunk_tokens=16, host_bytes="256MiB"
        )


def test_stats_say_where_the_seconds_went(engine, session):
    stats = engine.stats()
    assert stats["model_forwards"] == 2
    assert 0 < stats["seconds_attention"] < stats["seconds_forward"]
    assert 0 < stats["seconds_head"] < stats["seconds_forward"]


def test_what_is_no_sequence_of_the_engine_is_not_adopted(model, engine, closing):
    other = closing(make_engine(model)).session()
    other.prefill(prompt(20))
    own = engine.session()
    own.prefill(prompt(20))
    closed = engine.pager.sequence()
    closed.close()
    for given in (other.sequence, own, own.sequence, closed, None, 3):
        with pytest.raises(InvalidArgumentError, match="sequence"):
            engine.adopt(given)
    gc.collect()
    assert not other.closed
    assert not own.closed
    assert own.fork().length == 20


@pytest.mark.parametrize(
    "option",
    [
        *({"stop": 5}, {"stop": None}, {"eos": 1.5}, {"suppress_tokens": 5}, {"seed": 1.5}),
        *({"begin_suppress_tokens": 5}, {"frequency_penalty": 10**400}, {"presence_penalty": ""}),
    ],
    ids=str,
)
def test_options_of_a_generation_are_refused_by_their_names(session, option):
    (name,) = option
    with pytest.raises(InvalidArgumentError, match=name):
        session.generate(3, **option)
    session.generate(3, frequency_penalty=2**63, temperature=1.0)
