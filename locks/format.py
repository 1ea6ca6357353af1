"""The page record: what one (page, KV head) keeps resident, how large it is and how it is packed.

A record is one contiguous run of bytes, padded to a multiple of 32:

    mean codes | basis codes | coefficient codes | R vector scales, mean scale, variance, residual norm

Mean and basis are kept rotated (`rotate`): post-RoPE keys have a few channels far larger than the rest, and one of
them would set the scale of a whole vector's codes. A score rotates the query instead, once.

Codes are signed integers of 4, 8 or 16 bits. At 4 bits a byte holds two of them: the low nibble an element of the
first half of the axis, the high nibble the element half an axis later (the axis is D for the mean and the basis, P
for the coefficients). The numbers at the end are bfloat16, rounded up, so that no scale is too small for its codes
and no residual is understated; bfloat16 has the range of float32, so no finite key overflows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from locks.types import Factors, Record

PAGES = (16, 32, 64)
RANKS = (1, 2, 4, 8, 16)
BITS = (4, 8, 16)
ALIGNMENT = 32

# Most elements of each half of D that a rotation mixes.
MIXED = 16

# A record's residual norm also covers the float32 rounding of every logit made from it: at most
# D * 2**-24 of |q| |k| on each side of a comparison, D <= 256, and 6 * 2**-24 for the keys' rotation.
ROUNDING = 2.0**-14

# The largest finite bfloat16.
BF16_MAX = 3.3895313892515355e38


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of one record's parts and numbers; `scales` is where the numbers begin, `nbytes` counts padding."""

    mean: int
    basis: int
    coef: int
    scales: int
    vector_scales: int
    mean_scale: int
    variance: int
    residual_norm: int
    nbytes: int


@dataclass(frozen=True)
class SummaryFormat:
    """What a page summary holds: page size in tokens, rank and bits of each part.

    Args:
        page: tokens in a page, P: 16, 32 or 64.
        rank: basis vectors a page, R: 1, 2, 4, 8 or 16, at most P - 1 (a centred page has no higher rank).
        mean_bits: bits of an element of the mean: 4, 8 or 16.
        basis_bits: bits of an element of a basis vector: 4, 8 or 16.
        coef_bits: bits of a coefficient: 4, 8 or 16.

    Raises:
        ValueError: a size that is not supported, with the ones that are.
    """

    page: int = 16
    rank: int = 4
    mean_bits: int = 8
    basis_bits: int = 4
    coef_bits: int = 4

    def __post_init__(self) -> None:
        for name, allowed in (
            ("page", PAGES),
            ("rank", RANKS),
            ("mean_bits", BITS),
            ("basis_bits", BITS),
            ("coef_bits", BITS),
        ):
            value = getattr(self, name)
            if type(value) is not int or value not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")
        if self.rank > self.page - 1:
            raise ValueError(f"rank: expected at most page - 1 = {self.page - 1}, got {self.rank}")

    def layout(self, head_dim: int) -> RecordLayout:
        """Offsets and size of a record for key width D = `head_dim`, in bytes."""
        basis = head_dim * self.mean_bits // 8
        coef = basis + self.rank * head_dim * self.basis_bits // 8
        scales = coef + self.page * self.rank * self.coef_bits // 8
        end = scales + 2 * (3 + self.rank)
        return RecordLayout(
            mean=0,
            basis=basis,
            coef=coef,
            scales=scales,
            vector_scales=scales,
            mean_scale=scales + 2 * self.rank,
            variance=scales + 2 * self.rank + 2,
            residual_norm=scales + 2 * self.rank + 4,
            nbytes=-(-end // ALIGNMENT) * ALIGNMENT,
        )

    def resident_share(self, head_dim: int, value_dim: int | None = None) -> float:
        """Record bytes over the bytes of a page's K and V at 2 bytes an element."""
        kv = 2 * self.page * (head_dim + (head_dim if value_dim is None else value_dim))
        return self.layout(head_dim).nbytes / kv


def code_max(bits: int) -> int:
    """The largest code of a symmetric integer of `bits` bits."""
    return 2 ** (bits - 1) - 1


def round_up_bf16(x: Tensor) -> Tensor:
    """The least bfloat16 not below x >= 0 (at most the largest finite one), as int16 bit patterns."""
    bits = x.to(torch.float32).clamp(max=BF16_MAX).contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16)


