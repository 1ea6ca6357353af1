"""The analysis' estimators against closed forms: known spectra, turned subspaces, Haar-random pages."""

import math

import numpy as np
import outputs
import pytest
import scipy.linalg
import spectra
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locks import reference
from tests.helpers import generator


def frame(rows: int, width: int, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    """Orthonormal rows, Haar-random."""
    draw = torch.randn(*batch, width, rows, generator=generator(seed), dtype=torch.float64)
    return torch.linalg.qr(draw)[0].mT


def with_spectrum(singular: list[float], rows: int, width: int, seed: int) -> Tensor:
    """Rows [rows, width] of those singular values, turned at random on either side."""
    values = torch.tensor(singular, dtype=torch.float64)
    left, right = frame(len(singular), rows, seed), frame(len(singular), width, seed + 1)
    return left.mT @ (values[:, None] * right)


@given(st.integers(1, 12), st.integers(12, 40), st.integers(12, 40), st.integers(0, 2**16))
def test_equal_energies_give_their_number_whatever_the_turn(rank, rows, width, seed):
    energy = spectra.energies(with_spectrum([2.5] * rank, rows, width, seed))
    assert energy.shape[-1] == min(rows, width)
    torch.testing.assert_close(energy[:rank], torch.full_like(energy[:rank], 6.25))
    for measure in (spectra.entropy_rank, spectra.stable_rank):
        torch.testing.assert_close(float(measure(energy)), float(rank), rtol=1e-6, atol=1e-6)
    assert int(spectra.dimensions(energy, 0.99)) == math.ceil(0.99 * rank)


def test_measures_of_a_known_spectrum():
    # Energies 9, 4, 2, 1 of 16.
    energy = spectra.energies(with_spectrum([3, 2, 2**0.5, 1], 16, 64, 0))
    share = torch.tensor([9, 4, 2, 1], dtype=torch.float64) / 16
    torch.testing.assert_close(spectra.entropy_rank(energy), (-(share * share.log()).sum()).exp())
    torch.testing.assert_close(float(spectra.stable_rank(energy)), 16 / 9)
    assert [int(spectra.dimensions(energy, s)) for s in (0.5, 0.8, 0.9, 0.95, 1.0)] == [1, 2, 3, 4, 4]


def test_centring_takes_one_direction_from_pages_about_a_mean():
    mean = 10 * frame(1, 64, 3)
    x = mean + 0.01 * torch.randn(16, 64, generator=generator(4), dtype=torch.float64)
    assert float(spectra.entropy_rank(spectra.energies(x))) < 1.01
    assert float(spectra.entropy_rank(spectra.energies(spectra.centred(x)))) > 13


@given(st.sampled_from([(16, 64), (64, 32), (8, 8)]), st.integers(1, 6), st.integers(0, 2**16))
def test_the_top_basis_spans_the_turned_subspace(shape, rank, seed):
    rows, width = shape
    x = with_spectrum([5.0 - 0.5 * i for i in range(rank)], rows, width, seed)
    basis = spectra.top_basis(x, rank)
    torch.testing.assert_close(basis @ basis.T, torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(spectra.project(x, basis), x)


def test_a_page_without_that_many_directions_has_zeros_for_the_rest():
    basis = spectra.top_basis(with_spectrum([2.0, 1.0], 16, 64, 5), 4)
    torch.testing.assert_close(basis.norm(dim=-1), torch.tensor([1.0, 1, 0, 0], dtype=torch.float64))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**16))
def test_angles_are_those_of_scipy(a, b, seed):
    one, other = frame(a, 24, seed, (3,)), frame(b, 24, seed + 1, (3,))
    # A direction in common, and one nearly so.
    other[0, 0] = one[0, 0]
    other[0] = torch.linalg.qr(other[0].mT)[0].mT
    found = spectra.principal_angles(one, other)
    for i in range(3):
        wanted = scipy.linalg.subspace_angles(one[i].T.numpy(), other[i].T.numpy())[::-1].copy()
        np.testing.assert_allclose(found[i].numpy(), wanted, atol=1e-7)


@pytest.mark.parametrize("degrees", [0, 1e-5, 10, 45, 90])
def test_a_subspace_turned_by_an_angle_is_that_far(degrees):
    axes, turn = frame(4, 32, 6), math.radians(degrees)
    turned = torch.stack([axes[0], math.cos(turn) * axes[1] + math.sin(turn) * axes[2]])
    angle = spectra.principal_angles(axes[:2], turned)
    torch.testing.assert_close(angle, torch.tensor([0, turn], dtype=torch.float64), rtol=0, atol=1e-9)


def test_a_basis_of_other_random_pages_captures_r_of_d():
    D, R, pages = 32, 8, 4000
    # One Haar-random direction a page.
    ours, others = frame(1, D, 7, (pages,))[:, 0], frame(1, D, 8, (pages,))[:, 0]

    def captured(x: Tensor, basis: Tensor) -> float:
        return float(spectra.project(x, basis).square().sum() / x.square().sum())

    # The share of one page has mean R / D and variance 2 R (D - R) / (D^2 (D + 2)).
    spread = math.sqrt(2 * R * (D - R) / (D * D * (D + 2)) / pages)
    assert abs(captured(ours, spectra.top_basis(others, R)) - R / D) < 4 * spread
    few = ours[:64]
    # Fitted to the pages it serves it captures more.
    assert captured(few, spectra.top_basis(few, R)) > captured(few, spectra.top_basis(others, R)) + 0.1


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 2**16))
def test_the_logit_error_is_that_of_every_pair(rows, queries, seed):
    residual = torch.randn(2, rows, 16, generator=generator(seed), dtype=torch.float64)
    q = torch.randn(2, queries, 16, generator=generator(seed + 1), dtype=torch.float64)
    wanted = (0.125 * q @ residual.mT).square().mean((1, 2)).sqrt()
    torch.testing.assert_close(spectra.logit_error(residual, q, 0.125), wanted)


def test_factors_are_the_references_and_iterations_approach_them():
    pages = [with_spectrum([8, 7, 6, 5, 2, 1.5, 1, 0.5], 16, 64, seed) for seed in range(5)]
    keys = torch.stack(pages) + frame(1, 64, 9)
    exact, wanted = spectra.page_factors(keys, 4), reference.factors(keys, 4)
    torch.testing.assert_close(exact.mean, wanted.mean)
    torch.testing.assert_close(exact.coef @ exact.basis, wanted.coef @ wanted.basis)
    errors = []
    for steps in (1, 2, 3, 60):
        found = spectra.iterated_factors(keys, 4, steps, generator(10))
        errors.append(float((found.coef @ found.basis - wanted.coef @ wanted.basis).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


def test_intervals_hold_the_mean_and_repeat():
    sample = np.random.default_rng(0).normal(3.0, 1.0, (4, 400))
    mean, low, high = outputs.interval(sample)
    np.testing.assert_allclose(mean, sample.mean(-1))
    # A normal sample's interval is 1.96 standard errors to either side.
    error = sample.std(-1, ddof=1) / 20
    np.testing.assert_allclose(high - low, 2 * 1.96 * error, rtol=0.15)
    np.testing.assert_array_equal(outputs.interval(sample)[1], low)
    assert outputs.columns("x", [2.0, math.nan, 2.0]) == {"x": 2.0, "x_low": 2.0, "x_high": 2.0}
