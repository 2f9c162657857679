"""One node by itself: chunkrt's reference runs it if it accepts the node, otherwise a plug-in's form does."""

from dataclasses import replace

import numpy as np
import pytest

from chunkrt.backends.dispatch import registered_operators
from chunkrt.compile import calibrate
from chunkrt.compile.calibrate import run_operator
from chunkrt.errors import BackendError, ConfigError, PartitionError
from chunkrt.graph.operators import Operator, register_operator
from chunkrt.graph.plan import Node

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def registry(monkeypatch):
    """Return a registry to which a test adds forms."""
    copied = registered_operators().copy()
    monkeypatch.setattr(calibrate, "registered_operators", lambda: copied)
    return copied


def node(op="Double", domain="acme", outputs=("y",), **attributes):
    return Node(name="double", op=op, domain=domain, inputs=("x",), outputs=outputs, attributes=attributes)


def add(registry, function, name="acme", operator="acme_double", package="acme-ops", **options):
    with registry.from_distribution(package):
        registry.register(operator, name, **options)(function)


def test_plugin_form_runs_and_its_floats_become_float32(registry):
    add(registry, lambda x: np.float64(2) * x.astype(np.float64))
    (found,) = run_operator(node(), [X])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, X + X)


def test_form_gets_its_declared_parts(registry):
    add(registry, lambda x, *, rope: rope(x[:, None], np.zeros((2, 1)), np.ones((2, 1)))[:, 0], parts=("rope",))
    (found,) = run_operator(node(), [X])
    np.testing.assert_array_equal(found, np.stack([-X[:, 1], X[:, 0], X[:, 2]], axis=1))  # a quarter turn


def test_form_that_accepts_the_node_runs(registry):
    add(registry, lambda x, times: 2 * x, "fast", refuses=lambda node: "" if node.attributes["times"] == 2 else "no")
    add(
        registry,
        lambda x, times: times * x,
        "exact",
        refuses=lambda node: "no" if node.attributes["times"] == 2 else "",
    )
    for times in (2, 3):
        np.testing.assert_array_equal(run_operator(node(times=times), [X])[0], times * X)


def test_forms_of_two_packages_that_accept_the_node_are_an_error(registry):
    for name in ("fast", "exact"):
        add(registry, np.positive, name, package=f"{name}-ops")
    message = r"node 'double': forms of 2 packages accept it: 'fast' of fast-ops .* and 'exact' of exact-ops"
    with pytest.raises(ConfigError, match=message):
        run_operator(node(), [X])


@pytest.mark.parametrize("name", ["acme", "reference"])
def test_object_of_a_class_runs_with_its_weights(registry, name):
    """A row states that the second input is a weight, which the object gets when it is made."""
    row = Operator(num_inputs=2, output=lambda attributes, shapes: shapes[0], weights=(1,))
    register_operator("acme", f"Scaled{name.title()}", row)

    class Scaled:
        def __init__(self, node):
            self.shapes = node.input_shapes

        def prepare(self, weight):
            assert self.shapes == ((2, 3), weight.shape)
            self.weight = weight * 10

        def __call__(self, x):
            return x * self.weight

    add(registry, Scaled, name, f"acme_scaled_{name}")
    scaled = replace(node(f"Scaled{name.title()}"), inputs=("x", "weight"))
    (found,) = run_operator(scaled, [X, np.arange(3, dtype=np.float32)])
    np.testing.assert_array_equal(found, X * [0, 10, 20])


def test_kind_that_the_reference_refuses_runs_in_a_plugin(registry):
    """Linear attention is an operator of chunkrt's; a plug-in has a kind of its own."""
    add(registry, lambda x, attn_type: -x, operator="linear_attention", refuses=lambda node: "")
    (found,) = run_operator(node("LinearAttention", "chunkrt", attn_type="acme_kind"), [X])
    np.testing.assert_array_equal(found, -X)


def test_operator_without_implementation_is_named(registry):
    with pytest.raises(PartitionError, match=r"node 'double': reference has no operator acme::Double; .* install"):
        run_operator(node(), [X])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x["a"], "failed: IndexError"),
        (lambda x: (x, x), "failed: ValueError: it returned 2 outputs, expected 1"),
    ],
)
def test_failing_form_is_named(registry, function, message):
    add(registry, function)
    with pytest.raises(BackendError, match=rf"node 'double': acme::Double by .*<lambda> of acme-ops {message}"):
        run_operator(node(), [X])
