"""Mistakes in a plug-in's backend: each is one error that names the method and the plug-in."""

import re
import sys
from types import SimpleNamespace

import pytest
from fixture_checkpoints import checkpoint
from installed import entry

import chunkrt
from chunkrt import backends
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.errors import BackendError, CompileError
from chunkrt.plugins import Plugin

PLUGIN = r"of the plug-in 'mine' of mine 1\.0 \(chunkrt\.backends\)"


@pytest.fixture
def load(monkeypatch):
    """Return a function that loads a model on the backend "mine", with other methods than the reference."""

    def load(**methods):
        backend = type("Mine", (ReferenceBackend,), {"name": "mine", **methods})
        monkeypatch.setitem(sys.modules, "plugin_of_this_test", SimpleNamespace(make=lambda threads: backend()))
        mine = Plugin(backends.PLUGINS, entry("mine", "plugin_of_this_test:make", "mine"), conflict="")
        monkeypatch.setattr(backends.PLUGINS, "plugins", [mine])
        return chunkrt.load(checkpoint("llama_gqa"), npu="mine", scheme="float", threads=1)

    return load


def fail(*_):
    raise ZeroDivisionError("a mistake")


def leave(*_):
    raise SystemExit(3)


def refuse(*_):
    raise CompileError("mine needs another version of its compiler")


@pytest.mark.parametrize("name", ["supports", "compile"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        (fail, "failed: ZeroDivisionError: a mistake; repair it or choose another backend"),
        (leave, "failed: SystemExit: 3; repair it or choose another backend"),
        (lambda *_: None, r"returned None, expected an object like chunkrt\.backends\.\w+; repair it"),
    ],
    ids=["error", "exit", "nothing"],
)
def test_mistake_in_a_method(load, name, method, message):
    with pytest.raises(BackendError, match=f"^{name} {PLUGIN} {message}"):
        load(**{name: method})


class Failing:
    """An executable of the reference, one of whose methods fails."""

    fixed_length = None

    def __init__(self, executable, name, method):
        self.run = executable.run
        setattr(self, name, method)


@pytest.mark.parametrize("name", ["run", "run_after"])
@pytest.mark.parametrize(
    ("method", "message"),
    [(fail, "ZeroDivisionError: a mistake"), (leave, "SystemExit: 3")],
    ids=["error", "exit"],
)
def test_mistake_in_a_method_of_an_executable(load, name, method, message):
    def compile(self, *arguments):
        return Failing(ReferenceBackend.compile(self, *arguments), name, method)

    with load(compile=compile) as engine, pytest.raises(BackendError) as error:
        engine.session().prefill([1, 2, 3])
    expected = (
        rf"subgraph \S+ failed on chunk 0: {name} {PLUGIN} failed: {message}; repair it or choose another backend"
    )
    assert re.fullmatch(expected, str(error.value))


def test_mistake_in_a_run_of_several_segments(monkeypatch):
    reference = SimpleNamespace(run=fail)
    made = type(
        "Mine", (ReferenceBackend,), {"name": "mine", "compile": lambda self: Failing(reference, "run_segments", fail)}
    )()
    monkeypatch.setitem(sys.modules, "plugin_of_this_test", SimpleNamespace(make=lambda threads: made))
    mine = Plugin(backends.PLUGINS, entry("mine", "plugin_of_this_test:make", "mine"), conflict="")
    monkeypatch.setattr(backends.PLUGINS, "plugins", [mine])
    executable = backends.make_backend("mine", threads=1).compile()
    with pytest.raises(BackendError, match=f"^run_segments {PLUGIN} failed: ZeroDivisionError: a mistake"):
        executable.run_segments({}, {}, [])


class WithSlots:
    """A backend that cannot be changed, whose executables are those of the reference."""

    __slots__ = ()
    name, concurrency, cache_dtypes = "mine", None, ReferenceBackend.cache_dtypes
    supports, compile = staticmethod(ReferenceBackend().supports), staticmethod(ReferenceBackend().compile)


@pytest.mark.parametrize("made", [WithSlots(), WithSlots], ids=["slots", "class"])
def test_backend_that_cannot_be_changed_runs(monkeypatch, made):
    monkeypatch.setitem(sys.modules, "plugin_of_this_test", SimpleNamespace(make=lambda threads: made))
    mine = Plugin(backends.PLUGINS, entry("mine", "plugin_of_this_test:make", "mine"), conflict="")
    monkeypatch.setattr(backends.PLUGINS, "plugins", [mine])
    with chunkrt.load(checkpoint("llama_gqa"), npu="mine", scheme="float", threads=1) as engine:
        assert engine.session().prefill([1, 2, 3]).position == 3


def test_error_of_chunkrt_is_unchanged(load):
    with pytest.raises(CompileError, match=r"^mine needs another version of its compiler$"):
        load(compile=refuse)


def test_backend_without_mistakes_equals_the_reference(load):
    prompt = range(3, 20)
    with load() as engine, chunkrt.load(checkpoint("llama_gqa"), npu="reference", scheme="float") as reference:
        found, expected = (each.session().prefill(prompt).logits for each in (engine, reference))
        assert (found == expected).all()
