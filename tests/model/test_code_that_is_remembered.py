"""Row counts are remembered of released code alone: what other code reads, nobody can know."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import sys
import types

import pytest
import torch
from adapters import with_adapters
from bits import assert_same_session
from reference_models import build, make_engine, prompt
from torch.nn.utils import parametrizations, parametrize
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

import kvpager
from kvpager._model.facts import proven_before, released_files
from kvpager._model.facts.code_seen import require_released_operators
from kvpager._model.facts.released_files import UnknownStateError

ROTATED = modeling_llama.apply_rotary_pos_emb
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def starts(closing, proofs, cache):
    """How often a model is proven in so many starts, and how many proofs are kept then."""

    def started(change=lambda model: None, times=2):
        del proofs[:]
        for _ in range(times):
            model = build("llama")
            change(model)
            closing(make_engine(model, pool_tokens=256, rows=32))
        return len(proofs), len([*cache.iterdir()] if cache.exists() else [])

    return started


def loaded(path, name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


OUTER = """
from transformers.models.llama.modeling_llama import LlamaMLP
class OwnMLP(LlamaMLP):
    def forward(self, x):
        import own_inner
        return own_inner.f(super().forward(x))
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """Gives a model a class of the user's, which calls a function of another file."""

    def changing(body, name="own_outer"):
        (tmp_path / "own_inner.py").write_text(f"import os\ndef f(x):\n    return {body}\n")
        (tmp_path / "own_outer.py").write_text(OUTER)
        loaded(tmp_path / "own_inner.py", "own_inner", monkeypatch)
        kind = loaded(tmp_path / "own_outer.py", name, monkeypatch).OwnMLP

        def change(model):
            model.model.layers[1].mlp.__class__ = kind

        return change

    return changing


@pytest.mark.parametrize(
    "name",
    [
        "own_outer",
        "transformers_modules.own.modeling_own",  # where transformers puts code of a repository
        "transformers.models.llama.own",
        "torch.own",
    ],
)
def test_a_model_with_a_users_class_is_proven_at_every_start(starts, own_code, caplog, name):
    caplog.set_level("INFO", logger="kvpager")
    assert starts(own_code("x", name)) == (2, 0)
    assert "own_outer.py" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        "x - x.mean(-2, keepdim=True)",
        "x * (torch.arange(x.shape[-2]) == 3)[:, None]",
        "x - x.mean(-2, keepdim=True) if os.environ.get('OWN_VARIABLE') else x",
    ],
)
def test_a_function_that_becomes_one_of_other_rows_is_refused_at_the_next_start(
    starts, own_code, monkeypatch, body
):
    """It is two imports away, and depends on a variable of the environment."""
    assert starts(own_code(body.rpartition(" else ")[2] if "else" in body else "x")) == (2, 0)
    monkeypatch.setenv("OWN_VARIABLE", "1")
    with pytest.raises(kvpager.UnsupportedModelError):
        starts(own_code(body.replace("torch.", "__import__('torch').")))


class InTheProgram(LlamaMLP):
    pass


def with_class(model):
    model.model.layers[0].mlp.__class__ = InTheProgram


def with_hook_that_looks(model):
    model.model.layers[0].register_forward_hook(kvpager.only_looks(lambda *_: None))


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def with_parametrization(model):
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())


def with_parametrization_of_torch(model):
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


@pytest.mark.parametrize("change", [with_class, with_hook_that_looks], ids=lambda one: one.__name__)
def test_a_model_with_other_code_is_proven_at_every_start(starts, change):
    assert starts(change) == (2, 0)


@pytest.mark.parametrize("change", [with_parametrization, with_parametrization_of_torch])
def test_a_model_with_a_parametrization_is_proven_at_every_start_or_refused(starts, change):
    try:
        assert starts(change) == (2, 0)
    except kvpager.UnsupportedModelError:
        assert starts() == (1, 1)


def rotated(q, k, cos, sin, *more, **named):
    return ROTATED(q, k, cos, sin, *more, **named)


def exchanged_function(monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)


def exchanged_code(monkeypatch):
    def turned(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    monkeypatch.setattr(
        modeling_llama.rotate_half, "__code__", turned.__code__.replace(co_freevars=())
    )
    monkeypatch.setitem(vars(modeling_llama), "torch", torch)


def exchanged_names(monkeypatch):
    own = types.FunctionType(ROTATED.__code__, dict(ROTATED.__globals__), ROTATED.__name__)
    own.__defaults__ = ROTATED.__defaults__
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)


def function_that_is_not_run(monkeypatch):
    monkeypatch.setattr(modeling_llama, "can_return_tuple", rotated)


def exchanged_product(monkeypatch):
    own = torch.Tensor.__mul__
    monkeypatch.setattr(torch.Tensor, "__mul__", lambda self, other: own(self, other))


