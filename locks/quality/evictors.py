"""Evictors by their papers: which tokens a KV head goes on holding; what they let go never comes back.

All keep to one budget: the tokens that a KV head attends to at a step, the newest inside. A cache that is full is cut
to `budget - buffer(budget)` tokens before the next one is written, so that never more than the budget are held. A
prompt of at least `budget` tokens is cut the same way. Attention weights are means over the query heads of a group,
which orders tokens as their sum does; ties go to the earlier token. The bookkeeping is not counted as bytes read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from locks.pages import scored
from locks.selectors import KeepsNothing
from locks.types import PageMass

# Neighbours that share the largest vote among them (SnapKV, R-KV).
POOL = 7
# Elements of the largest intermediate result.
CHUNK = 2**26


class Evictor(KeepsNothing):
    """A rule that holds on to some tokens, as a selector that watches queries and ranks nothing.

    What it knows of the held tokens is `seen [B, Hkv, S, n]`: a row for each of the last S queries (S from `rows`), or
    one row of sums; column t is of the t-th held token, in the order of their positions.
    """

    name: str
    # Whether `seen` is one row, of all queries' weights together.
    sums = False

    @abstractmethod
    def rows(self, budget: int) -> int:
        """S, the rows of `seen`."""

    def buffer(self, budget: int) -> int:
        """How many tokens a full cache gives up at once."""
        return 1

    @abstractmethod
    def keep(self, seen: Tensor, keys: Tensor, budget: int) -> Tensor:
        """Which `budget - buffer(budget)` of n tokens stay.

        Args:
            seen: [B, Hkv, S, n] float32.
            keys: [B, Hkv, n, D], with their positions' rotation.
            budget: tokens.

        Returns:
            [B, Hkv, budget - buffer(budget)] int64, ascending.
        """

    def observe(self, seen: Tensor, weights: Tensor, turn: int | Tensor) -> None:
        """Takes in the attention weights [B, Hkv, n] of decode step number `turn`, in place."""
        row = torch.as_tensor(turn, device=seen.device) % seen.shape[2]
        seen.index_copy_(2, row.view(1), weights[:, :, None])

    def page_mass(
        self,
        q: Tensor,
        state: Seen,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window_pages: int = 1,
    ) -> PageMass:
        """Equal masses, since all that is held is attended to; `state` takes the query's weights in."""
        keys = k_cache[block_table.long()].transpose(1, 2).flatten(2, 3)
        live = torch.arange(keys.shape[2], device=q.device) < seq_lens[:, None]
        state.observe(attention(q[:, :, None], keys, live[:, None], scale)[:, :, 0])
        pages = keys.shape[2] // self.page
        mass = torch.where(scored(seq_lens, self.page, pages), 0.0, -torch.inf)
        return PageMass(mass[:, None].repeat(1, q.shape[1], 1), mass.new_zeros(q.shape[:2]))

    def scan_bytes(self, head_dim: int, pages: int) -> float:
        """0."""
        return 0.0


@dataclass
class Seen:
    """One layer's weights [B, Hkv, S, n], and how many decode steps they have taken in.

    Step `turn`, a number on the device, goes into row `turn % S`, which is the oldest one; below 0 it is a row of that
    very query's.
    """

    evictor: Evictor
    weights: Tensor
    turn: Tensor

    def observe(self, weights: Tensor) -> None:
        """Takes in the attention weights [B, Hkv, n] of a step."""
        self.evictor.observe(self.weights[..., : weights.shape[-1]], weights, self.turn)
        self.turn += 1


def attention(q: Tensor, keys: Tensor, live: Tensor, scale: float) -> Tensor:
    """[B, Hkv, S, n] float32: the mean over a group of softmax(scale q K^T), 0 for a query that sees nothing.

    Args:
        q: [B, Hq, S, D].
        keys: [B, Hkv, n, D].
        live: [B, S or 1, n] bool, the keys that each query sees.
        scale: of the logits.
    """
    grouped = q.float().unflatten(1, (keys.shape[1], -1))
    # What lies behind a row's last token may be anything, nan too.
    known = torch.where(live.any(1)[:, None, :, None], keys.float(), 0)
    logits = torch.einsum("bhgsd,bhnd->bhgsn", grouped, known) * scale
    shown = live[:, None, None]
    weights = logits.masked_fill(~shown, -torch.inf).softmax(-1)
    return torch.where(shown, weights, 0).mean(2)


