"""Every stage by a Triton kernel: `impl="triton"`. Launches only; nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from locks.certificate import always_pages
from locks.format import SummaryFormat
from locks.kernels import append as append_op
from locks.kernels import attend as attend_op
from locks.kernels import certify as certify_op
from locks.kernels import cover as cover_op
from locks.kernels import every as every_op
from locks.kernels import exact as exact_op
from locks.kernels import logits as logits_op
from locks.kernels import score as score_op
from locks.kernels import seal as seal_op
from locks.kernels import select as select_op
from locks.kernels import summarize as summarize_op
from locks.pages import budget_pages
from locks.types import Attended, Certificate, Decoded, PageList, PageMass


def summarize(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    start: Tensor | None,
    max_new_pages: int | None,
    out: Tensor,
) -> Tensor:
    """Writes the record of every page whose last slot lies in [start, seq_len) of its row."""
    return summarize_op.summarize(
        k_cache, block_table, seq_lens, fmt, start=start, max_new_pages=max_new_pages, out=out
    )


def page_logits(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    scale: float,
) -> Tensor:
    """Estimated logits of every token of every scored page, [B, Hq, N, P], -inf elsewhere."""
    return logits_op.logits(q, records, block_table, seq_lens, fmt, scale=scale)


def page_mass(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    scale: float,
    window_pages: int,
    exact: bool,
    whole: bool = True,
) -> PageMass:
    """Estimated log-mass of every scored page and its total; unless `whole`, other pages may have any value."""
    return PageMass(
        *score_op.score(
            q,
            records,
            block_table,
            seq_lens,
            fmt,
            scale=scale,
            window_pages=window_pages,
            exact=exact,
            whole=whole,
        )
    )


def exact_page_mass(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    scale: float,
    window_pages: int = 1,
) -> PageMass:
    """True log-mass of every scored page: reads every key once. What the exact-LSE oracle ranks by."""
    return PageMass(
        *exact_op.exact(q, k_cache, block_table, seq_lens, page=page, scale=scale, window_pages=window_pages)
    )


def page_share(mass: PageMass, num_kv_heads: int) -> Tensor:
    """sum over the group's heads of exp(S_g - L_g), [B, Hkv, N]."""
    return select_op.share(mass.log_mass, mass.total, num_kv_heads)


def select_pages(share: Tensor, seq_lens: Tensor, *, page: int, budget: int, window_pages: int) -> PageList:
    """First page, newest pages and the candidates of greatest share, ascending, ties to the lower page."""
    pages = budget_pages(budget, page, window_pages)
    return PageList(*select_op.select(share, seq_lens, page=page, pages=pages, window_pages=window_pages))


def select_from_mass(
    mass: PageMass, seq_lens: Tensor, num_kv_heads: int, *, page: int, budget: int, window_pages: int
) -> PageList:
    """`select_pages` of `page_share`, bit by bit, in two launches."""
    pages = budget_pages(budget, page, window_pages)
    return PageList(
        *select_op.select_from_mass(
            *mass, seq_lens, num_kv_heads, page=page, pages=pages, window_pages=window_pages
        )
    )


def choose_pages(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    scale: float,
    budget: int,
    window_pages: int,
    buffers: StepBuffers | None = None,
) -> PageList:
    """`select_from_mass` of `page_mass`, not exact, bit by bit; with `buffers` nothing is allocated."""
    scored = scoring = selecting = out = None
    if buffers is not None:
        scored, scoring, selecting, out = buffers.scored, buffers.scoring, buffers.selecting, buffers.pages
    log_mass, total = score_op.score(
        q,
        records,
        block_table,
        seq_lens,
        fmt,
        scale=scale,
        window_pages=window_pages,
        exact=False,
        whole=False,
        out=scored,
        work=scoring,
    )
    return PageList(
        *select_op.select_from_mass(
            log_mass,
            total,
            seq_lens,
            records.shape[1],
            page=fmt.page,
            pages=budget_pages(budget, fmt.page, window_pages),
            window_pages=window_pages,
            early=True,
            out=out,
            work=selecting,
        )
    )


def every_page(
    seq_lens: Tensor, num_kv_heads: int, *, room: int, page: int, budget: int, window_pages: int
) -> PageList:
    """All pages of rows whose table has room for no more than the budget's."""
    pages = budget_pages(budget, page, window_pages)
    return PageList(*every_op.every(seq_lens, num_kv_heads, room=room, page=page, pages=pages))


def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    pages: PageList | None,
    *,
    page: int,
    scale: float,
    dense_below: int = 0,
    out: Tensor | None = None,
) -> Attended:
    """softmax(scale * q K^T) V over the tokens of the listed pages, into `out` if it is given.

    Over all tokens of rows of fewer than `dense_below`, and without `pages` of all rows.
    """
    ids, counts = pages or (None, None)
    into = None if out is None else (out, q.new_empty(q.shape[:2], dtype=torch.float32))
    return Attended(
        *attend_op.attend(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            ids,
            counts,
            page=page,
            scale=scale,
            dense_below=dense_below,
            out=into,
        )
    )


