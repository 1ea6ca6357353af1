"""Every stage in plain PyTorch, batched, in float32: `impl="torch"`, for machines without a GPU and for reading."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locks import certificate
from locks.format import BF16_MAX, SummaryFormat, bf16_value, encode, power_of_two, unpack
from locks.pages import budget_pages, by_page, candidates, gather_pages, num_pages, scored
from locks.types import Attended, Certificate, Decoded, Factors, PageList, PageMass


def _pages(block_table: Tensor, per_block: int) -> Tensor:
    """[B, N] ids of all pages that a table can hold."""
    n = block_table.shape[1] * per_block
    return torch.arange(n, device=block_table.device).expand(block_table.shape[0], -1)


def page_factors(keys: Tensor, rank: int) -> Factors:
    """Mean, basis, coefficients of pages [..., P, D] before quantisation, float32; zeros for a page with nan or inf."""
    x = keys.to(torch.float32)
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    x = torch.where(finite, x, 0)
    # Squares of normalised keys cannot overflow.
    unit = power_of_two(x.abs().amax(dim=(-1, -2)))[..., None]
    x = x / unit[..., None]
    mean = x.mean(-2)
    u, s, vh = torch.linalg.svd(x - mean[..., None, :], full_matrices=False)
    real = s > s[..., :1] * keys.shape[-1] * torch.finfo(torch.float32).eps
    basis = torch.where(real[..., :rank, None], vh[..., :rank, :], 0)
    return Factors(mean * unit, basis, u[..., :rank] * s[..., None, :rank] * unit[..., None])


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
    paged, per_block = by_page(k_cache, fmt.page), k_cache.shape[2] // fmt.page
    total = block_table.shape[1] * per_block
    first = torch.zeros_like(seq_lens) if start is None else start // fmt.page
    count = total if max_new_pages is None else min(max_new_pages, total)
    # [B, count]
    pages = first.long()[:, None] + torch.arange(count, device=seq_lens.device)
    live = (pages < (seq_lens // fmt.page)[:, None]) & (pages < total)
    keys = gather_pages(paged, block_table, pages).to(torch.float32)
    fresh = encode(keys, page_factors(keys, fmt.rank), fmt)
    blocks = block_table.long().gather(1, (pages // per_block).clamp(max=block_table.shape[1] - 1))
    b, k = live.nonzero(as_tuple=True)
    out[blocks[b, k], :, pages[b, k] % per_block] = fresh[b, :, k]
    return out


def _grouped(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hkv, G, D] float32."""
    return q.unflatten(1, (num_kv_heads, -1)).to(torch.float32)


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
    logits, _ = _estimate(q, records, block_table, fmt, scale)
    live = scored(seq_lens, fmt.page, logits.shape[2])[:, None, :, None]
    return torch.where(live, logits, -math.inf)


def _estimate(
    q: Tensor, records: Tensor, block_table: Tensor, fmt: SummaryFormat, scale: float
) -> tuple[Tensor, Tensor]:
    """Logits [B, Hq, N, P] and residual terms [B, Hq, N], unmasked."""
    rows = gather_pages(records, block_table, _pages(block_table, records.shape[2]))
    page = unpack(rows, fmt, q.shape[-1])
    query = _grouped(q, records.shape[1]) * scale
    # [B, Hkv, G, N], [B, Hkv, G, N, R], [B, Hkv, G, N, P]
    center = query @ page.mean.transpose(-1, -2)
    along = (query @ page.basis.flatten(2, 3).transpose(-1, -2)).unflatten(-1, (-1, fmt.rank))
    logits = center[..., None] + (along[..., None, :] * page.coef[:, :, None]).sum(-1)
    spread = 0.5 * query.square().sum(-1)[..., None] * page.variance[:, :, None]
    spread = torch.where(page.variance[:, :, None].isinf(), math.inf, spread)
    return logits.flatten(1, 2), spread.flatten(1, 2)


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
    """Estimated log-mass of every scored page and its total over the candidates, exact and whole in any case."""
    logits, spread = _estimate(q, records, block_table, fmt, scale)
    live = scored(seq_lens, fmt.page, logits.shape[2])[:, None]
    # Records that no page owns may hold anything: mask before and after.
    log_mass = torch.where(live, logits.logsumexp(-1) + spread, -math.inf)
    return PageMass(log_mass, total_mass(log_mass, seq_lens, page=fmt.page, window_pages=window_pages))


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
    """True log-mass of every scored page: reads every key. What the exact-LSE oracle ranks by."""
    paged = by_page(k_cache, page)
    keys = gather_pages(paged, block_table, _pages(block_table, paged.shape[2])).to(torch.float32)
    query = _grouped(q, k_cache.shape[1]) * scale
    logits = (query @ keys.flatten(2, 3).transpose(-1, -2)).unflatten(-1, (-1, page))
    bad = ~keys.isfinite().all(-1).all(-1)[:, :, None]
    log_mass = torch.where(bad, math.inf, logits.logsumexp(-1)).flatten(1, 2)
    log_mass = torch.where(scored(seq_lens, page, log_mass.shape[2])[:, None], log_mass, -math.inf)
    return PageMass(log_mass, total_mass(log_mass, seq_lens, page=page, window_pages=window_pages))


