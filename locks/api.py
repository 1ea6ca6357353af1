"""The public operations: arguments are checked here, once, and the work goes to `impl="triton"` or `impl="torch"`.

Axes: B sequences, Hq query heads, Hkv key/value heads, D and Dv widths, P tokens a page, N pages, M pages kept.
Every operation works on a paged cache: `k_cache [num_blocks, Hkv, block, D]`, `v_cache [num_blocks, Hkv, block, Dv]`,
`block_table [B, max_blocks]` int32, `seq_lens [B]` int32; a block is a multiple of the page. A row of length 0 is
allowed everywhere: it has no pages, its output is 0 and its lse -inf. Beside queries a table may have B / q_len rows:
then q_len rows of `q` and `seq_lens`, one behind the other, are one sequence's, the tokens of a speculative step, each
with its own length. Nothing waits for the device unless `debug=True`, which checks the values of lengths, block ids and
page ids too. Without it a length above the table's room counts as the room; a block outside the cache is undefined.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from types import ModuleType

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from locks import checks
from locks.certificate import MAX_COVER_PAGES
from locks.format import SummaryFormat
from locks.pages import budget_pages
from locks.types import Attended, Certificate, Decoded, PageList, PageMass

IMPLS = ("triton", "torch")


def resolve_impl(impl: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation that will run: Triton on a GPU, PyTorch elsewhere, unless one is asked for.

    Raises:
        ValueError: an unknown name, or Triton where it cannot run.
    """
    if impl is None:
        return "triton" if device.type == "cuda" else "torch"
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS} or None, got {impl!r}")
    if impl == "triton" and device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"impl: 'triton' needs a CUDA device or TRITON_INTERPRET=1, got tensors on {device}"
            )
        if dtype == torch.bfloat16:
            raise ValueError(
                "impl: Triton's interpreter computes no bfloat16; use float16, float32 or impl='torch'"
            )
    return impl


def load_impl(impl: str) -> ModuleType:
    """The module that implements every stage: `locks.triton_impl` or `locks.torch_impl`."""
    return importlib.import_module(f"locks.{impl}_impl")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels launch on the current device: make the tensors' device the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _table(block_table: Tensor, seq_lens: Tensor, dims: dict[str, int], device: torch.device) -> None:
    checks.tensor("block_table", block_table, ("B", "max_blocks"), dims, dtypes=[torch.int32], device=device)
    checks.tensor("seq_lens", seq_lens, ("B",), dims, dtypes=[torch.int32], device=device)


def _query_table(block_table: Tensor, seq_lens: Tensor, dims: dict[str, int], device: torch.device) -> None:
    """Checks a table whose rows may each serve several query rows."""
    axes = ("B / q_len", "max_blocks")
    checks.tensor("block_table", block_table, axes, dims, dtypes=[torch.int32], device=device)
    checks.tensor("seq_lens", seq_lens, ("B",), dims, dtypes=[torch.int32], device=device)
    rows, sequences = dims["B"], dims["B / q_len"]
    if rows != sequences and (sequences == 0 or rows % sequences):
        want, got = ([x, dims["max_blocks"]] for x in (rows, sequences))
        raise ValueError(f"block_table: expected int32 whose rows divide those of {want}, got int32 {got}")


