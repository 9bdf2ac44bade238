"""Rotary embedding against complex numbers and exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from streamchat.ops.rotary import default_inv_freq, rope_tables, rotate

TWO_PI = Fraction(628318530717958647692528676655900576839433879875021164194988918461, 10**65)
"""To 66 digits: the reduction below is exact for any position that a stream can reach."""


def exact_tables(positions, inv_freq):
    """Cosines and sines as float64, of angles multiplied and reduced in exact fractions."""
    angles = np.array(
        [[float(Fraction(p) * Fraction(f) % TWO_PI) for f in inv_freq] for p in positions]
    )
    return np.cos(angles), np.sin(angles)


def turned(x, positions, inv_freq):
    """`x`, shape (..., length, head_dim), rotated as complex numbers in float64."""
    real, imaginary = np.split(x.double().numpy(), 2, axis=-1)
    cos, sin = exact_tables(positions, inv_freq)
    out = (real + 1j * imaginary) * (cos + 1j * sin)
    return torch.from_numpy(np.concatenate((out.real, out.imag), axis=-1))


def random_vectors(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("start", [0, 2**12, 2**22, 2**25, 2**30])
def test_tables_are_exact_at_any_position(start):
    """Cosine and sine are off by float32's rounding and a float64 angle's, and no more.

    The oracle reduces the angle in exact fractions. It takes the frequencies as given.
    """
    positions = range(start, start + 40)
    inv_freq = default_inv_freq(64)
    cos, sin = rope_tables(torch.tensor(positions), inv_freq)
    exact_cos, exact_sin = exact_tables(positions, inv_freq.tolist())
    # A float32 number near 1, and the last bit of a float64 angle of this size.
    tolerance = 2**-25 + (start + 40) * 2**-53
    assert cos.dtype == sin.dtype == torch.float32
    for half in (slice(0, 32), slice(32, 64)):
        assert np.abs(cos[:, half].double().numpy() - exact_cos).max() <= tolerance
    assert np.abs(sin[:, 32:].double().numpy() - exact_sin).max() <= tolerance
    assert torch.equal(sin[:, :32], -sin[:, 32:])


def test_float32_angles_would_be_seen():
    """At 2**25 angles made in float32 are off by more than a half: the test above has teeth."""
    positions = range(2**25 + 1, 2**25 + 40)
    inv_freq = default_inv_freq(64)
    cos = (torch.tensor(positions).float()[:, None] * inv_freq.float()).cos().numpy()
    assert np.abs(cos - exact_tables(positions, inv_freq.tolist())[0]).max() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [0, 2**25])
def test_rotate_is_a_complex_product_in_float32(dtype, start):
    """Each half-split pair is turned by its angle, whatever the dtype of the input.

    The oracle multiplies complex numbers in float64. Which rows get which table is the caller's.
    """
    x = random_vectors(2, 3, 20, 32).to(dtype)
    positions, inv_freq = range(start, start + 20), default_inv_freq(32)
    out = rotate(x, *rope_tables(torch.tensor(positions), inv_freq))
    expected = turned(x, positions, inv_freq.tolist())
    assert out.dtype == torch.float32
    largest = float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) <= 4e-7 * largest


def test_position_0_changes_nothing():
    """At position 0, where `prepare` puts every token for the model's own RoPE, rotating is exact.

    The oracle is the input.
    """
    x = random_vectors(1, 2, 1, 16)
    assert torch.equal(rotate(x, *rope_tables(torch.tensor([0]), default_inv_freq(16))), x)


@settings(deadline=None, max_examples=50)
@given(query=st.integers(0, 2**26), distance=st.integers(0, 1024), shift=st.integers(0, 2**26))
def test_a_score_depends_on_the_distance_alone(query, distance, shift):
    """The product of a rotated query and key is the same wherever both are moved.

    The oracle is the same pair near 0. It would miss tables that are wrong by a common angle.
    """
    inv_freq = default_inv_freq(32)
    pair = random_vectors(2, 32)

    def score(position):
        tables = rope_tables(torch.tensor([position + distance, position]), inv_freq)
        turned_query, turned_key = rotate(pair, *tables).double()
        return float(turned_query @ turned_key)

    assert math.isclose(score(query), score(0), abs_tol=2e-5)
    assert math.isclose(score(query + shift), score(0), abs_tol=2e-5)


def test_default_frequencies_are_transformers_own():
    """`default_inv_freq` is the table of an unscaled Llama, but for float32's rounding.

    The oracle is transformers' own table, of one base and one head size.
    """
    own = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    expected = own.base_model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(default_inv_freq(8, theta=5e5), expected, rtol=2e-7, atol=0)
