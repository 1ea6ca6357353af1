"""The specification: every stage written for reading, row by row, in float64 by default. Imports no kernel.

Sources: the page-local summary, its log-sum-exp score and the group's sum of shares follow LOCKS (arXiv 2607.24555);
the mean is kept apart from the basis, and a residual term is added to the score, because both keep more at equal bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locks.certificate import always_pages
from locks.format import BF16_MAX, SummaryFormat, encode, unpack
from locks.pages import budget_pages, by_page, candidates, gather_pages, num_pages, scored
from locks.types import Attended, Certificate, Decoded, Factors, PageList, PageMass


def row_tokens(cache: Tensor, block_table: Tensor, seq_lens: Tensor, row: int) -> Tensor:
    """Row's keys or values in order, [Hkv, T, D]."""
    length, block = int(seq_lens[row]), cache.shape[2]
    blocks = block_table[row, : -(-length // block)].long()
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]


def _softmax_over(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits) @ values and logsumexp(logits); 0 and -inf where there is no token."""
    if logits.shape[-1] == 0:
        return values.new_zeros((*logits.shape[:-1], values.shape[-1])), logits.new_full(
            logits.shape[:-1], -math.inf
        )
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Attended:
    """softmax(scale * q K^T) V over every token of the row: out [B, Hq, Dv], lse [B, Hq], in `dtype`."""
    group = q.shape[1] // k_cache.shape[1]
    outs, lses = [], []
    for b in range(q.shape[0]):
        keys = row_tokens(k_cache, block_table, seq_lens, b).to(dtype).repeat_interleave(group, 0)
        values = row_tokens(v_cache, block_table, seq_lens, b).to(dtype).repeat_interleave(group, 0)
        logits = scale * torch.einsum("hd,htd->ht", q[b].to(dtype), keys)
        out, lse = _softmax_over(logits[:, None], values)
        outs.append(out[:, 0])
        lses.append(lse[:, 0])
    return Attended(torch.stack(outs), torch.stack(lses))


def exact_page_mass(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    scale: float,
    window_pages: int = 1,
    dtype: torch.dtype = torch.float64,
) -> PageMass:
    """log of the attention mass of every scored page, from its keys: what the oracle ranks by."""
    group, max_pages = q.shape[1] // k_cache.shape[1], block_table.shape[1] * k_cache.shape[2] // page
    log_mass = torch.full((q.shape[0], q.shape[1], max_pages), -math.inf, dtype=dtype, device=q.device)
    for b in range(q.shape[0]):
        keys = row_tokens(k_cache, block_table, seq_lens, b).to(dtype).repeat_interleave(group, 0)
        n = max(0, min(-(-int(seq_lens[b]) // page), max_pages) - 1)
        logits = scale * torch.einsum("hd,htd->ht", q[b].to(dtype), keys[:, : n * page])
        log_mass[b, :, :n] = logits.unflatten(-1, (n, page)).logsumexp(-1) if n else log_mass[b, :, :0]
    # A page with a non-finite key ranks first whatever its logits are.
    bad = ~gather_pages(
        by_page(k_cache, page).isfinite().all(-1).all(-1), block_table, _all_pages(q, max_pages)
    )
    bad = bad.repeat_interleave(group, 1) & scored(seq_lens, page, max_pages)[:, None]
    log_mass = torch.where(bad, math.inf, log_mass)
    return PageMass(log_mass, total_mass(log_mass, seq_lens, page=page, window_pages=window_pages))


def _all_pages(q: Tensor, max_pages: int) -> Tensor:
    return torch.arange(max_pages, device=q.device).expand(q.shape[0], -1)


def total_mass(log_mass: Tensor, seq_lens: Tensor, *, page: int, window_pages: int) -> Tensor:
    """L_g: log-sum-exp of the finite log-masses of the candidates, [B, Hq]."""
    keep = candidates(seq_lens, page, log_mass.shape[-1], window_pages)[:, None] & log_mass.isfinite()
    return torch.where(keep, log_mass, -math.inf).logsumexp(-1)


def factors(keys: Tensor, rank: int) -> Factors:
    """Mean and the best rank-R approximation of the centred keys of pages [..., P, D], by SVD."""
    mean = keys.mean(-2)
    u, s, vh = torch.linalg.svd(keys - mean[..., None, :], full_matrices=False)
    # Directions below rounding are no directions.
    real = s > s[..., :1] * keys.shape[-1] * torch.finfo(keys.dtype).eps
    basis = torch.where(real[..., :rank, None], vh[..., :rank, :], 0)
    return Factors(mean, basis, u[..., :rank] * s[..., None, :rank])


def summarize_pages(keys: Tensor, fmt: SummaryFormat, dtype: torch.dtype = torch.float64) -> Tensor:
    """Records [..., record bytes] of full pages [..., P, D]."""
    keys = keys.to(dtype)
    finite = keys.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return encode(keys, factors(torch.where(finite, keys, 0), fmt.rank), fmt)


def summarize(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    start: Tensor | None = None,
    out: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Writes into `out` the record of every page whose last slot lies in [start, seq_len) of its row."""
    paged, per_block = by_page(k_cache, fmt.page), k_cache.shape[2] // fmt.page
    for b in range(block_table.shape[0]):
        first = 0 if start is None else int(start[b]) // fmt.page
        for n in range(first, int(seq_lens[b]) // fmt.page):
            block = int(block_table[b, n // per_block])
            out[block, :, n % per_block] = summarize_pages(paged[block, :, n % per_block], fmt, dtype)
    return out


def page_logits(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """scale * (q . mean + sum_r coef[t, r] (q . basis[r])) for every token of every scored page, -inf elsewhere.

    Returns [B, Hq, N, P].
    """
    group, max_pages = q.shape[1] // records.shape[1], block_table.shape[1] * records.shape[2]
    rows = gather_pages(records, block_table, _all_pages(q, max_pages))
    page = unpack(rows.repeat_interleave(group, 1), fmt, q.shape[-1], dtype)
    query = q.to(dtype)
    center = torch.einsum("bhd,bhnd->bhn", query, page.mean)
    along = torch.einsum("bhd,bhnrd->bhnr", query, page.basis)
    logits = scale * (center[..., None] + torch.einsum("bhnr,bhntr->bhnt", along, page.coef))
    live = scored(seq_lens, fmt.page, max_pages)[:, None, :, None]
    return torch.where(live, logits, -math.inf)


def page_mass(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    scale: float,
    window_pages: int = 1,
    dtype: torch.dtype = torch.float64,
) -> PageMass:
    """Estimated log-mass of every scored page: logsumexp of its logits + 0.5 scale^2 |q|^2 variance."""
    logits = page_logits(q, records, block_table, seq_lens, fmt, scale=scale, dtype=dtype)
    group, max_pages = q.shape[1] // records.shape[1], logits.shape[2]
    rows = gather_pages(records, block_table, _all_pages(q, max_pages)).repeat_interleave(group, 1)
    variance = unpack(rows, fmt, q.shape[-1], dtype).variance
    spread = 0.5 * scale**2 * q.to(dtype).square().sum(-1)[..., None] * variance
    log_mass = logits.logsumexp(-1) + spread
    # An infinite variance marks a page with a non-finite key; a query of zeros must not turn it into nan.
    log_mass = torch.where(variance.isinf(), math.inf, log_mass)
    log_mass = torch.where(scored(seq_lens, fmt.page, max_pages)[:, None], log_mass, -math.inf)
    return PageMass(log_mass, total_mass(log_mass, seq_lens, page=fmt.page, window_pages=window_pages))


def page_share(mass: PageMass, num_kv_heads: int) -> Tensor:
    """sum over the group's heads of exp(S_g - L_g), [B, Hkv, N]; +inf for a page with a non-finite key."""
    shares = (mass.log_mass - mass.total[..., None]).exp()
    # Without a finite candidate L_g is -inf, and nothing but marked pages can have a share.
    shares = torch.where(mass.total[..., None].isinf(), 0, shares)
    shares = torch.where(mass.log_mass == math.inf, math.inf, shares)
    return shares.unflatten(1, (num_kv_heads, -1)).sum(2)


def select_pages(
    share: Tensor, seq_lens: Tensor, *, page: int, budget: int, window_pages: int = 1
) -> PageList:
    """First page, newest `window_pages` and the candidates of greatest share, M in all, ties to the lower page."""
    m = budget_pages(budget, page, window_pages)
    ids = torch.full((*share.shape[:2], m), -1, dtype=torch.int32, device=share.device)
    counts = torch.zeros(share.shape[:2], dtype=torch.int32, device=share.device)
    for b in range(share.shape[0]):
        n = min(int(num_pages(seq_lens, page)[b]), share.shape[2])
        for h in range(share.shape[1]):
            if n <= m:
                kept = list(range(n))
            else:
                score = share[b, h].nan_to_num(nan=math.inf, posinf=math.inf).tolist()
                ranked = sorted(range(1, n - window_pages), key=lambda p: (-score[p], p))
                kept = sorted([0, *ranked[: m - 1 - window_pages], *range(n - window_pages, n)])
            ids[b, h, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
            counts[b, h] = len(kept)
    return PageList(ids, counts)


def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    pages: PageList,
    *,
    page: int,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Attended:
    """softmax(scale * q K^T) V over the tokens of the listed pages."""
    group = q.shape[1] // k_cache.shape[1]
    outs = torch.zeros(*q.shape[:2], v_cache.shape[-1], dtype=dtype, device=q.device)
    lses = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    for b in range(q.shape[0]):
        keys, values = (row_tokens(c, block_table, seq_lens, b).to(dtype) for c in (k_cache, v_cache))
        for h in range(q.shape[1]):
            listed = pages.page_ids[b, h // group, : int(pages.counts[b, h // group])].long()
            tokens = (listed[:, None] * page + torch.arange(page, device=q.device)).flatten()
            tokens = tokens[tokens < int(seq_lens[b])]
            logits = scale * (keys[h // group, tokens] @ q[b, h].to(dtype))
            outs[b, h], lses[b, h] = _softmax_over(logits, values[h // group, tokens])
    return Attended(outs, lses)


def page_interval(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of a page's reconstructed logits -+ |scale| |q| residual norm, [B, Hq, N] each.

    The exact log-mass of a scored page lies between; (-inf, inf) for one that is marked or not scored.
    """
    center = page_logits(q, records, block_table, seq_lens, fmt, scale=scale, dtype=dtype).logsumexp(-1)
    rows = gather_pages(records, block_table, _all_pages(q, center.shape[-1]))
    norm = unpack(rows, fmt, q.shape[-1], dtype).residual_norm.repeat_interleave(
        q.shape[1] // records.shape[1], 1
    )
    width = abs(scale) * q.to(dtype).norm(dim=-1)[..., None] * norm
    # A norm beyond the largest bfloat16 is stored as that.
    known = center.isfinite() & (norm < BF16_MAX)
    return torch.where(known, center - width, -math.inf), torch.where(known, center + width, math.inf)


def certify(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    pages: PageList,
    lse: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Certificate:
    """share = exp(lse) / (exp(lse) + sum over pages not listed of exp(high)), error = 2 (1 - share)."""
    _, high = page_interval(q, records, block_table, seq_lens, fmt, scale=scale, dtype=dtype)
    group = q.shape[1] // records.shape[1]
    share = torch.ones(pages.counts.shape, dtype=dtype, device=q.device)
    for b in range(q.shape[0]):
        n = int(num_pages(seq_lens, fmt.page)[b])
        for h in range(q.shape[1]):
            kept = set(pages.page_ids[b, h // group].tolist())
            left = [p for p in range(n) if p not in kept]
            if left:
                bound = torch.sigmoid(lse[b, h].to(dtype) - high[b, h, left].logsumexp(0)).nan_to_num(nan=0.0)
                share[b, h // group] = torch.minimum(share[b, h // group], bound)
    return Certificate(share, 2 * (1 - share))


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
    dtype: torch.dtype = torch.float64,
) -> PageList:
    """The fewest of `pages`, by share, whose share of every head's mass reaches the coverage; all if none do.

    The first page and the newest are kept and count with their exact mass. The others count with their
    estimates, or, to be certified, with the lower ends of their intervals while every page not kept counts with
    its upper end.
    """
    group, max_pages = q.shape[1] // k_cache.shape[1], share.shape[-1]
    always = always_pages(seq_lens, fmt.page, max_pages, window_pages, k_cache.shape[1])
    exact = sparse_attention(
        q, k_cache, v_cache, block_table, seq_lens, always, page=fmt.page, scale=scale, dtype=dtype
    ).lse
    low, high = mass.log_mass, mass.log_mass
    if certified:
        low, high = page_interval(q, records, block_table, seq_lens, fmt, scale=scale, dtype=dtype)
    ids, counts = torch.full_like(pages.page_ids, -1), torch.zeros_like(pages.counts)
    for b in range(q.shape[0]):
        n = int(num_pages(seq_lens, fmt.page)[b])
        competing = range(1, n - window_pages)
        for h in range(share.shape[1]):
            score = share[b, h].nan_to_num(nan=math.inf, posinf=math.inf).tolist()
            listed = pages.page_ids[b, h, : int(pages.counts[b, h])].tolist()
            ranked = sorted(set(listed) & set(competing), key=lambda p: (-score[p], p))
            kept = [p for p in listed if p not in competing]
            heads = slice(h * group, (h + 1) * group)
            marked = [p for p in competing if score[p] == math.inf]
            for k in range(len(ranked) + 1):
                inside = [p for p in ranked[:k] if p not in marked]
                outside = [p for p in competing if p not in ranked[:k] and (certified or p not in marked)]
                have = torch.cat([exact[b, heads, None], low[b, heads][:, inside]], -1).logsumexp(-1)
                nothing = torch.full_like(have, -math.inf)
                lack = high[b, heads][:, outside].logsumexp(-1) if outside else nothing
                reached = have.isfinite() & (torch.sigmoid(have - lack) >= coverage)
                # A marked page's mass is unknown: one that the list has room for is always kept.
                if set(marked) <= set(ranked[:k]) and bool(reached.all()):
                    break
            kept = sorted(kept + ranked[:k])
            ids[b, h, : len(kept)] = torch.tensor(kept, dtype=ids.dtype)
            counts[b, h] = len(kept)
    return PageList(ids, counts)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    budget: int,
    scale: float,
    window_pages: int = 1,
    coverage: float | None = None,
    coverage_certified: float | None = None,
    certificate: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Decoded:
    """The whole step: score, select (up to a coverage where one is given), attend, certify where asked to."""
    mass = page_mass(
        q, records, block_table, seq_lens, fmt, scale=scale, window_pages=window_pages, dtype=dtype
    )
    share = page_share(mass, k_cache.shape[1])
    pages = select_pages(share, seq_lens, page=fmt.page, budget=budget, window_pages=window_pages)
    wanted = coverage if coverage_certified is None else coverage_certified
    if wanted is not None:
        pages = cover_pages(
            q,
            k_cache,
            v_cache,
            records,
            block_table,
            seq_lens,
            fmt,
            mass,
            share,
            pages,
            coverage=wanted,
            certified=coverage_certified is not None,
            scale=scale,
            window_pages=window_pages,
            dtype=dtype,
        )
    out, lse = sparse_attention(
        q, k_cache, v_cache, block_table, seq_lens, pages, page=fmt.page, scale=scale, dtype=dtype
    )
    if not certificate:
        return Decoded(out, lse, pages)
    proof = certify(q, records, block_table, seq_lens, fmt, pages, lse, scale=scale, dtype=dtype)
    return Decoded(out, lse, pages, proof)