def bf16_value(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers whose bfloat16 bit patterns are given as int16."""
    return bits.contiguous().view(torch.bfloat16).to(dtype)


def _round(x: Tensor) -> Tensor:
    """x to the nearest integer, halves up: one rule for every implementation."""
    return torch.floor(x + 0.5)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y > 0, x / torch.where(y > 0, y, 1), 0)


def mixed(head_dim: int) -> int:
    """Elements of each half of D = `head_dim` that a rotation mixes: a power of two that divides D / 2, at most 16."""
    return gcd(head_dim // 2, MIXED)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times an orthogonal symmetric matrix, its own inverse: block-diagonal, normalised Hadamard blocks.

    A block is W consecutive elements of the first half and the W that lie half an axis later, W = `mixed(D)`:
    a pair of halves is what 4-bit codes keep in one byte, so a kernel that packs a block has all of it.
    """
    D, W = x.shape[-1], mixed(x.shape[-1])
    bits = W.bit_length() - 1
    # The half, the block, the bits of an element's place in its half of the block.
    x = x.unflatten(-1, (2, D // (2 * W), *(2,) * bits))
    for axis in (-2 - bits, *range(-bits, 0)):
        a, b = x.unbind(axis)
        x = torch.stack([a + b, a - b], axis)
    return x.flatten(-2 - bits) * (2 * W) ** -0.5


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] as bytes [..., n * bits / 8]."""
    if bits == 4:
        low, high = codes.to(torch.uint8).chunk(2, dim=-1)
        return (low & 15) | (high << 4)
    return codes.to(torch.int8 if bits == 8 else torch.int16).contiguous().view(torch.uint8)


def unpack_codes(data: Tensor, bits: int) -> Tensor:
    """Bytes [..., n * bits / 8] as codes [..., n], int32."""
    if bits == 4:
        signed = data.contiguous().view(torch.int8)
        return torch.cat([(signed << 4) >> 4, signed >> 4], dim=-1).to(torch.int32)
    return data.contiguous().view(torch.int8 if bits == 8 else torch.int16).to(torch.int32)


def power_of_two(x: Tensor) -> Tensor:
    """The power of two below x > 0, kept within 2**-100 .. 2**100: dividing by it is exact."""
    exponent = torch.frexp(x.clamp(2.0**-100, 2.0**100))[1] - 1
    return torch.ldexp(torch.ones_like(x), exponent)


def encode(keys: Tensor, factors: Factors, fmt: SummaryFormat) -> Tensor:
    """Records of pages from their keys and their unquantised factors.

    Everything is rotated first. The basis is quantised next. Coefficients are then fitted one rank after the other to
    what is left of the keys once the mean and the ranks before are dequantised, so a later rank takes up rounding of
    the earlier ones, and what is left at the end is the residual. A page with a non-finite key gets zero codes and an
    infinite variance and norm, which marks it.

    Args:
        keys: [..., P, D] float32 or float64, the pages' keys as they stand in the cache.
        factors: mean [..., D], basis [..., R, D], coef [..., P, R] of those pages; only mean and basis are read.
        fmt: the record's format.

    Returns:
        [..., record bytes] uint8.
    """
    dtype, D = keys.dtype, keys.shape[-1]
    finite = keys.isfinite().all(dim=-1).all(dim=-1)
    clean = torch.where(finite[..., None, None], keys, 0)
    # Squares of normalised keys cannot overflow.
    unit = power_of_two(clean.abs().amax(dim=(-1, -2)))
    x = rotate(clean / unit[..., None, None])
    mean = rotate(torch.where(finite[..., None], factors.mean, 0) / unit[..., None])
    basis = rotate(torch.where(finite[..., None, None], factors.basis, 0))

    def stored(scale: Tensor) -> tuple[Tensor, Tensor]:
        # The bit pattern kept in the record and the value it stands for, in normalised keys.
        bits = round_up_bf16(scale * unit)
        return bits, bf16_value(bits, dtype) / unit

    mean_bits, mean_scale = stored(mean.abs().amax(dim=-1) / code_max(fmt.mean_bits))
    mean_codes = _round(_divide(mean, mean_scale[..., None]))
    residual = x - (mean_codes * mean_scale[..., None])[..., None, :]
    step = basis.abs().amax(dim=-1, keepdim=True) / code_max(fmt.basis_bits)
    basis_codes = _round(_divide(basis, step))
    coef_codes, vector_bits = [], []
    for r in range(fmt.rank):
        u = basis_codes[..., r, :]
        c = _divide((residual * u[..., None, :]).sum(dim=-1), u.square().sum(dim=-1)[..., None])
        bits, scale = stored(c.abs().amax(dim=-1) / code_max(fmt.coef_bits))
        codes = _round(_divide(c, scale[..., None]))
        residual = residual - (codes * scale[..., None])[..., None] * u[..., None, :]
        coef_codes.append(codes)
        vector_bits.append(bits)
    variance = residual.square().mean(dim=(-1, -2)) * unit * unit
    norm = residual.square().sum(dim=-1).sqrt().amax(dim=-1)
    norm = (norm + ROUNDING * x.square().sum(dim=-1).sqrt().amax(dim=-1)) * unit
    inf = torch.tensor(0x7F80, dtype=torch.int16, device=keys.device)
    scales = torch.stack(
        [
            *vector_bits,
            mean_bits,
            torch.where(finite, round_up_bf16(variance), inf),
            torch.where(finite, round_up_bf16(norm), inf),
        ],
        dim=-1,
    )
    # [..., R, P] so that halves of the tokens share a byte; stored as [P or P/2, R].
    coefs = pack_codes(torch.stack(coef_codes, dim=-2), fmt.coef_bits)
    per_token = max(1, fmt.coef_bits // 8)
    coefs = coefs.unflatten(-1, (-1, per_token)).transpose(-3, -2)
    parts = [
        pack_codes(mean_codes, fmt.mean_bits),
        pack_codes(basis_codes, fmt.basis_bits).flatten(-2),
        coefs.flatten(-3),
        scales.view(torch.uint8),
    ]
    used = sum(part.shape[-1] for part in parts)
    pad = keys.new_zeros((*keys.shape[:-2], fmt.layout(D).nbytes - used), dtype=torch.uint8)
    return torch.cat([*parts, pad], dim=-1)


def unpack(records: Tensor, fmt: SummaryFormat, head_dim: int, dtype: torch.dtype = torch.float32) -> Record:
    """The numbers that a record stands for.

    Args:
        records: [..., record bytes] uint8.
        fmt: the record's format.
        head_dim: D.
        dtype: of the result, float32 or float64.

    Returns:
        Record: mean [..., D], basis [..., R, D] (codes, rotated back), coef [..., P, R] (codes times the vector's
        scale), variance [...], residual_norm [...].
    """
    at = fmt.layout(head_dim)
    R = fmt.rank
    numbers = bf16_value(
        records[..., at.scales : at.scales + 2 * (3 + R)].contiguous().view(torch.int16), dtype
    )
    mean = unpack_codes(records[..., at.mean : at.basis], fmt.mean_bits).to(dtype) * numbers[..., R : R + 1]
    basis = unpack_codes(records[..., at.basis : at.coef].unflatten(-1, (R, -1)), fmt.basis_bits).to(dtype)
    per_token = max(1, fmt.coef_bits // 8)
    coefs = records[..., at.coef : at.scales].unflatten(-1, (-1, R, per_token)).transpose(-3, -2).flatten(-2)
    coef = unpack_codes(coefs, fmt.coef_bits).to(dtype).transpose(-1, -2)
    mean, basis = rotate(mean), rotate(basis)
    return Record(mean, basis, coef * numbers[..., None, :R], numbers[..., R + 1], numbers[..., R + 2])
