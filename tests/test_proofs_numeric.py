"""The theorems of `proofs/` in numbers: each test is named in the table of `proofs/README.md`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

EPS = float(np.finfo(np.float64).eps)

seeds = st.integers(0, 2**32 - 1)
widths = st.integers(2, 64)
logit_scales = st.sampled_from([0.01, 1.0, 30.0, 300.0])


def rounding(*sizes: object) -> float:
    """What fp64 may lose on numbers of these sizes in sums of a few thousand terms."""
    return (
        4096 * EPS * (1.0 + max(float(np.max(np.abs(np.asarray(size, dtype=np.float64)))) for size in sizes))
    )


def lse(x: Array) -> float:
    top = x.max()
    return float(top + np.log(np.exp(x - top).sum()))


def attention(x: Array, v: Array) -> Array:
    return np.exp(x - lse(x)) @ v


def orthonormal(rng: np.random.Generator, rows: int, width: int) -> Array:
    return np.linalg.qr(rng.standard_normal((width, rows)))[0].T


def kernel(sketch: Array) -> Array:
    """[D - rank, D] orthonormal rows that the sketch maps to zero."""
    _, values, directions = np.linalg.svd(sketch)
    rank = int((values > values[0] * 1e-12).sum()) if values.size and values[0] > 0 else 0
    return directions[rank:]


def quantised(x: Array, bits: int) -> Array:
    """x rounded to `bits` bits with one scale per row, dequantised."""
    limit = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-30) / limit
    return np.round(x / scale) * scale


def truncated(page: Array, rank: int) -> tuple[Array, Array]:
    """Coefficients [P, R] and basis [R, D] of the best rank-R part, from the P x P Gram matrix."""
    _, vectors = np.linalg.eigh(page @ page.T)
    top = vectors[:, ::-1][:, :rank]
    return top, top.T @ page


def reconstructed(page: Array, rank: int, bits: int = 4) -> Array:
    """A page as its quantised record gives it: mean, basis and coefficients."""
    mean = quantised(page.mean(axis=0), 8)
    coefficients, basis = truncated(page - page.mean(axis=0), rank)
    return mean + quantised(coefficients.T, bits).T @ quantised(basis, bits)


def drawn_pages(rng: np.random.Generator, pattern: str, pages: int, tokens: int, width: int) -> Array:
    """[N, P, D] keys of the kinds that occur or that hurt."""
    keys = rng.standard_normal((pages, tokens, width))
    if pattern == "mean":
        keys = 0.1 * keys + 3 * rng.standard_normal((pages, 1, width))
    elif pattern == "constant":
        keys = np.repeat(keys[:, :1], tokens, axis=1)
    elif pattern == "outlier":
        keys[rng.integers(pages), rng.integers(tokens)] *= 1e3
    elif pattern == "zero":
        keys[rng.integers(pages)] = 0
    return keys


patterns = st.sampled_from(["normal", "mean", "constant", "outlier", "zero"])


@given(seed=seeds, width=widths, data=st.data())
def test_blindness(seed: int, width: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    sketch = rng.standard_normal((data.draw(st.integers(1, width - 1)), width))
    unseen = kernel(sketch)
    assert len(unseen) == width - len(sketch)
    u, keys = unseen[0], rng.standard_normal((16, width))
    moved = keys + np.outer(rng.standard_normal(16) * 1e3, u)
    bound = rounding(1e4 * np.linalg.norm(sketch))
    np.testing.assert_allclose(moved @ sketch.T, keys @ sketch.T, rtol=0, atol=bound)
    # the true score of the query u moves by exactly what the keys moved
    assert np.abs((moved - keys) @ u).max() > 1


@given(seed=seeds, width=st.integers(8, 64), pages=st.integers(4, 24), data=st.data())
def test_fixed_sketch_misses(seed: int, width: int, pages: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    kept, tokens = data.draw(st.integers(1, pages - 1)), 16
    sketch = orthonormal(rng, data.draw(st.integers(1, width // 2)), width)
    query = rng.standard_normal(width)
    u = kernel(sketch).T @ (kernel(sketch) @ query)
    u /= query @ u
    keys = rng.standard_normal((pages, tokens, width))
    logits = keys @ query
    eps = 1e-3
    t = np.log(pages / eps) + logits.max() - logits.min() + 1

    def best(scores: Array) -> set[int]:
        return set(np.argsort(-scores, kind="stable")[:kept].tolist())

    shared, missed, found = set[frozenset[int]](), 0, 0
    for heavy in range(pages):
        cache = keys.copy()
        cache[heavy] += t * u
        exact = np.exp(np.array([lse(page @ query) for page in cache]) - lse((cache @ query).ravel()))
        assert exact[heavy] > 1 - eps
        # rounded, so that the same sketch gives the same numbers
        guess = np.round((cache @ sketch.T) @ (sketch @ query), 6)
        by_sketch = best(np.array([lse(page) for page in guess]))
        by_record = best(np.array([lse(reconstructed(page, 2) @ query) for page in cache]))
        shared.add(frozenset(by_sketch))
        missed += heavy not in by_sketch
        found += heavy in by_record
    assert len(shared) == 1
    assert missed == pages - kept
    assert found == pages


@given(seed=seeds, width=widths, data=st.data())
def test_row_space_query_seen(seed: int, width: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    sketch = rng.standard_normal((data.draw(st.integers(1, width - 1)), width))
    weights = rng.standard_normal(len(sketch))
    keys = rng.standard_normal((16, width))
    from_sketch = (keys @ sketch.T) @ weights
    np.testing.assert_allclose(keys @ (weights @ sketch), from_sketch, rtol=0, atol=rounding(1e3))


@given(seed=seeds, width=widths, data=st.data())
def test_frame_energy(seed: int, width: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    rank = data.draw(st.integers(0, width))
    basis, frame = orthonormal(rng, rank, width), orthonormal(rng, width, width)
    kept = ((frame @ basis.T @ basis) ** 2).sum(axis=1)
    assert kept.sum() == pytest.approx(rank, abs=rounding(width))
    assert kept.min() <= rank / width + rounding(1)
    direction = rng.standard_normal(width)
    own = np.outer(direction, direction) / (direction @ direction)
    np.testing.assert_allclose(direction @ own, direction, rtol=0, atol=rounding(10))


@given(
    seed=seeds, tokens=st.sampled_from([16, 32]), width=st.integers(4, 64), pattern=patterns, data=st.data()
)
def test_eckart_young(seed: int, tokens: int, width: int, pattern: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    rank = data.draw(st.sampled_from([1, 2, 4, 8]))
    page = drawn_pages(rng, pattern, 1, tokens, width)[0]
    centred = page - page.mean(axis=0)
    coefficients, basis = truncated(centred, rank)
    residual = centred - coefficients @ basis
    error = (residual**2).sum()
    bound = rounding((page**2).sum())
    eigenvalues = np.linalg.eigvalsh(centred @ centred.T)[::-1]
    assert error == pytest.approx(eigenvalues[rank:].sum(), abs=bound)
    # the spectral norm of the residual is the next singular value, and bounds all rows together
    spectral = np.linalg.norm(residual, 2) ** 2
    assert spectral == pytest.approx(max(eigenvalues[rank : rank + 1].max(initial=0), 0), abs=bound)
    assert (residual**2).sum(axis=1).max() <= spectral + bound
    rivals = [
        rng.standard_normal((tokens, rank)) @ rng.standard_normal((rank, width)),
        centred @ np.linalg.pinv(other := rng.standard_normal((rank, width))) @ other,
        (coefficients + 0.1 * rng.standard_normal(coefficients.shape)) @ basis,
    ]
    for rival in rivals:
        for offset in (page.mean(axis=0), np.median(page, axis=0)):
            assert error <= ((page - offset - rival) ** 2).sum() + bound


@given(seed=seeds, width=widths, pattern=patterns, scale=st.sampled_from([-1.0, 0.125, 1.0]), data=st.data())
def test_logit_error(seed: int, width: int, pattern: str, scale: float, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    page = drawn_pages(rng, pattern, 1, 16, width)[0]
    query = rng.standard_normal(width) * data.draw(logit_scales)
    residual = page - reconstructed(page, data.draw(st.sampled_from([1, 2, 4])))
    error = np.abs(scale * (residual @ query))
    norms = np.linalg.norm(residual, axis=1)
    assert error.max() <= abs(scale) * np.linalg.norm(query) * norms.max() * (1 + 64 * EPS)
    # the spectral norm bounds the error of all tokens together
    together = abs(scale) * np.linalg.norm(query) * np.linalg.norm(residual, 2)
    assert np.linalg.norm(error) <= together * (1 + rounding(1))


@given(seed=seeds, tokens=st.integers(1, 64), size=logit_scales, step=logit_scales)
def test_lse_lipschitz(seed: int, tokens: int, size: float, step: float) -> None:
    rng = np.random.default_rng(seed)
    x = size * rng.standard_normal(tokens)
    y = x + step * rng.standard_normal(tokens)
    assert abs(lse(x) - lse(y)) <= np.abs(x - y).max() + rounding(x, y)
    assert lse(x + step) - lse(x) == pytest.approx(step, abs=rounding(x, step))


@given(seed=seeds, width=widths, pages=st.integers(2, 24), pattern=patterns, data=st.data())
def test_mass_interval(seed: int, width: int, pages: int, pattern: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    scale = width**-0.5
    keys = drawn_pages(rng, pattern, pages, 16, width)
    query = rng.standard_normal(width) * data.draw(logit_scales)
    records = np.stack([reconstructed(page, data.draw(st.sampled_from([1, 4, 8]))) for page in keys])
    rho = np.linalg.norm(keys - records, axis=2).max(axis=1)
    exact = np.array([lse(scale * (page @ query)) for page in keys])
    estimate = np.array([lse(scale * (page @ query)) for page in records])
    delta = rounding(scale * (keys @ query), scale * (records @ query))
    half = scale * np.linalg.norm(query) * rho + delta
    assert (np.abs(exact - estimate) <= half).all()
    certain = (estimate + half)[:, None] < (estimate - half)[None, :]
    assert (exact[:, None] < exact[None, :])[certain].all()


def kept_and_left(rng: np.random.Generator, pages: int, data: st.DataObject) -> tuple[Ids, Ids]:
    order = rng.permutation(pages)
    count = data.draw(st.integers(1, pages))
    return order[:count], order[count:]


@given(
    seed=seeds,
    pages=st.integers(1, 24),
    size=logit_scales,
    order=st.sampled_from([1, 2, np.inf]),
    data=st.data(),
)
def test_output_error(seed: int, pages: int, size: float, order: float, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    x = size * rng.standard_normal((pages, 16))
    v = rng.standard_normal((pages, 16, 8))
    kept, left = kept_and_left(rng, pages, data)
    slack = rng.exponential(size=pages)
    low = lse(x[kept].ravel()) - slack[0]
    high = np.array([lse(page) for page in x]) + slack
    share = np.exp(lse(x[kept].ravel()) - lse(x.ravel()))
    # exp(low) / (exp(low) + sum over the pages left of exp(high)), without overflow
    bound = np.exp(low - lse(np.append(high[left], low)))
    longest = np.linalg.norm(v, order, axis=2).max()
    dense = attention(x.ravel(), v.reshape(-1, 8))
    sparse = attention(x[kept].ravel(), v[kept].reshape(-1, 8))
    error = np.linalg.norm(dense - sparse, order)
    lost = rounding(x, v)
    assert bound <= share + lost
    assert error <= 2 * (1 - share) * longest + lost
    assert error <= 2 * (1 - bound) * longest + lost


@given(seed=seeds, width=st.integers(4, 64), pages=st.integers(2, 24), pattern=patterns, data=st.data())
def test_certificate(seed: int, width: int, pages: int, pattern: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    scale = width**-0.5
    keys = drawn_pages(rng, pattern, pages, 16, width)
    values = rng.standard_normal((pages, 16, 8))
    query = rng.standard_normal(width) * data.draw(logit_scales)
    kept, left = kept_and_left(rng, pages, data)
    records = np.stack([reconstructed(page, 4) for page in keys])
    x = scale * (keys @ query)
    delta = rounding(x, scale * (records @ query))
    # of the pages left nothing enters but their records, with the residual norm
    rho = np.linalg.norm(keys - records, axis=2).max(axis=1)
    high = np.array([lse(scale * (page @ query)) for page in records])
    high += scale * np.linalg.norm(query) * rho + delta
    low = lse(x[kept].ravel()) - delta
    bound = np.exp(low - lse(np.append(high[left], low)))
    share = np.exp(lse(x[kept].ravel()) - lse(x.ravel()))
    error = np.linalg.norm(
        attention(x.ravel(), values.reshape(-1, 8)) - attention(x[kept].ravel(), values[kept].reshape(-1, 8))
    )
    assert bound <= share * (1 + rounding(x))
    assert error <= 2 * (1 - bound) * np.linalg.norm(values, axis=2).max() + rounding(x)


@given(seed=seeds, tokens=st.integers(1, 200), splits=st.integers(1, 12), size=logit_scales)
def test_lse_merge(seed: int, tokens: int, splits: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    x, v = size * rng.standard_normal(tokens), rng.standard_normal((tokens, 8))
    owner = rng.integers(splits, size=tokens)
    used = [owner == s for s in range(splits) if (owner == s).any()]
    masses = np.array([lse(x[part]) for part in used])
    outputs = np.stack([attention(x[part], v[part]) for part in used])
    weights = np.exp(masses - lse(x))
    lost = rounding(x)
    assert weights.sum() == pytest.approx(1, abs=lost)
    np.testing.assert_allclose(weights @ outputs, attention(x, v), rtol=0, atol=10 * lost)
    shift = masses.max()
    shifted = np.exp(masses - shift)
    assert shift + np.log(shifted.sum()) == pytest.approx(lse(x), abs=lost)
    np.testing.assert_allclose(shifted @ outputs / shifted.sum(), attention(x, v), rtol=0, atol=10 * lost)


def order_keys(scores: NDArray[np.float32]) -> Ids:
    """Unsigned 32-bit keys in the order of the scores; 0 and -0 get one key."""
    bits = scores.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -bits - 2**31, bits) + 2**31


def radix_threshold(keys: Ids, kept: int, base: int, digits: int) -> int:
    """The kept-th largest key, digit by digit from the leading one, as `proofs/select.v` defines it."""
    tau = 0
    for place in reversed(range(digits)):
        weight = base**place
        lead = keys // weight
        digit = next(d for d in reversed(range(base)) if d == 0 or (lead >= d).sum() >= kept)
        kept -= int((lead > digit).sum())
        keys = keys[lead == digit] % weight
        tau += digit * weight
    return tau


@given(
    seed=seeds,
    pages=st.integers(1, 300),
    pattern=st.sampled_from(["normal", "ties", "equal", "signs"]),
    radix=st.sampled_from([(2, 32), (16, 8), (256, 4)]),
    data=st.data(),
)
def test_select_top(seed: int, pages: int, pattern: str, radix: tuple[int, int], data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(pages).astype(np.float32)
    if pattern == "ties":
        scores = np.round(scores)
    elif pattern == "equal":
        scores[:] = scores[0]
    elif pattern == "signs":
        scores = np.copysign(np.float32(0), scores)
    kept = data.draw(st.integers(1, pages))
    keys = order_keys(scores)
    tau = radix_threshold(keys, kept, *radix)
    assert (keys >= tau).sum() >= kept > (keys > tau).sum()
    assert tau == np.sort(keys)[::-1][kept - 1]
    ties = keys == tau
    chosen = (keys > tau) | (ties & (np.cumsum(ties) <= kept - (keys > tau).sum()))
    expected = np.sort(np.argsort(-scores, kind="stable")[:kept])
    np.testing.assert_array_equal(np.flatnonzero(chosen), expected)


@given(seed=seeds, pages=st.integers(1, 60), values=st.sampled_from([1, 3, 1000]))
def test_threshold_top(seed: int, pages: int, values: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, values, pages)
    kept = int(rng.integers(0, pages + 1))
    expected = np.sort(np.argsort(-keys, kind="stable")[:kept])
    found = 0
    for tau in range(-1, int(keys.max()) + 2):
        above, ties = keys > tau, keys == tau
        if above.sum() <= kept <= (keys >= tau).sum():
            chosen = above | (ties & (np.cumsum(ties) <= kept - above.sum()))
            np.testing.assert_array_equal(np.flatnonzero(chosen), expected)
            found += 1
    assert found > 0


@given(seed=seeds, pages=st.integers(1, 300), group=st.integers(1, 40), values=st.sampled_from([1, 3, 1000]))
def test_groups_hold_top(seed: int, pages: int, group: int, values: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, values, pages)
    kept = int(rng.integers(1, pages + 1))
    maxima = np.array([keys[k : k + group].max() for k in range(0, pages, group)])
    first_groups = np.argsort(-maxima, kind="stable")[:kept]
    first_pages = np.argsort(-keys, kind="stable")[:kept]
    assert set(first_pages // group) <= set(first_groups)
