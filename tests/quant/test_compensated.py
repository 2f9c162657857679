"""Rounding to 4 bits with compensation, against nearest rounding, on inputs with correlated channels."""

from __future__ import annotations

import numpy as np
import pytest

from chunkrt.quant.arithmetic import quantize_to_blocks, quantize_weight_in_blocks
from chunkrt.quant.compensated import round_in_blocks, round_to_blocks


def correlated(depth: int, rows: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((rows, depth // 4)) @ random.standard_normal((depth // 4, depth))
    return (mixed + 0.3 * random.standard_normal((rows, depth))) * random.lognormal(0, 1, depth)


def weights(depth: int, columns: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_t(4, (depth, columns)).astype(np.float32)
    values[:, 3] = 0
    return values


def error(inputs: np.ndarray, found: np.ndarray, weight: np.ndarray) -> float:
    return float(np.square(inputs @ (found.astype(np.float64) - weight)).sum())


@pytest.mark.parametrize("depth", [64, 96, 250])
def test_rounding_in_blocks_halves_the_error_of_the_product(depth: int) -> None:
    inputs, weight = correlated(depth, 400, depth), weights(depth, 24, 1)
    found = round_in_blocks(weight, inputs.T @ inputs)
    products, scale, _ = quantize_weight_in_blocks(weight)
    nearest = error(inputs, products * scale, weight)
    assert error(inputs, found.values * found.scale, weight) < 0.5 * nearest
    fields = found.values / np.repeat(found.multipliers, 32, axis=0)[:depth]
    assert (fields == np.rint(fields)).all()
    assert (fields.min(), fields.max()) == (-8, 7)
    assert found.multipliers.min() >= 1
    nonzero = np.abs(weight).max(axis=0) > 0
    assert (found.multipliers.max(axis=0)[nonzero] == 16).all()
    assert not found.values[:, 3].any()
    assert found.scale[3] == 0


def test_rounding_to_blocks_halves_the_error_of_the_product() -> None:
    inputs, weight = correlated(128, 400, 5), weights(128, 24, 2)
    found = round_to_blocks(weight, inputs.T @ inputs)
    nearest = quantize_to_blocks(weight)
    assert error(inputs, found.dequantise().T, weight) < 0.5 * error(inputs, nearest.dequantise().T, weight)
    np.testing.assert_allclose(found.dequantise().T[:, 3], 0, atol=1e-6)


def test_rounding_without_correlation_is_nearest_on_its_grid() -> None:
    weight = weights(64, 8, 3)
    found = round_in_blocks(weight, np.eye(64))
    step = found.scale.astype(np.float64) * np.repeat(found.multipliers, 32, axis=0)
    fields = np.rint(weight / np.where(step > 0, step, np.inf)).clip(-8, 7)
    expected = fields * np.repeat(found.multipliers, 32, axis=0)
    np.testing.assert_array_equal(found.values, expected)


def test_inputs_without_any_value_round_to_the_nearest() -> None:
    weight = weights(64, 8, 4)
    found = round_to_blocks(weight, np.zeros((64, 64)))
    assert np.abs(found.dequantise().T - weight).max() < np.abs(weight).max() / 5