def total_mass(log_mass: Tensor, seq_lens: Tensor, *, page: int, window_pages: int) -> Tensor:
    """L_g: log-sum-exp of the finite log-masses of the candidates, [B, Hq]."""
    keep = candidates(seq_lens, page, log_mass.shape[-1], window_pages)[:, None] & log_mass.isfinite()
    return torch.where(keep, log_mass, -math.inf).logsumexp(-1)


def page_share(mass: PageMass, num_kv_heads: int) -> Tensor:
    """sum over the group's heads of exp(S_g - L_g), [B, Hkv, N]; +inf for a page with a non-finite key."""
    share = torch.where(mass.total[..., None].isfinite(), (mass.log_mass - mass.total[..., None]).exp(), 0)
    share = torch.where(mass.log_mass == math.inf, math.inf, share)
    return share.unflatten(1, (num_kv_heads, -1)).sum(2)


def select_pages(share: Tensor, seq_lens: Tensor, *, page: int, budget: int, window_pages: int) -> PageList:
    """First page, newest pages and the candidates of greatest share, ascending, ties to the lower page."""
    m, total = budget_pages(budget, page, window_pages), share.shape[-1]
    n = num_pages(seq_lens, page).clamp(max=total)[:, None]
    ids = torch.arange(total, device=share.device)
    always = ((ids == 0) | (ids >= n - window_pages)) & (ids < n)
    # A row that fits its budget keeps all its pages; nan counts as +inf.
    always = (always | (n <= m)) & (ids < n)
    key = torch.where((ids < n)[:, None], share.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    order = key.sort(dim=-1, descending=True, stable=True).indices
    # Pages that are always kept come first, each part in the order of its keys.
    behind = ~always[:, None].expand(share.shape).gather(2, order)
    order = order.gather(2, behind.to(torch.int8).sort(dim=-1, stable=True).indices)[..., :m]
    counts = n.clamp(max=m)
    kept = torch.arange(order.shape[-1], device=share.device) < counts
    listed = torch.where(kept[:, None], order, total).sort(dim=-1).values
    listed = torch.where(listed < total, listed, -1).to(torch.int32)
    listed = torch.nn.functional.pad(listed, (0, m - listed.shape[-1]), value=-1)
    return PageList(listed, counts.to(torch.int32).expand(share.shape[:2]).contiguous())


def select_from_mass(
    mass: PageMass, seq_lens: Tensor, num_kv_heads: int, *, page: int, budget: int, window_pages: int
) -> PageList:
    """`select_pages` of `page_share`."""
    share = page_share(mass, num_kv_heads)
    return select_pages(share, seq_lens, page=page, budget=budget, window_pages=window_pages)


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
) -> PageList:
    """`select_from_mass` of `page_mass`."""
    mass = page_mass(
        q, records, block_table, seq_lens, fmt, scale=scale, window_pages=window_pages, exact=False
    )
    return select_from_mass(
        mass, seq_lens, records.shape[1], page=fmt.page, budget=budget, window_pages=window_pages
    )


