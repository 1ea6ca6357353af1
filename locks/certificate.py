"""What the certificate allows for rounding, and the pages whose mass a coverage counts exactly.

For one query head, with s = |scale| |q|, est_n the log-sum-exp of the logits that page n's record gives and
rho_n the record's residual norm, the page's exact log-mass lies within s rho_n of est_n (`mass_interval` in
`proofs/`). Of the pages that were not attended to, high_n = est_n + s rho_n + delta_n is all that enters; of
the attended ones, their lse less delta. With U = log sum over the former of exp(high_n) and L = lse - delta,

    share of the mass that is kept >= exp(L) / (exp(L) + exp(U)),  |dense - sparse| <= 2 (1 - share) max |v|

(`output_error` and `certificate` in `proofs/`, which leave the deltas to the code that computes). They are
bounded here for arithmetic in float32 with gradual underflow, products of matrices not rounded to fewer bits
(no TF32), and additions in any order. Both implementations use these constants; PyTorch's goes from the
float32 scores on in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locks.format import SummaryFormat, code_max
from locks.pages import num_pages
from locks.types import PageList

# Bounds the relative rounding of one operation: twice what rounding to nearest does, and what a tensor core
# does when it cuts a term off at the last place of the sum. The factor of 2 of the former pays for
# second-order terms.
UNIT = 2.0**-23

# A page's log-sum-exp given its logits, for P <= 64 tokens: l - max rounds by UNIT |l - max|, which moves the
# mass by at most UNIT x exp(-x) < UNIT / 2 a token; as much again where exp is 2**(x log2 e); exp itself is
# off by 4 UNIT, the sum by 64 UNIT, and log by 2**-20 for arguments of at most 64. Together below 2**-16.
PAGE_ROUNDING = 2.0**-14

# Adding to a number, and storing it: 8 UNIT of the number, for at most 8 roundings.
ADDITION_ROUNDING = 8 * UNIT

# s is off by (D / 2 + 12) UNIT (a sum of D squares, halved by the root; a division and two products an
# element), its product with the residual norm and the sum with the estimate by 4 more: for D <= 256 below
# this.
WIDTH_ROUNDING = 2.0**-14

# Most pages that a coverage orders by share: what a kernel sorts in registers.
MAX_COVER_PAGES = 4096


def logit_rounding(head_dim: int, rank: int) -> float:
    """Error of a float32 logit relative to s times the sum of its parts' sizes (|k| if made from a key).

    A dot product of D terms errs by (D + 1) UNIT of sum |q_i k_i| <= |q| |k| in any order; a tensor core adds
    one more term every 8 at most. A logit made from a record has R + 1 such parts, each with the roundings of
    its own factors (scale, the codes' scale, their products: at most 12), and R additions. Its query, or in PyTorch
    its vectors, were rotated before: 6 roundings one after the other. The kernels cut the query to whole numbers,
    off by at most 2 UNIT of its largest element: by 2 sqrt(D) <= D / 8 + 8 UNIT of the product.
    """
    return (1.25 * head_dim + rank + 30) * UNIT


def spread_rounding(head_dim: int) -> float:
    """Relative error of the residual term 0.5 s^2 variance, added by the score and subtracted again."""
    return (2 * head_dim + 64) * UNIT


def kept_rounding(tokens: int) -> float:
    """Error of a log-sum-exp over so many tokens given its logits, but for `ADDITION_ROUNDING` of itself.

    A sum of T terms errs by T UNIT of itself in any order, merging splits by less; exp and log as in a page.
    """
    return (2 * tokens + 256) * UNIT


def output_rounding(tokens: int, dtype: torch.dtype) -> float:
    """Error of the output relative to max |v| given its logits and their log-sum-exp.

    Weights and the result are rounded to the values' dtype, by half of eps each (fp16 weights below its
    normal range by 2**-25 instead, which an eighth of eps covers in a split of up to 4096 tokens); the sums
    by T UNIT.
    """
    return 1.25 * torch.finfo(dtype).eps + kept_rounding(tokens)


def left_rounding(pages: Tensor) -> Tensor:
    """Error of the log-sum-exp of at most so many pages' upper ends, but for `ADDITION_ROUNDING` of itself.

    Chunks of 64 pages, then tiles of 128 chunks one after the other, each with three roundings.
    """
    return (pages / 64 + 512) * UNIT


def size_factors(fmt: SummaryFormat, head_dim: int) -> tuple[float, float]:
    """(a, b): the sizes of a record's parts are at most a mean_scale + b (sum of vector scales) together.

    The sizes are |mean| + max over t of sum_r |coef[t, r]| |basis[r]|: no code exceeds `code_max`, and no
    vector sqrt(D) times its largest entry. With the residual norm they bound every |k_t| of the page.
    """
    root = head_dim**0.5
    return root * code_max(fmt.mean_bits), root * code_max(fmt.basis_bits) * code_max(fmt.coef_bits)


def odds(coverage: float) -> float:
    """Kept mass over what is left at a coverage c: c / (1 - c), with room for sums of up to 4096 terms."""
    return coverage / (1 - coverage) * (1 + 4 * MAX_COVER_PAGES * UNIT)


def always_pages(
    seq_lens: Tensor, page: int, max_pages: int, window_pages: int, num_kv_heads: int
) -> PageList:
    """The first page and the newest `window_pages` of every row: page_ids [B, Hkv, 1 + window], counts."""
    n = num_pages(seq_lens, page).clamp(max=max_pages)[:, None]
    slot = torch.arange(window_pages + 1, dtype=torch.int32, device=seq_lens.device)
    # Slot 0 is page 0, slot j page n - window_pages + j - 1; a short row lists all of its pages.
    ids = torch.where(slot == 0, 0, slot - 1 + (n - window_pages).clamp(min=1))
    ids = torch.where(ids < n, ids, -1).to(torch.int32)
    counts = n.clamp(max=window_pages + 1).to(torch.int32)
    shape = (len(seq_lens), num_kv_heads)
    return PageList(ids[:, None].expand(*shape, -1).contiguous(), counts.expand(shape).contiguous())
