"""Estimators of rank, energy and angles, in plain PyTorch over any leading axes."""

from __future__ import annotations

import torch
from torch import Tensor

from locks.types import Factors


def paged(keys: Tensor, page: int) -> Tensor:
    """Keys [..., T, D] as full pages [..., N, P, D]; what does not fill a page is left out."""
    count = keys.shape[-2] // page
    return keys[..., : count * page, :].unflatten(-2, (count, page))


def centred(x: Tensor) -> Tensor:
    """Rows [..., n, D] less their mean."""
    return x - x.mean(-2, keepdim=True)


def energies(x: Tensor) -> Tensor:
    """Squared singular values of rows [..., n, D], largest first, [..., min(n, D)]."""
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0)


def entropy_rank(energy: Tensor) -> Tensor:
    """exp of the entropy of the energies as shares: R equal ones give R."""
    share = energy / energy.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def stable_rank(energy: Tensor) -> Tensor:
    """All energy over the largest."""
    return energy.sum(-1) / energy[..., 0]


def dimensions(energy: Tensor, share: float) -> Tensor:
    """How many of the largest hold that share of the energy."""
    # Rounding must not ask for one more.
    reached = energy.cumsum(-1) >= (share - 1e-9) * energy.sum(-1, keepdim=True)
    return energy.shape[-1] - reached.sum(-1) + 1


MEASURES = {
    "entropy_rank": entropy_rank,
    "stable_rank": stable_rank,
    "dims_90": lambda energy: dimensions(energy, 0.90),
    "dims_95": lambda energy: dimensions(energy, 0.95),
    "dims_99": lambda energy: dimensions(energy, 0.99),
}


def top_basis(x: Tensor, rank: int) -> Tensor:
    """The first right singular vectors of rows [..., n, D], [..., R, D]; zeros where there is no such direction."""
    if x.shape[-2] >= x.shape[-1]:
        return torch.linalg.eigh(x.mT @ x)[1].mT.flip(-2)[..., :rank, :]
    energy, left = torch.linalg.eigh(x @ x.mT)
    energy, left = energy.flip(-1)[..., :rank], left.mT.flip(-2)[..., :rank, :]
    # Directions below rounding are no directions.
    real = energy > energy[..., :1] * x.shape[-1] * torch.finfo(x.dtype).eps
    length = torch.where(real, energy, 1).sqrt()[..., None]
    return torch.where(real[..., None], left @ x / length, 0)


def page_factors(keys: Tensor, rank: int, *, centre: bool = True) -> Factors:
    """Mean, basis and coefficients of pages [..., P, D]: the exact eigenproblem of the P x P Gram matrix."""
    mean = keys.mean(-2) if centre else torch.zeros_like(keys[..., 0, :])
    x = keys - mean[..., None, :]
    basis = top_basis(x, rank)
    return Factors(mean, basis, x @ basis.mT)


def iterated_factors(keys: Tensor, rank: int, steps: int, generator: torch.Generator) -> Factors:
    """The same with the basis of `steps` subspace iterations from a random start."""
    mean = keys.mean(-2)
    x = keys - mean[..., None, :]
    basis = torch.randn((*x.shape[:-2], x.shape[-1], rank), generator=generator).to(x)
    for _ in range(steps):
        # A GPU takes small QR problems one by one.
        basis = torch.linalg.qr((x.mT @ (x @ basis)).cpu()).Q.to(x)
    # Rotated so that the vectors come in the order of their energy, as the exact ones do.
    within = top_basis(x @ basis, rank)
    basis = within @ basis.mT
    return Factors(mean, basis, x @ basis.mT)


def project(x: Tensor, basis: Tensor) -> Tensor:
    """Rows [..., n, D] projected onto an orthonormal basis [..., R, D]."""
    return (x @ basis.mT) @ basis


def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles between the spans of orthonormal bases [..., R, D] and [..., S, D], smallest first, radians.

    What `scipy.linalg.subspace_angles` returns, reversed, for many pairs at once: from the cosines where those
    are small and from the sines where the cosines are near 1.
    """
    if a.shape[-2] < b.shape[-2]:
        a, b = b, a
    product = a @ b.mT
    cosine = torch.linalg.svdvals(product).clamp(max=1)
    sine = torch.linalg.svdvals(b - product.mT @ a).flip(-1)[..., : cosine.shape[-1]].clamp(max=1)
    return torch.where(cosine.square() >= 0.5, sine.arcsin(), cosine.arccos())


def logit_error(residual: Tensor, queries: Tensor, scale: float) -> Tensor:
    """Root of the mean square of scale * q . residual over residual rows [..., n, D] and queries [..., m, D]."""
    spread = residual.mT @ residual / residual.shape[-2]
    weight = queries.mT @ queries / queries.shape[-2]
    return scale * (spread * weight).sum((-1, -2)).clamp(min=0).sqrt()
