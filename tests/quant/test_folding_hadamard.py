"""The rotation's factors and their product, against dense algebra."""

import numpy as np
import pytest

from chunkrt.quant.folding import LARGEST_POWER, ROWS_AT_ONCE, hadamard, hartley, orthogonal_factors, rotate

WIDTHS = [1, 2, 3, 6, 7, 12, 36, 64, 97, 128, 576, 896, 960, 2048]


@pytest.mark.parametrize("order", [1, 2, 4, 8, 64, 256])
def test_hadamard_matrices_have_orthogonal_rows_of_1_and_minus_1(order):
    matrix = hadamard(order)
    np.testing.assert_array_equal(np.abs(matrix), np.ones((order, order)))
    np.testing.assert_array_equal(matrix @ matrix.T, order * np.eye(order))
    np.testing.assert_array_equal(matrix, matrix.T)


@pytest.mark.parametrize("order", [1, 3, 9, 15, 97, 1009])
def test_hartley_matrices_have_orthogonal_rows_of_even_values(order):
    matrix = hartley(order)
    assert np.abs(matrix).max() <= 2**0.5 + 1e-12
    np.testing.assert_allclose(matrix @ matrix.T, order * np.eye(order), atol=1e-10 * order)
    np.testing.assert_array_equal(matrix, matrix.T)


@pytest.mark.parametrize("width", WIDTHS)
def test_factors_multiply_to_the_width(width):
    factors = orthogonal_factors(width)
    assert np.prod([len(factor) for factor in factors]) == width
    assert all(len(factor) <= LARGEST_POWER or len(factor) % 2 for factor in factors)


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_is_orthogonal_and_even(width):
    matrix = rotate(np.eye(width, dtype=np.float32)).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-6)
    assert np.abs(matrix).max() * width**0.5 <= 2**0.5 + 1e-6
    if width & (width - 1) == 0:
        np.testing.assert_allclose(np.abs(matrix), width**-0.5, rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_is_the_product_of_its_factors(width):
    dense = np.ones((1, 1))
    for factor in orthogonal_factors(width):
        dense = np.kron(dense, factor)
    matrix = rotate(np.eye(width, dtype=np.float32))
    signs = np.sign(matrix[:, :1])  # the first column of every factor is 1
    np.testing.assert_allclose(matrix, signs * dense / width**0.5, atol=1e-6)


def test_rotation_is_independent_of_the_number_of_rows():
    x = np.random.default_rng(0).standard_normal((2 * ROWS_AT_ONCE + 1, 12)).astype(np.float32)
    expected = x.astype(np.float64) @ rotate(np.eye(12, dtype=np.float32))
    np.testing.assert_allclose(rotate(x), expected, atol=2e-6)
    np.testing.assert_array_equal(rotate(np.asfortranarray(x)), rotate(x))


def test_signs_are_the_same_on_every_machine():
    """Calibrations are stored, and hold peaks of the rotated decoder."""
    first_column = rotate(np.eye(12, dtype=np.float32))[:, 0]
    assert "".join("+" if value > 0 else "-" for value in first_column) == "++-++-++---+"