def row_table(block_table: Tensor, rows: int) -> Tensor:
    """A table with a row for every query row."""
    sequences = block_table.shape[0]
    return block_table if rows == sequences else block_table.repeat_interleave(rows // sequences, 0)


def _records(records: Tensor, fmt: SummaryFormat, dims: dict[str, int], device: torch.device) -> None:
    axes = ("num_blocks", "Hkv", "block / P", fmt.layout(dims["D"]).nbytes)
    checks.tensor("records", records, axes, dims, dtypes=[torch.uint8], device=device)
    if records.data_ptr() % 16 or any(s % 2 for s in records.stride()[:-1]):
        raise ValueError(
            f"records: expected storage aligned to 16 bytes and even strides, got strides {records.stride()}"
        )


def allocate_records(k_cache: Tensor, fmt: SummaryFormat) -> UInt8[Tensor, "num_blocks Hkv pages bytes"]:
    """Zeroed records for every page of a key cache, [num_blocks, Hkv, block / P, record bytes] uint8."""
    checks.summary_format(fmt)
    dims: dict[str, int] = {}
    checks.tensor("k_cache", k_cache, ("num_blocks", "Hkv", "block", "D"), dims, dtypes=checks.FLOATS)
    checks.head_dim("k_cache", dims["D"])
    checks.block(dims, fmt.page)
    shape = (dims["num_blocks"], dims["Hkv"], dims["block"] // fmt.page, fmt.layout(dims["D"]).nbytes)
    return torch.zeros(shape, dtype=torch.uint8, device=k_cache.device)


def summarize(
    k_cache: Float[Tensor, "num_blocks Hkv block D"],
    block_table: Int32[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, " B"],
    fmt: SummaryFormat,
    *,
    start: Int32[Tensor, " B"] | None = None,
    max_new_pages: int | None = None,
    out: UInt8[Tensor, "num_blocks Hkv pages bytes"] | None = None,
    impl: str | None = None,
    debug: bool = False,
) -> UInt8[Tensor, "num_blocks Hkv pages bytes"]:
    """Returns the records of every page whose last slot lies in [start, seq_len) of its row.

    A page with a nan or inf in a key gets a marked record: it ranks first when pages are selected.

    Args:
        k_cache: [num_blocks, Hkv, block, D] bf16, fp16 or fp32, keys after their position encoding.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32, tokens of each row.
        fmt: page size, rank and bits.
        start: [B] int32, tokens that were summarised before; None for 0.
        max_new_pages: an upper bound on the pages a row gains, known on the host (1 while decoding); None for no bound.
        out: [num_blocks, Hkv, block / P, record bytes] uint8 to write into; other pages' records stay as they are.
            None allocates zeros.
        impl: "triton", "torch" or None (Triton on a GPU).
        debug: check values on the device too.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.

    Source: LOCKS (arXiv 2607.24555), page-local spectral summaries; here the mean is kept apart and the P x P Gram
    matrix's symmetric eigenproblem is solved exactly.
    """
    checks.summary_format(fmt)
    dims: dict[str, int] = {}
    checks.tensor("k_cache", k_cache, ("num_blocks", "Hkv", "block", "D"), dims, dtypes=checks.FLOATS)
    device = k_cache.device
    checks.head_dim("k_cache", dims["D"])
    checks.block(dims, fmt.page)
    _table(block_table, seq_lens, dims, device)
    if start is not None:
        checks.tensor("start", start, ("B",), dims, dtypes=[torch.int32], device=device)
    if max_new_pages is not None and (type(max_new_pages) is not int or max_new_pages < 1):
        raise ValueError(f"max_new_pages: expected at least 1 or None, got {max_new_pages!r}")
    if out is None:
        out = allocate_records(k_cache, fmt)
    dims["block / P"] = dims["block"] // fmt.page
    _records(out, fmt, dims, device)
    if debug:
        checks.table_values(block_table, seq_lens, dims["num_blocks"], dims["block"])
    impl = resolve_impl(impl, device, k_cache.dtype)
    if dims["B"] == 0 or dims["max_blocks"] == 0:
        return out
    with on_device(device):
        return load_impl(impl).summarize(
            k_cache, block_table, seq_lens, fmt, start=start, max_new_pages=max_new_pages, out=out
        )


def _query(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    debug: bool,
) -> dict[str, int]:
    """Checks what page_logits and page_mass share."""
    checks.summary_format(fmt)
    dims: dict[str, int] = {}
    checks.tensor("q", q, ("B", "Hq", "D"), dims, dtypes=checks.FLOATS)
    checks.head_dim("q", dims["D"])
    _query_table(block_table, seq_lens, dims, q.device)
    _records(records, fmt, dims, q.device)
    checks.groups(dims)
    if debug:
        table = row_table(block_table, dims["B"])
        checks.table_values(table, seq_lens, dims["num_blocks"], dims["block / P"] * fmt.page)
    return dims


def page_logits(
    q: Float[Tensor, "B Hq D"],
    records: UInt8[Tensor, "num_blocks Hkv pages bytes"],
    block_table: Int32[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, " B"],
    fmt: SummaryFormat,
    *,
    scale: float | None = None,
    impl: str | None = None,
    debug: bool = False,
) -> Float[Tensor, "B Hq N P"]:
    """Returns scale * q . k^_t for every token of every scored page, reconstructed from the records.

    For analysis: the decode path never stores logits.

    Args:
        q: [B, Hq, D], queries after their position encoding.
        records: [num_blocks, Hkv, block / P, record bytes] uint8.
        block_table: [B, max_blocks] int32, or with one row for every q_len of q's.
        seq_lens: [B] int32.
        fmt: the records' format.
        scale: of the logits; None for D ** -0.5.
        impl: "triton", "torch" or None (Triton on a GPU).
        debug: check values on the device too.

    Returns:
        [B, Hq, N, P] float32, N the pages that the table can hold; -inf for the newest page and behind it.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.
    """
    dims = _query(q, records, block_table, seq_lens, fmt, debug)
    checks.scale(scale)
    impl = resolve_impl(impl, q.device, q.dtype)
    if dims["B"] == 0 or dims["max_blocks"] == 0:
        pages = dims["max_blocks"] * dims["block / P"]
        return q.new_empty((dims["B"], dims["Hq"], pages, fmt.page), dtype=torch.float32)
    with on_device(q.device):
        return load_impl(impl).page_logits(
            q,
            records,
            row_table(block_table, dims["B"]),
            seq_lens,
            fmt,
            scale=dims["D"] ** -0.5 if scale is None else scale,
        )


def page_mass(
    q: Float[Tensor, "B Hq D"],
    records: UInt8[Tensor, "num_blocks Hkv pages bytes"],
    block_table: Int32[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, " B"],
    fmt: SummaryFormat,
    *,
    scale: float | None = None,
    window_pages: int = 1,
    exact: bool = True,
    impl: str | None = None,
    debug: bool = False,
) -> PageMass:
    """Returns log_mass = logsumexp_t(scale * q . k^_t) + 0.5 scale^2 |q|^2 variance of every scored page.

    Args:
        q: [B, Hq, D], queries after their position encoding.
        records: [num_blocks, Hkv, block / P, record bytes] uint8.
        block_table: [B, max_blocks] int32, or with one row for every q_len of q's.
        seq_lens: [B] int32.
        fmt: the records' format.
        scale: of the logits; None for D ** -0.5.
        window_pages: how many of the newest pages are always kept, so do not count in the total.
        exact: float32 arithmetic on every device; False lets a GPU quantise a 16-bit query to 15 bits, and what it
            multiplies to 11, where it has a fast path for the shape (`kernels/score_hopper.py`).
        impl: "triton", "torch" or None (Triton on a GPU).
        debug: check values on the device too.

    Returns:
        PageMass: log_mass [B, Hq, N] and total [B, Hq], float32.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.

    Source: LOCKS (arXiv 2607.24555), log-sum-exp page mass; the residual term (the mean of exp over an isotropic
    normal residual) is ours.
    """
    dims = _query(q, records, block_table, seq_lens, fmt, debug)
    checks.scale(scale)
    checks.window(window_pages)
    impl = resolve_impl(impl, q.device, q.dtype)
    if dims["B"] == 0 or dims["max_blocks"] == 0:
        pages = dims["max_blocks"] * dims["block / P"]
        empty = q.new_empty((dims["B"], dims["Hq"], pages), dtype=torch.float32)
        return PageMass(empty, q.new_full((dims["B"], dims["Hq"]), -torch.inf, dtype=torch.float32))
    with on_device(q.device):
        return load_impl(impl).page_mass(
            q,
            records,
            block_table if impl == "triton" else row_table(block_table, dims["B"]),
            seq_lens,
            fmt,
            scale=dims["D"] ** -0.5 if scale is None else scale,
            window_pages=window_pages,
            exact=exact,
        )


def page_share(mass: PageMass, num_kv_heads: int, *, impl: str | None = None) -> Float[Tensor, "B Hkv N"]:
    """Returns sum over a group's heads of exp(log_mass_g - total_g): the share of each head's estimated mass.

    Args:
        mass: log_mass [B, Hq, N] and total [B, Hq], float32.
        num_kv_heads: Hkv; Hq must be a multiple of it.
        impl: "triton", "torch" or None (Triton on a GPU).

    Returns:
        [B, Hkv, N] float32, +inf for a page with a non-finite key.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.
    """
    checks.result("mass", mass, PageMass)
    checks.kv_heads(num_kv_heads)
    dims: dict[str, int] = {"Hkv": num_kv_heads}
    checks.tensor("log_mass", mass.log_mass, ("B", "Hq", "N"), dims, dtypes=[torch.float32])
    checks.tensor("total", mass.total, ("B", "Hq"), dims, dtypes=[torch.float32], device=mass.log_mass.device)
    checks.groups(dims)
    impl = resolve_impl(impl, mass.log_mass.device, torch.float32)
    if dims["B"] == 0 or dims["N"] == 0:
        return mass.total.new_empty((dims["B"], dims["Hkv"], dims["N"]))
    with on_device(mass.log_mass.device):
        return load_impl(impl).page_share(mass, num_kv_heads)


def select_pages(
    share: Float[Tensor, "B Hkv N"],
    seq_lens: Int32[Tensor, " B"],
    *,
    page: int,
    budget: int,
    window_pages: int = 1,
    impl: str | None = None,
) -> PageList:
    """Returns the M = budget / P pages of every KV head: first, newest, and the candidates of greatest share.

    Ties go to the lower page. A row of at most M pages keeps them all.

    Args:
        share: [B, Hkv, N] float32, not negative (see `page_share`); only the candidates' are read.
        seq_lens: [B] int32.
        page: P, tokens.
        budget: tokens a KV head attends to, a multiple of P, always kept pages included.
        window_pages: how many of the newest pages are always kept.
        impl: "triton", "torch" or None (Triton on a GPU).

    Returns:
        PageList: page_ids [B, Hkv, M] int32, ascending, -1 behind the last; counts [B, Hkv] int32.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name; a budget below
            the first page, the newest and one candidate.
    """
    dims: dict[str, int] = {}
    checks.tensor("share", share, ("B", "Hkv", "N"), dims, dtypes=[torch.float32])
    checks.tensor("seq_lens", seq_lens, ("B",), dims, dtypes=[torch.int32], device=share.device)
    checks.page(page)
    checks.window(window_pages)
    m = budget_pages(budget, page, window_pages)
    impl = resolve_impl(impl, share.device, torch.float32)
    if dims["B"] == 0 or dims["Hkv"] == 0:
        ids = seq_lens.new_full((dims["B"], dims["Hkv"], m), -1)
        return PageList(ids, seq_lens.new_zeros((dims["B"], dims["Hkv"])))
    with on_device(share.device):
        return load_impl(impl).select_pages(
            share, seq_lens, page=page, budget=budget, window_pages=window_pages
        )


def _cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, page: int
) -> dict[str, int]:
    """Checks what sparse_attention and decode share."""
    dims: dict[str, int] = {}
    checks.tensor("q", q, ("B", "Hq", "D"), dims, dtypes=checks.FLOATS)
    cache_dtype = [q.dtype]
    axes = ("num_blocks", "Hkv", "block", "D")
    checks.tensor("k_cache", k_cache, axes, dims, dtypes=cache_dtype, device=q.device)
    axes = ("num_blocks", "Hkv", "block", "Dv")
    checks.tensor("v_cache", v_cache, axes, dims, dtypes=cache_dtype, device=q.device)
    checks.head_dim("q", dims["D"])
    checks.head_dim("v_cache", dims["Dv"])
    checks.block(dims, page)
    checks.groups(dims)
    _query_table(block_table, seq_lens, dims, q.device)
    return dims


def sparse_attention(
    q: Float[Tensor, "B Hq D"],
    k_cache: Float[Tensor, "num_blocks Hkv block D"],
    v_cache: Float[Tensor, "num_blocks Hkv block Dv"],
    block_table: Int32[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, " B"],
    pages: PageList | None,
    *,
    page: int,
    scale: float | None = None,
    impl: str | None = None,
    debug: bool = False,
) -> Attended:
    """Returns softmax(scale * q K^T) V over the tokens of the listed pages, and its log-sum-exp.

    Args:
        q: [B, Hq, D] in the cache's dtype.
        k_cache: [num_blocks, Hkv, block, D].
        v_cache: [num_blocks, Hkv, block, Dv].
        block_table: [B, max_blocks] int32, or with one row for every q_len of q's.
        seq_lens: [B] int32; tokens at and behind it are not read.
        pages: page_ids [B, Hkv, M] int32, counts [B, Hkv] int32; None for all pages of every row.
        page: P, tokens.
        scale: of the logits; None for D ** -0.5.
        impl: "triton", "torch" or None (Triton on a GPU).
        debug: check values on the device too.

    Returns:
        Attended: out [B, Hq, Dv] in q's dtype; lse [B, Hq] float32.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.
    """
    checks.page(page)
    dims = _cache(q, k_cache, v_cache, block_table, seq_lens, page)
    checks.scale(scale)
    if pages is not None:
        checks.result("pages", pages, PageList)
        ids, counts = pages
        checks.tensor("page_ids", ids, ("B", "Hkv", "M"), dims, dtypes=[torch.int32], device=q.device)
        checks.tensor("counts", counts, ("B", "Hkv"), dims, dtypes=[torch.int32], device=q.device)
    if debug:
        table = row_table(block_table, dims["B"])
        checks.table_values(table, seq_lens, dims["num_blocks"], dims["block"])
        if pages is not None:
            checks.page_list_values(*pages, seq_lens, page)
    impl = resolve_impl(impl, q.device, q.dtype)
    if dims["B"] == 0 or dims["max_blocks"] == 0:
        lse = q.new_full((dims["B"], dims["Hq"]), -torch.inf, dtype=torch.float32)
        return Attended(q.new_zeros((dims["B"], dims["Hq"], dims["Dv"])), lse)
    with on_device(q.device):
        return load_impl(impl).sparse_attention(
            q,
            k_cache,
            v_cache,
            block_table if impl == "triton" else row_table(block_table, dims["B"]),
            seq_lens,
            pages,
            page=page,
            scale=dims["D"] ** -0.5 if scale is None else scale,
        )


def _coverage(coverage: object, coverage_certified: object, budget: int, fmt: SummaryFormat) -> float | None:
    """The share of the mass to reach, None for a plain budget."""
    if coverage is not None and coverage_certified is not None:
        raise ValueError(
            f"coverage_certified: expected None beside coverage = {coverage!r}, got {coverage_certified!r}"
        )
    wanted = None
    for name, value in (("coverage", coverage), ("coverage_certified", coverage_certified)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a share of the mass (float) or None, got {value!r}")
        if not 0 < value < 1:
            raise ValueError(f"{name}: expected a share between 0 and 1, both excluded, got {value!r}")
        wanted = float(value)
    if wanted is not None and isinstance(budget, int) and budget > MAX_COVER_PAGES * fmt.page:
        raise ValueError(
            f"budget: expected at most {MAX_COVER_PAGES * fmt.page} tokens ({MAX_COVER_PAGES} pages) with a "
            f"coverage, got {budget}"
        )
    return wanted


def decode(
    q: Float[Tensor, "B Hq D"],
    k_cache: Float[Tensor, "num_blocks Hkv block D"],
    v_cache: Float[Tensor, "num_blocks Hkv block Dv"],
    records: UInt8[Tensor, "num_blocks Hkv pages bytes"],
    block_table: Int32[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, " B"],
    fmt: SummaryFormat,
    *,
    budget: int,
    coverage: float | None = None,
    coverage_certified: float | None = None,
    certificate: bool = False,
    scale: float | None = None,
    window_pages: int = 1,
    impl: str | None = None,
    debug: bool = False,
) -> Decoded:
    """Returns the output of one decode step: score every page's record, select M pages, attend to them.

    With a coverage the budget is a cap: of the M pages a KV head keeps, by share, only as many as it takes for
    every head of its group to have that share of its attention mass in them. The first page and the newest are
    always kept and count with their exact mass, the others as estimated, or, for `coverage_certified`, with what
    is certain of them. Where M pages do not reach it, they are the ones a plain budget keeps. A certificate says
    what share is certain for the pages that were attended to, whichever way they were chosen.

    The new token's key and value are in the cache and counted in `seq_lens`. Every page but the newest has a record;
    call `summarize(..., start=seq_lens - 1, max_new_pages=1, out=records)` after the write to keep that true. Where a
    sequence has several tokens in the step, the pages that they fill are summarised before, too.
    If the budget covers the context, the output is dense attention's.

    Args:
        q: [B, Hq, D] in the cache's dtype, after its position encoding.
        k_cache: [num_blocks, Hkv, block, D].
        v_cache: [num_blocks, Hkv, block, Dv].
        records: [num_blocks, Hkv, block / P, record bytes] uint8.
        block_table: [B, max_blocks] int32, or with one row for every q_len of q's.
        seq_lens: [B] int32, the new token included.
        fmt: the records' format.
        budget: tokens a KV head attends to, a multiple of P, first and newest page included.
        coverage: share of the estimated mass to reach, between 0 and 1; None for the whole budget.
        coverage_certified: share of the mass that is certain to be reached; not beside `coverage`.
        certificate: whether to certify the step; no unread key or value is read for it.
        scale: of the logits; None for D ** -0.5.
        window_pages: how many of the newest pages are always kept.
        impl: "triton", "torch" or None (Triton on a GPU).
        debug: check values on the device too.

    Returns:
        Decoded: out [B, Hq, Dv] in q's dtype, lse [B, Hq] float32 over the attended pages, pages, and with
        `certificate` the Certificate: share and output_error [B, Hkv] float32.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.

    Source: `certificate` in proofs/output.v; the roundings are bounded in `locks.certificate`.
    """
    checks.summary_format(fmt)
    dims = _cache(q, k_cache, v_cache, block_table, seq_lens, fmt.page)
    dims["block / P"] = dims["block"] // fmt.page
    _records(records, fmt, dims, q.device)
    wanted = _coverage(coverage, coverage_certified, budget, fmt)
    checks.scale(scale)
    checks.window(window_pages)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    impl = resolve_impl(impl, q.device, q.dtype)
    if wanted is not None or certificate or impl == "torch":
        block_table = row_table(block_table, dims["B"])
    work, heads = load_impl(impl), k_cache.shape[1]
    some = q.shape[0] > 0 and block_table.shape[1] > 0
    chosen = {"budget": budget, "window_pages": window_pages}
    room = block_table.shape[1] * dims["block / P"]
    if some and wanted is None and not certificate and not debug:
        with on_device(q.device):
            # No row can be longer than the budget: there is nothing to choose.
            if room <= budget_pages(budget, fmt.page, window_pages):
                pages = work.every_page(seq_lens, heads, room=room, page=fmt.page, **chosen)
            else:
                pages = work.choose_pages(q, records, block_table, seq_lens, fmt, scale=scale, **chosen)
        return Decoded(
            *sparse_attention(
                q, k_cache, v_cache, block_table, seq_lens, pages, page=fmt.page, scale=scale, impl=impl
            ),
            pages,
        )
    mass = page_mass(
        q,
        records,
        block_table,
        seq_lens,
        fmt,
        scale=scale,
        window_pages=window_pages,
        # What is certified rests on the rounding of float32.
        exact=certificate or coverage_certified is not None,
        impl=impl,
        debug=debug,
    )
    share = page_share(mass, heads, impl=impl)
    pages = select_pages(share, seq_lens, page=fmt.page, impl=impl, **chosen)
    if wanted is not None and some:
        with on_device(q.device):
            pages = work.cover_pages(
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
            )
    out, lse = sparse_attention(
        q, k_cache, v_cache, block_table, seq_lens, pages, page=fmt.page, scale=scale, impl=impl
    )
    if not certificate:
        return Decoded(out, lse, pages)
    if not some:
        nothing = lse.new_zeros((q.shape[0], k_cache.shape[1]))
        return Decoded(out, lse, pages, Certificate(1 - nothing, nothing))
    with on_device(q.device):
        proof = work.certify(
            q, k_cache, records, block_table, seq_lens, fmt, mass.log_mass, pages, lse, scale=scale
        )
    return Decoded(out, lse, pages, proof)