def preloaded(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libown.so")


def edited_file(monkeypatch):
    """As if the release had recorded other bytes of it."""
    release = released_files._release("transformers")
    name = "transformers/models/llama/modeling_llama.py"
    monkeypatch.setitem(release._digests, name, "A" * 43)
    monkeypatch.setattr(release, "_stamps", {})
    monkeypatch.setattr(release, "_recalled", True)


def removed_installer(monkeypatch):
    monkeypatch.setattr(released_files, "_release", released_files._release.__wrapped__)
    monkeypatch.setattr(released_files.metadata, "distribution", absent)


def absent(name):
    raise released_files.metadata.PackageNotFoundError(name)


CHANGES = (
    exchanged_function,
    exchanged_code,
    exchanged_names,
    function_that_is_not_run,
    exchanged_product,
    preloaded,
    edited_file,
    removed_installer,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_program_that_exchanges_code_has_its_models_proven_at_every_start(
    starts, monkeypatch, change
):
    change(monkeypatch)
    assert starts() == (2, 0)


def test_a_program_that_exchanges_code_takes_no_proof_from_before(starts, monkeypatch):
    assert starts() == (1, 1)
    exchanged_function(monkeypatch)
    assert starts() == (2, 1)


def test_an_operator_of_somebody_else_is_proven_at_every_start(starts, monkeypatch):
    silu = torch.nn.functional.silu

    def own(x: torch.Tensor) -> torch.Tensor:
        return silu(x)

    with torch.library._scoped_library("own_operators", "DEF") as library:
        library.define("silu(Tensor x) -> Tensor")
        library.impl("silu", own, "CompositeExplicitAutograd")
        monkeypatch.setattr(
            torch.nn.functional,
            "silu",
            lambda x, inplace=False: torch.ops.own_operators.silu(x),
        )
        assert starts() == (2, 0)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_kernel_that_torchs_was_exchanged_for_is_noticed(starts):
    assert starts() == (1, 1)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("rsqrt", lambda x: 1 / torch.sqrt(x), "CPU")
        assert starts() == (2, 1)
        with pytest.raises(UnknownStateError, match="operator aten::rsqrt"):  # were it machine code
            require_released_operators(["aten::mm", "aten::rsqrt"])
    require_released_operators(["aten::mm", "aten::rsqrt"])


def test_a_number_of_a_module_is_a_part_of_it(starts, monkeypatch):
    assert starts() == (1, 1)
    monkeypatch.setattr(modeling_llama, "OWN_NUMBER", 2, raising=False)
    assert starts() == (1, 2)


def test_a_library_that_was_exchanged_is_noticed_though_it_says_the_same(
    starts, monkeypatch, tmp_path
):
    library = tmp_path / "libown.so"
    library.write_bytes(b"one")
    monkeypatch.setattr(proven_before, "_libraries", lambda: [str(library)])
    assert starts() == (1, 1)
    found = library.stat()
    library.write_bytes(b"two")
    os.utime(library, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert starts() == (1, 2)


def test_where_another_profiler_looks_nothing_is_remembered_and_it_goes_on(starts):
    calls = []
    sys.setprofile(lambda *_: calls.append(1))
    try:
        kept = starts()
        profiler = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert kept == (2, 0)
    assert profiler is not None
    assert calls


@pytest.mark.parametrize("adapted", [False, True])
def test_what_is_taken_gives_the_bits_of_a_cold_proof(closing, proofs, adapted):
    sessions = []
    for _ in range(2):
        model = with_adapters("own") if adapted else build("llama")
        engine = closing(make_engine(model, pool_tokens=256, rows=32))
        sessions.append(closing(engine.session()))
        sessions[-1].prefill(prompt(50))
        sessions[-1].generate(10, eos=None)
    assert len(proofs) == 1
    assert_same_session(*sessions, "taken, and proven")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one file, installed as pip does."""
    folder, info = tmp_path / "package_of_ours", tmp_path / "package_of_ours-1.2.dist-info"
    folder.mkdir()
    info.mkdir()
    file = folder / "__init__.py"
    file.write_text("NUMBER = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: package-of-ours\nVersion: 1.2\n")
    (info / "RECORD").write_text(
        f"package_of_ours/__init__.py,sha256={digest.rstrip('=')},11\n"
        "package_of_ours-1.2.dist-info/RECORD,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(released_files, "RELEASED", ("package_of_ours",))
    loaded(file, "package_of_ours", monkeypatch)
    released_files._release.cache_clear()
    yield file
    released_files._release.cache_clear()


def test_a_file_is_released_while_it_has_the_bytes_that_were_installed(package):
    released_files.require_released_modules()
    assert released_files.is_released(str(package))
    written = package.stat()
    package.write_text("NUMBER = 2\n")
    os.utime(package, ns=(written.st_atime_ns, written.st_mtime_ns))
    for again in (False, True):  # with what was remembered, too
        assert not released_files.is_released(str(package))
        with pytest.raises(UnknownStateError, match=r"not as package_of_ours 1\.2 was"):
            released_files.require_released_modules()
        if not again:
            released_files._release.cache_clear()
    package.write_text("NUMBER = 1\n")
    assert released_files.is_released(str(package))


def test_a_file_that_no_release_lists_is_not_released(package, tmp_path):
    beside = package.with_name("more.py")
    beside.write_text("NUMBER = 1\n")
    assert not released_files.is_released(str(beside))
    assert not released_files.is_released(str(package.with_name("none.py")))
    assert not released_files.is_released(__file__)


@pytest.mark.parametrize("version", ["1.2.dev3", "1.2a0+git1234567", "1.2rc1"])
def test_a_version_that_is_no_release_is_not_remembered(package, version):
    metadata = package.parents[1] / "package_of_ours-1.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.2", version))
    with pytest.raises(UnknownStateError, match="which is no release"):
        released_files.require_released_modules()


def test_files_are_hashed_at_the_first_start_alone(package, monkeypatch):
    released_files.require_released_modules()
    released_files._release.cache_clear()
    monkeypatch.setattr(released_files._Release, "_is_released", None)
    released_files.require_released_modules()
