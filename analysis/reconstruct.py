"""Keys as a page record, and as a shared basis of the same bytes and bits, gives them back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from spectra import centred, top_basis
from torch import Tensor

from locks import SummaryFormat, api
from locks.baselines import SharedBasis, SharedFactors, fit_shared
from locks.format import bf16_value, code_max, encode, round_up_bf16, unpack_codes
from locks.types import Factors

# Pages at a time: what is made of each is D times a page's size.
CHUNK = 128


class Fitted:
    """Shared bases fitted to pages [Hkv, N, P, D]: of the keys, and of the keys less their page's mean."""

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages
        flat = pages.flatten(1, 2)
        self.mean = flat.mean(1)
        self.basis = top_basis(centred(flat), flat.shape[-1])
        self.less_mean = centred(pages).flatten(1, 2)
        self.within = top_basis(self.less_mean, flat.shape[-1])

    @staticmethod
    def matching_rank(fmt: SummaryFormat, head_dim: int) -> int:
        """Rank of the shared basis whose pages take the bytes of a record."""
        return SharedBasis.matching(fmt, head_dim).rank

    def quantised(self, rank: int, *, page_mean: bool) -> SharedFactors:
        """As `SharedBasis` keeps it."""
        return fit_shared(self.less_mean if page_mean else self.pages.flatten(1, 2), rank)


class Shared(NamedTuple):
    """Reconstructed pages [Hkv, N, P, D], the basis's rank and the bytes a page takes."""

    keys: Tensor
    rank: int
    nbytes: int


def stored_keys(pages: Tensor, factors: Factors, fmt: SummaryFormat) -> Tensor:
    """Pages [Hkv, N, P, D] as their records give them back: the logits of the unit vectors."""
    heads, count, _, width = pages.shape
    unit = torch.eye(width, device=pages.device).repeat(heads, 1)[None]
    parts = []
    for start in range(0, count, CHUNK):
        some = slice(start, start + CHUNK)
        mean, basis, coef = (x[:, some] for x in factors)
        own = Factors(mean, basis[..., : fmt.rank, :], coef[..., : fmt.rank])
        records = encode(pages[:, some], own, fmt)
        # [blocks, Hkv, 1, bytes], and a block behind them: the newest page has no logits.
        records = torch.cat(
            [records.transpose(0, 1)[:, :, None], records.new_zeros(1, heads, 1, records.shape[-1])]
        )
        table = torch.arange(len(records), dtype=torch.int32, device=pages.device)[None]
        length = torch.tensor([(len(records) - 1) * fmt.page + 1], dtype=torch.int32, device=pages.device)
        logits = api.page_logits(unit, records, table, length, fmt, scale=1.0, impl="torch")
        parts.append(logits[0, :, :-1].unflatten(0, (heads, width)).permute(0, 2, 3, 1))
    return torch.cat(parts, 1)


def _mean_codes(pages: Tensor, bits: int) -> tuple[Tensor, int]:
    """Pages' means rounded to codes of one bfloat16 scale, and the bytes they take."""
    mean = pages.mean(-2, keepdim=True)
    scale = round_up_bf16(mean.abs().amax((-1, -2)) / code_max(bits))
    value = bf16_value(scale, torch.float32)[..., None, None]
    return torch.floor(mean / value + 0.5) * value, mean.shape[-1] * bits // 8 + torch.bfloat16.itemsize


def shared_keys(pages: Tensor, fitted: Fitted, fmt: SummaryFormat, *, page_mean: bool) -> Shared:
    """Pages as a shared basis gives them back at the bytes and bits of `fmt`.

    With `page_mean` each page also keeps its mean, in `fmt.mean_bits`, and the rest is for the basis.
    """
    width = pages.shape[-1]
    like = SharedBasis.matching(fmt, width)
    offset: Tensor | float = 0.0
    spent = 0
    if page_mean:
        offset, spent = _mean_codes(pages, fmt.mean_bits)
        left = (fmt.layout(width).nbytes - spent - torch.bfloat16.itemsize) * 8
        rank = min(left // (fmt.coef_bits * fmt.page), width)
        like = SharedBasis(fmt.page, rank, coef_bits=fmt.coef_bits)
    factors = fitted.quantised(like.rank, page_mean=page_mean)
    basis = SharedBasis(fmt.page, like.rank, coef_bits=fmt.coef_bits, factors=factors)
    nbytes = basis.resident_bytes(width, 1) - basis.shared_bytes(width)
    return Shared(decoded(pages - offset, basis) + offset, like.rank, spent + int(nbytes))


def decoded(pages: Tensor, basis: SharedBasis) -> Tensor:
    """Pages [Hkv, N, P, D] as a shared basis with given factors stores them."""
    if basis.factors is None:
        raise ValueError("factors: expected those of a fitted basis, got None")
    cache = pages.transpose(0, 1).contiguous()
    table = torch.arange(len(cache), dtype=torch.int32, device=pages.device)[None]
    length = torch.tensor([len(cache) * basis.page], dtype=torch.int32, device=pages.device)
    state = basis.allocate(cache)
    basis.seal(state, cache, table, length)
    codes, scale = (part[:, :, 0].transpose(0, 1) for part in state.parts)
    coef = unpack_codes(codes, basis.coef_bits).float().unflatten(-1, (basis.page, basis.rank))
    coef = coef * scale.float()[..., None]
    mean, vectors = (x.float()[:, None] for x in basis.factors)
    return mean[:, :, None] + coef @ vectors
