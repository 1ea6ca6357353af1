"""The values that pass from one stage to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """A page before quantisation: keys ~ mean + coef @ basis.

    mean: [..., D]; basis: [..., R, D], orthonormal rows (zero where the page has no such direction);
    coef: [..., P, R].
    """

    mean: Tensor
    basis: Tensor
    coef: Tensor


class Record(NamedTuple):
    """A page after dequantisation: keys ~ mean + coef @ basis.

    mean: [..., D]; basis: [..., R, D], a vector's codes; coef: [..., P, R], the vector's scale included;
    variance: [...], mean square of the residual an element, +inf for a page with a non-finite key;
    residual_norm: [...], at least the largest |k_t - k^_t| over the page's tokens.
    """

    mean: Tensor
    basis: Tensor
    coef: Tensor
    variance: Tensor
    residual_norm: Tensor


class PageMass(NamedTuple):
    """What scoring returns.

    log_mass: [B, Hq, N], natural log of a page's estimated attention mass, -inf where a page is not scored (the
    newest page and what lies behind it), +inf for a page with a non-finite key;
    total: [B, Hq], log-sum-exp of the finite log_mass over the candidates, -inf where there are none.
    """

    log_mass: Tensor
    total: Tensor


class PageList(NamedTuple):
    """Which pages a KV head attends to.

    page_ids: [B, Hkv, M] int32, ascending, -1 behind the last; counts: [B, Hkv] int32, how many are not -1.
    """

    page_ids: Tensor
    counts: Tensor


class Attended(NamedTuple):
    """An attention result: out [B, Hq, Dv] in q's dtype, lse [B, Hq] float32 (natural log), -inf for an empty row."""

    out: Tensor
    lse: Tensor


class Certificate(NamedTuple):
    """What is certain about a decode step without reading an unread page; of a group, its worst head.

    share: [B, Hkv] float32, at most the share of the attention mass that the attended pages hold; 1 where they
    are all of the row's pages, and only there. output_error: [B, Hkv] float32, at least |out - dense| / max |v|
    in any p-norm, dense being exact attention over the whole row: 2 (1 - share) and the rounding of `out`; 0
    where the pages are all, whose output is dense attention's own. Values are taken to be in the normal range of
    their dtype.
    """

    share: Tensor
    output_error: Tensor


class Decoded(NamedTuple):
    """A decode step: out [B, Hq, Dv], lse [B, Hq] over the attended pages, the pages, a certificate."""

    out: Tensor
    lse: Tensor
    pages: PageList
    certificate: Certificate | None = None
