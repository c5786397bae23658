"""Row counts that were proven are not proven again, unless anything they depend on has changed."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import assert_same_session
from reference_models import build, make_engine, prompt
from transformers.models.llama.modeling_llama import LlamaMLP

from kvpager._model.identity import behaviour
from kvpager._model.seam.observe import observe
from kvpager._support.remembered import remember

LINEAR = torch.nn.functional.linear
SETTINGS = {"linear": "torch"}  # whose products differ in some counts
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def model():
    return build("llama")


def open_engine(closing, model, **options):
    return closing(make_engine(model, pool_tokens=256, **{**SETTINGS, **options}))


def test_an_engine_of_the_same_model_takes_what_was_proven(proofs, closing, model):
    first, second = open_engine(closing, model), open_engine(closing, build("llama"))
    assert len(proofs) == 1
    assert second.row_counts == first.row_counts
    assert second.row_proof == first.row_proof
    assert second.row_proof.dropped  # some counts differ, and it is said which
    assert second.fingerprint == first.fingerprint
    sessions = [closing(engine.session()) for engine in (first, second)]
    for session in sessions:
        session.prefill(prompt(50))
        session.generate(20, eos=None)
    assert_same_session(*sessions, "proven, and taken")


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({}, 1),
        ({"linear": "kvpager"}, 1),
        ({"linear": "kvpager", "small_rows": (4,)}, 1),
        ({"rows": 8}, 2),  # the fingerprint's 16 tokens are more
    ],
    ids=str,
)
def test_a_second_start_runs_the_model_as_often_as_its_fingerprint_needs(
    closing, monkeypatch, model, options, forwards
):
    first = open_engine(closing, model, **options)
    runs = []
    for place in (sys.modules[observe.__module__], behaviour):
        own = place.running
        monkeypatch.setattr(place, "running", lambda one, own=own: (runs.append(1), own(one))[1])
    second = open_engine(closing, build("llama"), **options)
    assert len(runs) == forwards
    assert second.row_counts == first.row_counts
    assert second.fingerprint == first.fingerprint


def test_weights_that_change_after_a_second_start_change_the_fingerprint(closing, model):
    open_engine(closing, model).close()
    second = open_engine(closing, model)
    before = second.fingerprint
    other_weights(model)
    second.weights_changed()
    assert second.fingerprint["behaviour"] != before["behaviour"]
    assert second.fingerprint == open_engine(closing, model).fingerprint


def test_another_process_takes_it_too(cache):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch; torch.set_num_threads(1)\n"
        "from reference_models import build, make_engine\n"
        "from kvpager._model.proof import prove as start\n"
        "made, own = [], start.prove\n"
        "start.prove = lambda *a: (made.append(1), own(*a))[1]\n"
        "engine = make_engine(build('llama'), linear='torch')\n"
        "print(len(made), engine.row_counts.describe())\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
        for _ in range(2)
    ]
    assert [text[0] for text in said] == ["1", "0"]
    assert said[0][2:] == said[1][2:]
    assert len(list(cache.iterdir())) == 1


def other_weights(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1


def moved_weight(model):
    """The same numbers, elsewhere in a cache line."""
    weight = model.model.layers[0].mlp.up_proj.weight
    room = torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight.detach())
    weight.data = room


def hook(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def patched_method(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x, own=mlp.forward: own(x)


def other_configuration(model):
    model.config.rms_norm_eps *= 2


def other_scale(model):
    model.model.layers[0].self_attn.scaling *= 2


def other_default(model):
    model.model.layers[0].mlp.act_fn.limit = functools.partial(torch.clamp, max=3.0)


def other_attention(model):
    model.config._attn_implementation = "eager"


CHANGES = (
    other_attention,
    other_weights,
    moved_weight,
    hook,
    patched_method,
    other_configuration,
    other_scale,
    other_default,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed_is_proven_again(proofs, closing, model, change):
    open_engine(closing, model)
    changed = build("llama")
    change(changed)
    open_engine(closing, changed)
    assert len(proofs) == 2


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, {"rows": 16}),
        ({"linear": "kvpager"}, {"linear": "kvpager", "small_rows": (4,)}),
        ({}, {"chunk_tokens": 32}),
        ({}, {"linear": "kvpager"}),
    ],
    ids=str,
)
def test_other_options_are_proven_apart(proofs, closing, model, options, others):
    open_engine(closing, model, **options)
    open_engine(closing, model, **others)
    assert len(proofs) == 2


def test_modules_that_hold_what_nothing_is_known_of_are_proven_each_time(proofs, closing, caplog):
    caplog.set_level("INFO", logger="kvpager")
    other = object()
    held = [other, lambda x: x, print.__call__, iter([1])]
    for value in held:
        for _ in range(2):
            model = build("llama")
            model.model.layers[1].mlp.act_fn.held = value
            open_engine(closing, model)
    assert len(proofs) == 2 * len(held)
    assert "model.layers.1.mlp.act_fn.held is a builtins.object" in caplog.text


def test_functions_and_tensors_that_modules_hold_are_told_apart(closing, proofs):
    """By what they say, and not by where in memory they are."""
    helds = [
        functools.partial(torch.clamp, max=1.0),
        functools.partial(torch.clamp, max=2.0),
        torch.tensor([1.0]),
        torch.tensor([2.0]),
        torch.zeros(1 << 17),
        torch.nn.functional.silu,
        torch.relu,
        torch.nn.functional.gelu,
        {"a": [1, (2.0,)]},
        {"a": [1, (3.0,)]},
    ]
    for held in helds:
        for _ in range(2):
            model = build("llama")
            model.model.layers[1].mlp.act_fn.held = copy.deepcopy(held)
            open_engine(closing, model)
    assert len(proofs) == len(helds)


def test_another_number_of_threads_is_proven_apart(proofs, closing, model):
    threads = torch.get_num_threads()
    open_engine(closing, model)
    try:
        torch.set_num_threads(threads + 1)
        open_engine(closing, model)
    finally:
        torch.set_num_threads(threads)
    assert len(proofs) == 2


def test_a_variable_that_a_matrix_library_reads_is_a_part_of_it(
    proofs, closing, model, monkeypatch
):
    open_engine(closing, model)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    open_engine(closing, model)
    assert len(proofs) == 2


def test_a_class_whose_forward_was_exchanged_is_proven_again(proofs, closing, model, monkeypatch):
    open_engine(closing, model)

    def exchanged(own):
        def forward(self, x):
            return own(self, x)

        return forward

    monkeypatch.setattr(LlamaMLP, "forward", exchanged(LlamaMLP.forward))
    for _ in range(2):  # nobody knows what it holds
        open_engine(closing, model)
    assert len(proofs) == 3


class InFloat32:
    def __call__(self, x, weight, bias=None):
        return LINEAR(x.float(), weight.float(), bias).to(x.dtype)


@pytest.mark.parametrize(
    "exchanged",
    [InFloat32(), functools.partial(torch.nn.functional.linear)],
    ids=["object", "partial"],
)
def test_an_object_in_the_place_of_a_function_is_proven_each_time(
    proofs, closing, model, monkeypatch, exchanged
):
    open_engine(closing, model)
    monkeypatch.setattr(torch.nn.functional, "linear", exchanged)
    for _ in range(2):
        open_engine(closing, model)
    assert len(proofs) == 3


def test_a_builtin_function_in_the_place_of_another_is_proven_again(
    proofs, closing, model, monkeypatch
):
    open_engine(closing, model)
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.relu)
    for _ in range(2):
        open_engine(closing, model)
    assert len(proofs) == 2


def test_a_function_with_other_defaults_is_proven_again(proofs, closing, model, monkeypatch):
    open_engine(closing, model)
    monkeypatch.setattr(torch.nn.functional.dropout, "__defaults__", (0.25, False, False))
    open_engine(closing, model)
    assert len(proofs) == 2


def test_proofs_are_taken_after_something_was_compiled(proofs, closing, model):
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))
    open_engine(closing, model)
    open_engine(closing, model)
    assert len(proofs) == 1


def test_a_class_that_was_made_with_a_function_is_proven_each_time(proofs, closing):
    def scaled(by):
        return type(
            "Scaled", (LlamaMLP,), {"forward": lambda self, x: by() * LlamaMLP.forward(self, x)}
        )

    for by in (lambda: 1.0, lambda: 2.0):
        model = build("llama")
        model.model.layers[1].mlp.__class__ = scaled(by)
        open_engine(closing, model)
    assert len(proofs) == 2


@pytest.mark.parametrize(
    "changes",
    [
        None,
        {"rows": None},
        {"rows": 7},
        {"dropped": 3},
        {"windows": [["no.such", 3]]},
        {"code": ""},
        {"behaviour": ""},
        {"operators": 3},
        {"operators": ["no::such"]},
    ],
    ids=str,
)
def test_a_finding_that_disagrees_is_thrown_away(proofs, closing, model, cache, changes):
    """Whoever wrote it, here the user's own earlier program."""
    first = open_engine(closing, model)
    kept = entry(cache)
    changed = None if changes is None else {**kept["value"], **changes}
    remember("row_counts", kept["key"], changed)
    second = open_engine(closing, model)
    assert second.row_counts == first.row_counts
    assert second.fingerprint == first.fingerprint
    assert len(proofs) == 2
    assert entry(cache) == kept


def test_a_forged_row_count_is_not_taken(proofs, closing, model, cache):
    first = open_engine(closing, model)
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    kept["value"]["smaller"] = [1, 2, 4, 8, 16]
    file.write_text(json.dumps(kept))
    assert open_engine(closing, model).row_counts == first.row_counts
    assert len(proofs) == 2


def entry(cache):
    (file,) = cache.iterdir()
    return json.loads(file.read_text())


def test_nothing_is_kept_where_that_is_not_wanted(proofs, closing, model, cache, monkeypatch):
    monkeypatch.setenv("KVPAGER_CACHE", "off")
    open_engine(closing, model)
    open_engine(closing, model)
    assert len(proofs) == 2
    assert not cache.exists()


def test_changed_weights_are_proven_by_what_the_model_is_then(proofs, closing, model):
    engine = open_engine(closing, model)
    model.add_module("more", torch.nn.Linear(4, 4))
    engine.weights_changed()
    assert len(proofs) == 2
