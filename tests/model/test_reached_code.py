"""What a model's code reads, wherever it is kept, is watched while an engine is open."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import itertools
import os
import random
import sys
import types
import weakref

import numpy as np
import pytest
import torch
import transformers
from bits import assert_same_session
from own_code import steering, with_block
from reference_models import build, make_engine, prompt
from transformers.models.llama import modeling_llama

import kvpager
from kvpager import ModelChangedError, UnsupportedModelError
from kvpager._model.seam.attention import NAME
from kvpager._runtime.execution import recordings


@pytest.fixture(autouse=True)
def no_module_of_a_user():
    yield
    sys.modules.pop("users_module", None)


def block(read, **held):
    return with_block(read, **held)[:2]


def vector():
    model, own = block(lambda self, x: x + self.vector, vector=steering())
    return model, lambda: own.vector.add_(1)


def vector_through_data():
    model, own = block(lambda self, x: x + self.vector, vector=steering())
    return model, lambda: own.vector.data.mul_(2)


def _sparse(layout):
    return steering().reshape(8, -1).to_sparse(layout=layout)


def _plus_sparse(self, x):
    return x + self.sparse.to_dense().reshape(-1)


def values_of_a_sparse_tensor():
    model, own = block(_plus_sparse, sparse=_sparse(torch.sparse_coo))
    return model, lambda: own.sparse._values().data.mul_(2)


def values_of_a_tensor_in_compressed_rows():
    model, own = block(_plus_sparse, sparse=_sparse(torch.sparse_csr))
    return model, lambda: own.sparse.values().data.mul_(2)


def sparse_tensor_in_place():
    model, own = block(_plus_sparse, sparse=_sparse(torch.sparse_coo))
    return model, lambda: own.sparse.zero_()


def vector_in_a_list():
    model, own = block(lambda self, x: x + self.vectors[0], vectors=[steering()])
    return model, lambda: own.vectors[0].add_(1)


def vector_in_a_list_replaced():
    model, own = block(lambda self, x: x + self.vectors[0], vectors=[steering()])
    return model, lambda: own.vectors.__setitem__(0, steering() * 2)


def vector_deep_inside():
    held = ({"deep": [({"vector": steering()},)]},)
    model, own = block(lambda self, x: x + self.held[0]["deep"][0][0]["vector"], held=held)
    return model, lambda: own.held[0]["deep"][0][0]["vector"].add_(1)


def number_in_a_dictionary_in_a_tuple():
    model, own = block(lambda self, x: x * self.held[0]["factor"], held=({"factor": 1.0},))
    return model, lambda: own.held[0].update(factor=2.0)


def attribute_of_an_object():
    model, own, code = with_block(lambda self, x: self.settings.apply(x))
    own.settings = code.Settings()
    return model, lambda: setattr(own.settings, "offset", 1.0)


def attribute_of_an_objects_class():
    model, own, code = with_block(lambda self, x: self.settings.apply(x))
    own.settings = code.Settings()
    return model, lambda: setattr(code.Settings, "scale", 2.0)


def method_of_an_object():
    model, own, code = with_block(lambda self, x: self.settings.apply(x))
    own.settings = code.Settings()
    return model, lambda: setattr(own.settings, "apply", lambda x: x * 2)


def slot_of_an_object():
    model, own, code = with_block(lambda self, x: x + self.settings.offset)
    own.settings = code.Slotted()
    return model, lambda: setattr(own.settings, "offset", 1.0)


def bound_method_of_an_object():
    model, own, code = with_block(lambda self, x: self.function(x))
    own.function = code.Settings().apply
    return model, lambda: setattr(own.function.__self__, "offset", 1.0)


def numpy_array():
    model, own = block(
        lambda self, x: x + torch.as_tensor(self.array), array=np.zeros(256, dtype=np.float32)
    )
    return model, lambda: own.array.__setitem__(3, 1.0)


def large_numpy_array():
    model, own = block(
        lambda self, x: x + self.array[0, 0], array=np.zeros((300, 256), dtype=np.float32)
    )
    return model, lambda: own.array.fill(1.0)


def number_of_a_set():
    model, own = block(lambda self, x: x * len(self.chosen), chosen={1})
    return model, lambda: own.chosen.add(2)


def number_of_a_queue():
    model, own = block(lambda self, x: x * self.recent[0], recent=collections.deque([1.0]))
    return model, lambda: own.recent.appendleft(2.0)


def variable_of_a_closure():
    factor = 1.0

    def change():
        nonlocal factor
        factor = 2.0

    model, _ = block(lambda self, x: x * factor)
    return model, change


def list_of_a_closure():
    factors = [1.0]
    model, _ = block(lambda self, x: x * factors[0])
    return model, lambda: factors.__setitem__(0, 2.0)


def tensor_of_a_hooks_closure():
    model, added = build("llama"), steering()
    model.model.layers[0].register_forward_hook(lambda module, given, out: out + added)
    return model, lambda: added.add_(1)


def argument_of_a_partial():
    model, own = block(lambda self, x: self.function(x))
    own.function = functools.partial(torch.mul, other=torch.ones(()))
    return model, lambda: own.function.keywords.update(other=torch.full((), 2.0))


def default_of_a_function():
    model, _, code = with_block()
    return model, lambda: setattr(code.shifted, "__defaults__", (1.0,))


def keyword_default_of_a_function():
    model, _, code = with_block()
    return model, lambda: code.shifted.__kwdefaults__.update(times=2.0)


def code_of_a_function():
    model, _, code = with_block()
    return model, lambda: setattr(code.helper, "__code__", (lambda x: x * 2).__code__)


def function_two_calls_away():
    model, _, code = with_block()
    return model, lambda: setattr(code, "helper", lambda x: x * 2)


def constant_of_a_module():
    model, _, code = with_block()
    return model, lambda: setattr(code, "factor", 2.0)


def table_of_a_module():
    model, _, code = with_block()
    return model, lambda: code.table.update(factor=2.0)


def builtin_that_a_module_hides():
    model, _, code = with_block(lambda self, x: x * max(1.0, 0.5))
    return model, lambda: setattr(code, "max", lambda *given: 3.0)


def attribute_of_a_class():
    model, _, code = with_block()
    return model, lambda: setattr(code.Block, "limit", 0.1)


def attribute_that_code_asks_for():
    model, own = block(lambda self, x: x + getattr(self, "later", 0.0))
    return model, lambda: vars(own).update(later=1.0)


def attribute_by_a_computed_name():
    model, own = block(lambda self, x: x + getattr(self, "la" + "ter"[:3], 0.0))
    return model, lambda: vars(own).update(later=1.0)


def module_in_a_list():
    hidden = torch.nn.Linear(256, 256, bias=False)
    model, own = block(lambda self, x: x + self.hidden[0](x), hidden=[hidden])
    return model, lambda: own.hidden[0].weight.data.mul_(2)


def setting_of_a_module_in_a_list():
    hidden = torch.nn.LeakyReLU(0.5)
    model, own = block(lambda self, x: x + self.hidden[0](x), hidden=[hidden])
    return model, lambda: setattr(own.hidden[0], "negative_slope", 0.1)


def generator_of_random_numbers():
    model, own = block(lambda self, x: x * self.random.getstate()[1][0], random=random.Random(3))
    return model, lambda: own.random.seed(4)


def list_of_the_configuration():
    model = build("mistral")
    return model, lambda: model.config.rope_parameters.update(rope_theta=3.0)


def variable_of_the_environment():
    read = lambda self, x: x * len(__import__("os").environ.get("A_USERS_SWITCH", "1"))  # noqa: E731
    return block(read)[0], lambda: os.environ.update(A_USERS_SWITCH="12")


def array_of_the_standard_library():
    model, own = block(lambda self, x: x * self.numbers[0], numbers=array.array("d", [1.0]))
    return model, lambda: own.numbers.__setitem__(0, 2.0)


def object_of_a_weak_reference():
    model, own, code = with_block(lambda self, x: self.reference().apply(x))
    kept = code.Settings()
    own.reference = weakref.ref(kept)
    return model, lambda: setattr(kept, "offset", 1.0)


def context_variable():
    factor = contextvars.ContextVar("factor", default=1.0)
    model, _ = block(lambda self, x: x * factor.get())
    return model, lambda: factor.set(2.0)


def module_that_is_imported_as_code_runs():
    def read(self, x):
        import users_module

        return x * users_module.Settings.scale

    model, _, code = with_block(read)
    return model, lambda: setattr(code.Settings, "scale", 2.0)


def constant_of_a_module_that_is_imported_as_code_runs():
    def read(self, x):
        from users_module import other

        return x * other

    model, _, code = with_block(read)
    code.other = 1.0
    return model, lambda: setattr(code, "other", 2.0)


def global_that_is_looked_up_by_a_text():
    model, _, code = with_block(lambda self, x: x * globals()["unheard"])
    code.unheard = 1.0
    return model, lambda: setattr(code, "unheard", 2.0)


def attribute_of_a_parameter():
    model, own = block(lambda self, x: x * self.inner.up_proj.weight.strength)
    weight = own.inner.up_proj.weight
    weight.strength = 1.0
    return model, lambda: setattr(weight, "strength", 2.0)


def attribute_of_a_namespace():
    model, own = block(lambda self, x: x * self.held.factor, held=types.SimpleNamespace(factor=1.0))
    return model, lambda: setattr(own.held, "factor", 2.0)


def number_of_a_dictionary_with_defaults():
    numbers = collections.defaultdict(lambda: 1.0, factor=1.0)
    model, own = block(lambda self, x: x * self.numbers["factor"], numbers=numbers)
    return model, lambda: own.numbers.update(factor=2.0)


def attribute_of_a_function():
    model, _, code = with_block(lambda self, x: x * helper.factor)  # noqa: F821
    code.helper.factor = 1.0
    return model, lambda: setattr(code.helper, "factor", 2.0)


CHANGES = {
    made.__name__.replace("_", " "): made
    for made in (
        *(vector, vector_through_data, vector_in_a_list, vector_in_a_list_replaced),
        *(vector_deep_inside, number_in_a_dictionary_in_a_tuple, attribute_of_an_object),
        *(attribute_of_an_objects_class, method_of_an_object, slot_of_an_object),
        *(bound_method_of_an_object, numpy_array, large_numpy_array, number_of_a_set),
        *(number_of_a_queue, variable_of_a_closure, list_of_a_closure, tensor_of_a_hooks_closure),
        *(argument_of_a_partial, default_of_a_function, keyword_default_of_a_function),
        *(code_of_a_function, function_two_calls_away, constant_of_a_module, table_of_a_module),
        *(builtin_that_a_module_hides, attribute_of_a_class, attribute_that_code_asks_for),
        *(attribute_by_a_computed_name, module_in_a_list, setting_of_a_module_in_a_list),
        *(generator_of_random_numbers, list_of_the_configuration, variable_of_the_environment),
        *(array_of_the_standard_library, object_of_a_weak_reference, context_variable),
        *(module_that_is_imported_as_code_runs, global_that_is_looked_up_by_a_text),
        *(constant_of_a_module_that_is_imported_as_code_runs, attribute_of_a_parameter),
        *(attribute_of_a_namespace, number_of_a_dictionary_with_defaults),
        *(attribute_of_a_function,),
    )
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_code_reads_may_not_change_under_an_engine(kind, closing, monkeypatch):
    monkeypatch.setenv("A_USERS_SWITCH", "1")
    model, change = CHANGES[kind]()
    engine = closing(make_engine(model, small_rows="fixed"))
    session = engine.session()
    session.prefill(prompt(20))
    session.append([5])
    change()
    with pytest.raises(ModelChangedError):
        session.append([6])
    assert session.committed == 21


PATCHES = {
    "a function of an architecture": (
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin, **_: (q, k),
    ),
    "a function that another calls": (modeling_llama, "rotate_half", lambda x: x),
    "a function of torch": (torch.nn.functional, "silu", lambda x, inplace=False: x),
    "a method of tensors": (torch.Tensor, "contiguous", lambda self, *given, **named: self * 2),
    "a method that a class has of another": (
        modeling_llama.LlamaRMSNorm,
        "__call__",
        lambda self, x: x,
    ),
    "a method of all modules": (torch.nn.Module, "__call__", lambda self, *given: given[0]),
}


@pytest.mark.parametrize("kind", PATCHES)
def test_a_function_that_is_replaced_under_an_engine_is_a_change(kind, closing, monkeypatch):
    """Recorded steps would go on with the one before, and prefills take the other."""
    monkeypatch.setattr(recordings, "WORTH", 2)
    place, name, other = PATCHES[kind]
    engine = closing(make_engine(build("llama")))
    session = closing(engine.session())
    session.prefill(prompt(20))
    session.generate(8, eos=None)
    assert engine.stats()["graph_replays"] > 0
    with monkeypatch.context() as patched:
        patched.setattr(place, name, other, raising=False)
        with pytest.raises(ModelChangedError):
            session.append([5])
    session.append([5])


def test_another_attention_in_the_place_of_kvpagers_is_a_change(closing):
    session = closing(closing(make_engine(build("llama"))).session())
    session.prefill(prompt(20))
    own = transformers.AttentionInterface()[NAME]
    transformers.AttentionInterface.register(NAME, lambda *given, **named: own(*given, **named))
    try:
        with pytest.raises(ModelChangedError, match="attention"):
            session.append([5])
    finally:
        transformers.AttentionInterface.register(NAME, own)
    session.append([5])


def counting_attribute():
    def read(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * (1 + self.calls * 1e-3)

    return block(read)[0]


def counting_calls_alone():
    """Whatever it is read for later."""

    def read(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x

    return block(read)[0]


def counting_in_a_list():
    def read(self, x):
        self.calls.append(1)
        return x * len(self.calls)

    return block(read, calls=[])[0]


def counting_in_a_closure():
    calls = 0

    def read(self, x):
        nonlocal calls
        calls += 1
        return x * (1 + calls % 2)

    return block(read)[0]


def counting_in_a_global():
    def read(self, x):
        global factor  # of the module that the function is put into
        factor = factor + 1
        return x

    return block(read)[0]


def counting_in_a_hook():
    model, calls = build("llama"), [0]

    def hook(module, given, output):
        calls[0] += 1
        return output * calls[0]

    model.model.norm.register_forward_hook(hook)
    return model


def keeping_the_last_row():
    def read(self, x):
        before, self.last = getattr(self, "last", 0.0), x[:, -1:].clone()
        return x + before

    return block(read)[0]


def writing_to_a_tensor():
    def read(self, x):
        self.mean.mul_(0.9).add_(x.mean(1)[0])
        return x - self.mean

    return block(read, mean=steering())[0]


@pytest.mark.parametrize(
    "make",
    [
        counting_attribute,
        counting_calls_alone,
        counting_in_a_list,
        counting_in_a_closure,
        counting_in_a_global,
        counting_in_a_hook,
        keeping_the_last_row,
        writing_to_a_tensor,
    ],
)
@pytest.mark.parametrize("options", [{}, {"exact": False}], ids=str)
def test_a_model_that_changes_itself_in_every_forward_is_refused(make, options, closing):
    with pytest.raises((UnsupportedModelError, ModelChangedError)):
        closing(make_engine(make(), **options))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    "kind",
    [values_of_a_sparse_tensor, values_of_a_tensor_in_compressed_rows, sparse_tensor_in_place],
)
def test_sparse_tensors_that_code_reads_may_not_change_either(kind, closing):
    model, change = kind()
    session = closing(closing(make_engine(model, exact=False)).session())
    session.prefill(prompt(20))
    change()
    with pytest.raises(ModelChangedError, match="sparse"):
        session.append([5])


def test_a_sparse_tensor_is_refused_by_name_where_rows_are_proven(closing):
    with pytest.raises(UnsupportedModelError, match="takes a sparse_coo tensor"):
        closing(make_engine(values_of_a_sparse_tensor()[0]))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: iter([1.0] * 99), "list_iterator"),
        (lambda: itertools.repeat(1.0), "repeat"),
        (lambda: (1.0 for _ in range(99)), "generator"),
    ],
    ids=["iterator", "itertools", "generator"],
)
def test_a_model_that_holds_an_iterator_is_refused_by_its_name(make, kind, closing):
    model = block(lambda self, x: x * next(self.factors), factors=make())[0]
    with pytest.raises(UnsupportedModelError, match=rf"factors is an iterator \({kind}\)"):
        closing(make_engine(model))


def test_a_model_may_set_itself_up_in_its_first_forward(closing):
    def read(self, x):
        if getattr(self, "table", None) is None:
            self.table = torch.ones(256) * 0.5
        return x * self.table

    model, own = block(read)
    engine = closing(make_engine(model))
    session = closing(engine.session())
    session.prefill(prompt(20))
    session.append([5])
    with torch.inference_mode():
        own.table.mul_(2)
    with pytest.raises(ModelChangedError, match="table"):
        session.append([5])
    other = closing(make_engine(model))
    assert other.fingerprint != engine.fingerprint


def test_notes_that_are_marked_are_let_pass(closing):
    calls = []

    @kvpager.only_looks
    def noted(x):
        calls.append(1)
        return x

    model, own = block(lambda self, x: self.function(x))
    own.function = noted
    first, second = (closing(closing(make_engine(model)).session()) for _ in range(2))
    for session in (first, second):
        session.prefill(prompt(20))
        session.append([5])
    assert calls
    assert_same_session(first, second, "with notes")
