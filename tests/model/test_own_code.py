"""What a user's own code is and holds is part of a fingerprint."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from own_code import users_module, with_block
from reference_models import build, make_engine, prompt
from transformers.models.llama import modeling_llama

from kvpager import FingerprintMismatchError
from kvpager._model.identity.description import additions_of, state_digest
from kvpager._model.watch.looks import only_looks
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._model.watch.reach import Reach


@pytest.fixture(autouse=True)
def no_module_of_a_user():
    yield
    sys.modules.pop("users_module", None)


def identity(model):
    """What of a fingerprint no forward is needed for."""
    return additions_of(model).digest, state_digest(model, Reach(model))


def hooked(make):
    def model(number):
        made = build("llama")
        made.model.layers[0].register_forward_hook(make(number))
        return made

    return model


def closure(number):
    def hook(module, given, output):
        return output if number > 0 else output * number

    return hook


def default(number):
    def hook(module, given, output, number=number):
        return output if number > 0 else output * number

    return hook


def partial(number):
    def hook(module, given, output, number):
        return output if number > 0 else output * number

    return functools.partial(hook, number=number)


class Hook:
    """An object that can be called."""

    def __init__(self, number):
        self.number = number

    def __call__(self, module, given, output):
        return output if self.number > 0 else output * self.number


def method(number):
    return Hook(number).__call__


def deep(number):
    held = ([{"array": np.full(3, number)}],)

    def hook(module, given, output):
        return output if held[0][0]["array"][0] > 0 else -output

    return hook


def held(**values):
    def model(number):
        return with_block(
            lambda self, x: x + self.held,
            held={key: make(number) for key, make in values.items()}["held"],
        )[0]

    return model


def table(number):
    """Of which the tokens of a digest may meet no row but the first."""
    made = torch.zeros(300, 256)
    made[number] = 1
    return made


def patched_class(number):
    def forward(self, x):
        return x * 1e-5 * number if x.shape[-1] == 3 else x

    kind = type("Norm", (torch.nn.Module,), {"forward": forward})
    model = build("llama")
    model.model.norm = kind()
    return model


def global_of_a_module(number):
    model, _, code = with_block(lambda self, x: x.clamp(max=1e9 * limit))  # noqa: F821
    code.limit = number
    return model


def environment(number):
    os.environ["A_USERS_SWITCH"] = str(number)
    return with_block(lambda self, x: x * len(__import__("os").environ["A_USERS_SWITCH"]))[0]


MODELS = {
    "closure of a hook": hooked(closure),
    "default of a hook": hooked(default),
    "argument of a partial": hooked(partial),
    "object that is a hook": hooked(Hook),
    "object of a bound method": hooked(method),
    "array deep in a closure": hooked(deep),
    "tensor of a module": held(held=table),
    "array of a module": held(held=lambda number: table(number).numpy()),
    "tensor in a list of a module": held(held=lambda number: [table(number)]),
    "sparse tensor of a module": held(held=lambda number: table(number).to_sparse()),
    "closure of a class": patched_class,
    "global of a module": global_of_a_module,
    "environment": environment,
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_code_holds_is_part_of_the_fingerprint(kind, monkeypatch):
    monkeypatch.setenv("A_USERS_SWITCH", "")
    make = MODELS[kind]
    assert identity(make(1)) == identity(make(1))
    assert identity(make(1)) != identity(make(2))


def test_a_function_of_an_architecture_that_was_replaced_is_part_of_it(monkeypatch):
    plain = identity(build("llama"))
    assert plain[0] == ""
    found = []
    for number in (1, 2):

        def turned(q, k, cos, sin, number=number, **named):
            return q, k * number

        with monkeypatch.context() as patched:
            patched.setattr(modeling_llama, "apply_rotary_pos_emb", turned)
            found.append(identity(build("llama")))
    assert len({plain, *found}) == 3


def test_a_method_of_an_architecture_that_was_replaced_is_part_of_it(monkeypatch):
    plain = identity(build("llama"))
    own = modeling_llama.LlamaMLP.forward

    def clipped(self, x):
        return own(self, x).clamp(max=1e9)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", clipped)
    assert identity(build("llama"))[0] != plain[0]


def test_a_number_of_a_module_that_tokens_seldom_meet_is_part_of_it():
    """gpt-oss clips its gates at 7, beyond what random weights give."""
    model = build("gpt_oss")
    before = identity(model)
    model.model.layers[1].mlp.experts.limit = 6.5
    assert identity(model) != before


def test_lines_and_notes_are_no_part_of_it():
    first = identity(with_block()[0])
    users_module()
    again, _, code = with_block()
    code.Block.__doc__ = "Something that was said about it."
    assert identity(again) == first
    seen = []
    again.model.layers[0].register_forward_hook(only_looks(lambda *_: seen.append(1)))
    assert identity(again) == first


def test_two_hooks_of_one_name_are_refused_by_each_others_engines(tmp_path, closing):
    with make_engine(MODELS["closure of a hook"](1)) as engine, engine.session() as session:
        session.prefill(prompt(40))
        session.save(tmp_path / "one.kvsnap")
    engine = closing(make_engine(MODELS["closure of a hook"](2)))
    with pytest.raises(FingerprintMismatchError) as refused:
        engine.restore(tmp_path / "one.kvsnap")
    assert refused.value.field == "additions"


def test_every_process_finds_the_same():
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "import test_own_code as here\n"
        "print(json.dumps({kind: here.identity(make(1)) for kind, make in here.MODELS.items()}))\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    said = [
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert json.loads(said[0]).keys() == MODELS.keys()


def test_data_that_a_library_keeps_for_itself_is_not_looked_at():
    """Else whatever a program does beside an engine would be a change of its model."""
    reach = ModelWatch(build("llama")).reach
    assert reach.tensors == reach.foreign == []
    kept = {name.partition("[")[0] for name, _, _ in reach.containers}
    assert kept <= {"config.id2label", "config.label2id", "config.rope_parameters"} | {
        "transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS"
    }