def every_page(
    seq_lens: Tensor, num_kv_heads: int, *, room: int, page: int, budget: int, window_pages: int
) -> PageList:
    """All pages of rows whose table has room for no more than the budget's."""
    share = seq_lens.new_zeros((seq_lens.shape[0], num_kv_heads, room), dtype=torch.float32)
    return select_pages(share, seq_lens, page=page, budget=budget, window_pages=window_pages)


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
    room = block_table.shape[1] * k_cache.shape[2]
    if pages is None:
        every = torch.arange(room // page, dtype=torch.int32, device=q.device)
        size = (len(seq_lens), k_cache.shape[1])
        pages = PageList(every.expand(*size, -1), every.new_full(size, len(every)))
    elif dense_below:
        pages = _or_whole(pages, seq_lens, dense_below, page=page, room=room)
    ids = pages.page_ids
    live = torch.arange(ids.shape[-1], device=ids.device) < pages.counts[..., None]
    keys, values = (
        gather_pages(by_page(cache, page), block_table, ids).to(torch.float32).flatten(2, 3)
        for cache in (k_cache, v_cache)
    )
    slot = ids[..., None] * page + torch.arange(page, device=ids.device)
    # [B, Hkv, 1, M * P]
    live = (live[..., None] & (slot < seq_lens[:, None, None, None])).flatten(2)[:, :, None]
    logits = (_grouped(q, k_cache.shape[1]) * scale) @ torch.where(live.mT, keys, 0).transpose(-1, -2)
    logits = torch.where(live, logits, -math.inf)
    lse = logits.logsumexp(-1)
    # Not exp(logits - lse): an lse of millions has lost the logarithm of the sum.
    weights = torch.where(lse[..., None] == -math.inf, 0, logits.softmax(-1))
    result = (weights @ torch.where(live.mT, values, 0)).flatten(1, 2).to(q.dtype)
    if out is not None:
        result = out.copy_(result)
    return Attended(result, lse.flatten(1, 2))


def _or_whole(pages: PageList, seq_lens: Tensor, dense_below: int, *, page: int, room: int) -> PageList:
    """`pages`, with all of a row's pages where it has fewer than `dense_below` tokens; a table has `room` tokens."""
    whole = (seq_lens < dense_below)[:, None]
    most = max(pages.page_ids.shape[-1], -(-min(dense_below - 1, room) // page))
    index = torch.arange(most, dtype=torch.int32, device=seq_lens.device)
    ids = torch.nn.functional.pad(pages.page_ids, (0, most - pages.page_ids.shape[-1]), value=-1)
    count = num_pages(seq_lens.clamp(max=room), page)[:, None]
    return PageList(torch.where(whole[..., None], index, ids), torch.where(whole, count, pages.counts))


def append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor
) -> None:
    """Writes k [B, Hkv, D] and v [B, Hkv, Dv] to slot seq_lens - 1 of their rows, if the row has such a slot."""
    block = k_cache.shape[2]
    real = (seq_lens > 0) & (seq_lens <= block_table.shape[1] * block)
    token = (seq_lens[real] - 1).long()
    place = block_table[real].long().gather(1, (token // block)[:, None])[:, 0]
    k_cache[place, :, token % block] = k[real]
    v_cache[place, :, token % block] = v[real]


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
) -> Decoded:
    """Score, select, attend."""
    chosen = {"scale": scale, "budget": budget, "window_pages": window_pages}
    pages = choose_pages(q, records, block_table, seq_lens, fmt, **chosen)
    attended = sparse_attention(q, k_cache, v_cache, block_table, seq_lens, pages, page=fmt.page, scale=scale)
    return Decoded(*attended, pages)


def page_interval(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    log_mass: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Ends of an interval that holds the exact log-mass of every scored page, [B, Hq, N] float64 each.

    log_mass [B, Hq, N] is `page_mass`'s; (-inf, inf) for a marked page and one that is not scored.
    """
    variance, norm, size = _numbers(records, block_table, fmt, q.shape[-1])
    weight = _query_weight(q, scale)[..., None]
    group = q.shape[1] // records.shape[1]
    variance, norm, size = (x.repeat_interleave(group, 1) for x in (variance, norm, size))
    spread = 0.5 * weight.square() * variance
    center = log_mass.double() - spread
    width = weight * norm * (1 + certificate.WIDTH_ROUNDING) + certificate.PAGE_ROUNDING
    width = width + certificate.logit_rounding(q.shape[-1], fmt.rank) * weight * size
    width = width + certificate.spread_rounding(q.shape[-1]) * spread
    width = width + certificate.ADDITION_ROUNDING * center.abs()
    known = center.isfinite() & scored(seq_lens, fmt.page, log_mass.shape[-1])[:, None]
    low, high = torch.where(known, center - width, -math.inf), torch.where(known, center + width, math.inf)
    return low, high


def _numbers(
    records: Tensor, block_table: Tensor, fmt: SummaryFormat, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance, residual norm and a bound on the sizes of a key's parts, [B, Hkv, N] float64."""
    at = fmt.layout(head_dim)

    def read(first: int, count: int = 1) -> Tensor:
        codes = records[..., first : first + 2 * count].contiguous().view(torch.int16)
        return gather_pages(
            bf16_value(codes, torch.float64), block_table, _pages(block_table, records.shape[2])
        )

    mean, vectors = certificate.size_factors(fmt, head_dim)
    norm = read(at.residual_norm)[..., 0]
    # A norm beyond the largest bfloat16 is stored as that.
    norm = torch.where(norm >= BF16_MAX, math.inf, norm)
    size = mean * read(at.mean_scale)[..., 0] + vectors * read(at.vector_scales, fmt.rank).sum(-1)
    return read(at.variance)[..., 0], norm, size


def _query_weight(q: Tensor, scale: float) -> Tensor:
    """|scale| |q|, [B, Hq] float64."""
    return abs(scale) * q.double().norm(dim=-1)


def _ends(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """A lower end of lse (nan where it is not finite), an upper end for the pages not listed, lse's rounding.

    [B, Hq] float64 each.
    """
    heads, total = k_cache.shape[1], log_mass.shape[-1]
    group = q.shape[1] // heads
    _, high = page_interval(q, records, block_table, seq_lens, fmt, log_mass, scale=scale)
    ids = pages.page_ids.long()
    live = torch.arange(ids.shape[-1], device=ids.device) < pages.counts[..., None]
    listed = torch.zeros((*ids.shape[:2], total + 1), dtype=torch.bool, device=ids.device)
    listed = listed.scatter(2, torch.where(live, ids, total), True)[..., :total]
    n = num_pages(seq_lens, fmt.page).clamp(max=total)
    exists = torch.arange(total, device=ids.device) < n[:, None]
    left = (exists[:, None] & ~listed).repeat_interleave(group, 1)
    upper = torch.where(left, high, -math.inf).logsumexp(-1)
    upper = upper + certificate.left_rounding(n[:, None]) + certificate.ADDITION_ROUNDING * upper.abs()
    upper = torch.where(left.any(-1), upper, -math.inf)
    # The longest key of the listed pages: of the newest from the keys, of the others from the record.
    _, norm, size = _numbers(records, block_table, fmt, q.shape[-1])
    recorded = listed & scored(seq_lens, fmt.page, total)[:, None]
    longest = torch.where(recorded, norm + size, 0).amax(-1)
    newest = (n - 1).clamp(min=0)[:, None]
    keys = gather_pages(by_page(k_cache, fmt.page), block_table, newest)[:, :, 0].double()
    slot = newest * fmt.page + torch.arange(fmt.page, device=ids.device)
    live = (slot < seq_lens[:, None])[:, None]
    longest = torch.maximum(longest, torch.where(live, keys.norm(dim=-1), 0).amax(-1))
    error = certificate.logit_rounding(q.shape[-1], fmt.rank) * _query_weight(q, scale)
    error = error * longest.repeat_interleave(group, 1)
    error = error + certificate.kept_rounding(ids.shape[-1] * fmt.page)
    error = error + certificate.ADDITION_ROUNDING * lse.abs()
    return torch.where(lse.isfinite(), lse - error, math.nan), upper, error


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
    """The certificate of an attended list: see `locks.certificate`.

    log_mass [B, Hq, N] is `page_mass`'s, lse [B, Hq] `sparse_attention`'s over `pages`, newest page included.
    """
    lse = lse.double()
    args = (q, k_cache, records, block_table, seq_lens, fmt, log_mass)
    low, upper, error = _ends(*args, pages, lse, scale=scale)
    whole = upper == -math.inf
    lost = torch.sigmoid(upper - low)
    lost = torch.where(lost.isnan(), 1, lost)
    tokens = pages.page_ids.shape[-1] * fmt.page
    # Logits that are off by y / 2 move the weights, and so the output, by at most exp(y) - 1 <= y + y^2 for y < 1,
    # and by at most 2.
    moved = (2 * error).clamp(max=1)
    error = 2 * lost + moved + moved.square() + certificate.output_rounding(tokens, q.dtype)
    error = torch.where(error.isnan(), math.inf, error)

    def worst(x: Tensor) -> Tensor:
        return torch.where(whole, 0, x).unflatten(1, (k_cache.shape[1], -1)).amax(2)

    # Rounded outward: a share below 1 stays below 1 in float32.
    share = (1 - worst(lost + 2**-22)).clamp(min=0)
    return Certificate(share.to(torch.float32), (worst(error) * (1 + 2**-22)).to(torch.float32))


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
    """The least of `pages` that reach a coverage: those always kept, the greatest shares; all if none do.

    pages is `select_pages`'s; a marked page in it is kept, whatever is reached.
    """
    heads, total, m = k_cache.shape[1], share.shape[-1], pages.page_ids.shape[-1]
    group = q.shape[1] // heads
    always = certificate.always_pages(seq_lens, fmt.page, total, window_pages, heads)
    attended = sparse_attention(
        q, k_cache, v_cache, block_table, seq_lens, always, page=fmt.page, scale=scale
    )
    lse = attended.lse.double()
    ids = pages.page_ids.long()
    n = num_pages(seq_lens, fmt.page).clamp(max=total)[:, None, None]
    candidate = (ids > 0) & (ids < n - window_pages)
    key = share.gather(2, ids.clamp(min=0)).nan_to_num(nan=math.inf, posinf=math.inf)
    # [B, Hkv, M], ties to the lower page, since ids ascend.
    key, order = torch.where(candidate, key, -1).sort(dim=-1, descending=True, stable=True)
    ranked = ids.gather(2, order).clamp(min=0).repeat_interleave(group, 1)
    useful = ((key >= 0) & (key < math.inf)).repeat_interleave(group, 1)

    def of(x: Tensor) -> Tensor:
        # [B, Hq, M]: a page's log-mass in the order of share.
        return torch.where(useful, x.gather(2, ranked), -math.inf)

    if certified:
        low, high = page_interval(q, records, block_table, seq_lens, fmt, mass.log_mass, scale=scale)
        args = (q, k_cache, records, block_table, seq_lens, fmt, mass.log_mass)
        lse, rest, _ = _ends(*args, pages, lse, scale=scale)
        low, high = of(low), of(high)
    else:
        low = high = of(mass.log_mass.double())
        rest = torch.full_like(lse, -math.inf)
    # An upper end that is not known stays infinite, and what is left with it.
    ends = torch.cat([low, high, rest[..., None], mass.total[..., None]], -1)
    top = torch.maximum(lse, torch.where(ends < math.inf, ends, -math.inf).amax(-1))
    top = torch.where(top == -math.inf, 0, top)[..., None]
    # [B, Hq, M + 1]: what is kept with the k greatest shares, and what is left.
    kept = torch.cat([lse[..., None], low], -1).sub(top).exp().cumsum(-1)
    if certified:
        left = torch.cat([high, rest[..., None]], -1).sub(top).exp().flip(-1).cumsum(-1).flip(-1)
        reached = kept >= certificate.odds(coverage) * left
    else:
        every = (lse[..., None] - top).exp() + (mass.total.double()[..., None] - top).exp()
        reached = kept >= coverage * every
    count = torch.arange(m + 1, device=ids.device)
    enough = reached.unflatten(1, (heads, group)).all(2) & (count >= (key == math.inf).sum(-1, keepdim=True))
    needed = (~enough).to(torch.int32).cumprod(-1).sum(-1, keepdim=True)
    chosen = torch.zeros_like(candidate).scatter(2, order, count[:m] < needed)
    keep = (ids >= 0) & (~candidate | chosen)
    listed = torch.where(keep, ids, total).sort(dim=-1).values
    listed = torch.where(listed < total, listed, -1).to(torch.int32)
    return PageList(listed, keep.sum(-1, dtype=torch.int32))