def best(scores: Tensor, count: int, newest: int) -> Tensor:
    """[..., count + newest] ascending: the `count` best of scores [..., n - newest], and the newest tokens behind."""
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    first = scores.shape[-1]
    behind = torch.arange(first, first + newest, device=scores.device).expand(*chosen.shape[:-1], newest)
    return torch.cat([chosen.sort(-1).values, behind], -1)


def pooled(votes: Tensor) -> Tensor:
    """The largest of each token's neighbourhood: [B, Hkv, n] as it came."""
    return functional.max_pool1d(votes, POOL, stride=1, padding=POOL // 2)


class SnapKV(Evictor):
    """What the last queries look at, and the tokens around it, beside the last tokens themselves.

    The paper cuts the prompt and lets decoded tokens pile up. So that the budget holds, the vote is taken anew at every
    decoded token, over the last queries of that moment, and the one token that it finds least of use goes.

    Source: SnapKV (arXiv 2404.14469), sections 4 and 5: the window's weights summed, max-pooled, the best of the
    prefix kept beside the window of 32 tokens (16 at a budget of 64).
    """

    name = "snapkv"

    def rows(self, budget: int) -> int:
        """The window: 32 queries, or a quarter of a small budget."""
        return min(32, budget // 4)

    def keep(self, seen: Tensor, keys: Tensor, budget: int) -> Tensor:
        """The window, and the best voted of the prefix."""
        window = self.rows(budget)
        votes = pooled(seen.sum(2)[..., :-window])
        return best(votes, budget - self.buffer(budget) - window, window)


class H2O(Evictor):
    """Half of the budget for heavy hitters, by the attention they ever got, half for the most recent tokens.

    Source: H2O (arXiv 2306.14048), algorithm 1: a token goes at every step, the one of least accumulated weight. The
    prompt's queries count too.
    """

    name = "h2o"
    sums = True

    def rows(self, budget: int) -> int:
        """One row of sums."""
        return 1

    def observe(self, seen: Tensor, weights: Tensor, turn: int | Tensor) -> None:
        """Adds the weights."""
        seen[:, :, 0] += weights

    def keep(self, seen: Tensor, keys: Tensor, budget: int) -> Tensor:
        """The recent half but for the token to come, and the heaviest before it."""
        recent = budget // 2 - 1
        return best(seen[:, :, 0, : seen.shape[-1] - recent], budget - 1 - recent, recent)


class RKV(Evictor):
    """Important and not redundant: lambda * importance - (1 - lambda) * redundancy, beside the last tokens.

    Source: R-KV (arXiv 2505.24133), section 3. Its buffer, which fills between two cuts, lies inside the budget here
    (a quarter of it, at most the paper's 128). Weights are means over a group, where the paper takes a maximum.
    """

    name = "rkv"
    LAMBDA, OBSERVED, BUFFER, ALIKE = 0.1, 8, 128, 0.5

    def rows(self, budget: int) -> int:
        """The queries of the last tokens."""
        return self.OBSERVED

    def buffer(self, budget: int) -> int:
        """128, or a quarter of a small budget."""
        return min(self.BUFFER, budget // 4)

    def keep(self, seen: Tensor, keys: Tensor, budget: int) -> Tensor:
        """The last tokens, and the best by both scores of those before."""
        newest = self.OBSERVED
        importance = pooled(seen.mean(2)[..., :-newest])
        repeats = redundancy(keys, self.ALIKE)[..., :-newest]
        joint = self.LAMBDA * importance - (1 - self.LAMBDA) * repeats
        return best(joint, budget - self.buffer(budget) - newest, newest)


def redundancy(keys: Tensor, alike: float) -> Tensor:
    """[B, Hkv, n]: softmax over the tokens of a token's mean cosine with all others' keys [B, Hkv, n, D].

    Each token leaves out the latest one that resembles it by more than `alike`, so that of tokens that repeat each
    other the latest counts as the least redundant.
    """
    unit = functional.normalize(keys.float(), dim=-1)
    count = keys.shape[2]
    place = torch.arange(count, device=keys.device)
    total = torch.zeros(unit.shape[:3], device=keys.device)
    for some in place.split(max(1, CHUNK // (unit[..., 0].numel() or 1))):
        cosine = unit[:, :, some] @ unit.transpose(2, 3)
        cosine = cosine.masked_fill(some[:, None] == place, 0)
        latest = torch.where(cosine > alike, place, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill(place == latest, 0).sum(2)
    return (total / count).softmax(-1)


EVICTORS: dict[str, type[Evictor]] = {kind.name: kind for kind in (SnapKV, H2O, RKV)}