def certify(
    q: Tensor,
    k_cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    log_mass: Tensor,
    pages: PageList,
    lse: Tensor,
    *,
    scale: float,
) -> Certificate:
    """The certificate of an attended list: see `locks.certificate`."""
    share, error, _, _ = certify_op.certify(
        q, k_cache, records, block_table, seq_lens, fmt, log_mass, *pages, lse, scale=scale
    )
    return Certificate(share, error)


def cover_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    mass: PageMass,
    share: Tensor,
    pages: PageList,
    *,
    coverage: float,
    certified: bool,
    scale: float,
    window_pages: int,
) -> PageList:
    """The least of `pages` that reach a coverage: those always kept, the greatest shares; all if none do."""
    always = always_pages(seq_lens, fmt.page, share.shape[-1], window_pages, share.shape[1])
    low = sparse_attention(q, k_cache, v_cache, block_table, seq_lens, always, page=fmt.page, scale=scale).lse
    upper = None
    if certified:
        _, _, low, upper = certify_op.certify(
            q, k_cache, records, block_table, seq_lens, fmt, mass.log_mass, *pages, low, scale=scale
        )
    listed = cover_op.cover(
        q,
        records,
        block_table,
        seq_lens,
        fmt,
        share,
        mass.log_mass,
        mass.total,
        *pages,
        low,
        upper,
        coverage=coverage,
        scale=scale,
        window_pages=window_pages,
    )
    return PageList(*listed)


append = append_op.append
layer_pointers = seal_op.layer_pointers
seal = seal_op.seal


class StepBuffers(NamedTuple):
    """Everything that a decode step writes: one set, at fixed addresses, is enough for all layers.

    scored, scoring and selecting are None where the table has no more pages than the budget.
    """

    scored: PageMass | None
    scoring: score_op.Workspace | None
    selecting: select_op.Workspace | None
    pages: PageList
    attending: attend_op.Workspace
    attended: Attended


def step_buffers(
    q: Tensor,
    v_cache: Tensor,
    records: Tensor,
    max_blocks: int,
    fmt: SummaryFormat,
    *,
    budget: int,
    window_pages: int,
) -> StepBuffers:
    """Buffers for steps of queries like q [B, Hq, D] over tables of max_blocks blocks."""
    (B, Hq, D), device = q.shape, q.device
    Hkv, Dv = records.shape[1], v_cache.shape[3]
    M, N = budget_pages(budget, fmt.page, window_pages), max_blocks * records.shape[2]
    scored = scoring = selecting = None
    config = attend_op.default_config(fmt.page, max(D, Dv), device)
    plan = attend_op.default_plan(M, 0, page=fmt.page, head_dim=max(D, Dv), num_kv_heads=Hkv, config=config)
    if N > M:
        scored = PageMass(
            torch.empty((B, Hq, N), dtype=torch.float32, device=device),
            torch.empty((B, Hq), dtype=torch.float32, device=device),
        )
        scoring = score_op.workspace(q, records, N, fmt, exact=False)
        selecting = select_op.workspace(B, Hkv, N, M, device)
    return StepBuffers(
        scored,
        scoring,
        selecting,
        PageList(
            torch.empty((B, Hkv, M), dtype=torch.int32, device=device),
            torch.empty((B, Hkv), dtype=torch.int32, device=device),
        ),
        attend_op.workspace(B, Hq, plan.splits, Dv, device),
        Attended(
            torch.empty((B, Hq, Dv), dtype=q.dtype, device=device),
            torch.empty((B, Hq), dtype=torch.float32, device=device),
        ),
    )


def decode_step(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    budget: int,
    window_pages: int,
    scale: float,
    buffers: StepBuffers,
) -> Decoded:
    """Score, select, attend, all into `buffers`: nothing is allocated."""
    if buffers.scored is None:
        room, pages = block_table.shape[1] * records.shape[2], budget_pages(budget, fmt.page, window_pages)
        every_op.every(seq_lens, records.shape[1], room=room, page=fmt.page, pages=pages, out=buffers.pages)
    else:
        choose_pages(
            q,
            records,
            block_table,
            seq_lens,
            fmt,
            scale=scale,
            budget=budget,
            window_pages=window_pages,
            buffers=buffers,
        )
    attend_op.attend(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        *buffers.pages,
        page=fmt.page,
        scale=scale,
        out=buffers.attended,
        work=buffers.attending,
    )
    return Decoded(*buffers.attended, buffers.pages)
