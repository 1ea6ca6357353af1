"""The report's sentences, each computed from a table: nothing here knows a number beforehand."""

from __future__ import annotations

import blind_sweep
import pandas as pd
from outputs import InputError, Table

# Rows of the table whose interval lies above, below and around 0.
VERDICTS = ("win", "loss", "even")


def _count(verdicts: Table) -> str:
    """wins, losses and ties in words."""
    won, lost, even = (int((verdicts == v).sum()) for v in VERDICTS)
    return f"{won} won, {lost} lost, {even} even, of {len(verdicts)}"


def rank(table: Table) -> list[str]:
    """What the ranks say."""
    after = table[table["keys"] == "after RoPE"]
    mean = after.groupby(["page", "centred"])["entropy_rank"].mean()
    first, whole = ("16", "all") if ("16", False) in mean.index else (16, "all")
    return [
        f"Entropy rank of keys after RoPE, mean over layers and heads: {mean[first, False]:.1f} in a page of "
        f"16 tokens, {mean[whole, False]:.1f} over the whole context; less the mean {mean[first, True]:.1f} "
        f"and {mean[whole, True]:.1f}.",
        "A centred page of 16 tokens can have no higher rank than 15: it reaches "
        f"{mean[first, True] / 15:.0%} of that.",
    ]


def bases(table: Table) -> list[str]:
    """Wins and losses of page-local bases, by comparison, rival and fit."""
    said = []
    # Equal rank first, the plain rival first.
    order = table.sort_values(["comparison", "rival"], ascending=False, kind="stable")
    for (comparison, rival, fit), some in order.groupby(["comparison", "rival", "fit"], sort=False):
        how = "equal rank" if comparison == "rank" else "equal bytes and bits"
        where = "the cache it serves" if fit == "cache" else "other text"
        line = (
            f"At {how}, page-local against {rival} fitted to {where}: energy {_count(some['energy_verdict'])}; "
            f"query-weighted logit error {_count(some['error_verdict'])}."
        )
        lost = some[some["error_verdict"] == "loss"]
        if comparison == "bytes" and len(lost):
            cells = lost.groupby("page")["rank"].unique()
            line += " Error is lost at " + "; ".join(
                f"P = {page}: R = {', '.join(map(str, sorted(r)))}" for page, r in cells.items()
            )
            line += " (in one or more of the bit widths)."
        said.append(line)
    full = table[(table["comparison"] == "bytes") & (table["rival"] == "shared")]
    widest = full.loc[full["rival_rank"].astype(int).idxmax()]
    said.append(
        f"The widest shared basis that equal bytes buy has rank {int(widest['rival_rank'])} "
        f"(P = {int(widest['page'])}, R = {int(widest['rank'])}, bits {widest['bits']}): it captures "
        f"{widest['rival_energy']:.3f}, page-local {widest['energy']:.3f}."
    )
    return said


def verdicts(table: Table) -> Table:
    """Every page size, rank and bits against every rival at equal bytes: gain in energy, in log error, and whose."""
    some = table[table["comparison"] == "bytes"].copy()
    some["rival"] = (
        some["rival"] + ", fitted to " + some["fit"].map({"cache": "the cache", "held-out": "other text"})
    )
    some["cell"] = [
        f"energy {r.energy_gain:+.3f} {r.energy_verdict}, error {r.error_gain:+.3f} {r.error_verdict}"
        for r in some.itertuples()
    ]
    shown = some.pivot(index=["page", "rank", "bits"], columns="rival", values="cell")
    return shown[sorted(shown, key=len)].reset_index()


def angles(table: Table) -> list[str]:
    """How far pages share directions."""
    some = table[(table["page"] == 16) & (table["rank"] == 4)].set_index("pair")
    line = ", ".join(
        f"{pair} {some.loc[pair, 'overlap']:.2f} (random subspaces {some.loc[pair, 'random_overlap']:.2f})"
        for pair in some.index
    )
    return [f"Mean square cosine between a page's four directions (P = 16) and those of: {line}."]


def sweep(table: Table) -> list[str]:
    """How well the theorem predicts."""
    found: Table = blind_sweep.correlations(table)
    said = [
        f"D = {int(row.D)}: correlation of measured and predicted rank {row.correlation:.4f}."
        for row in found.itertuples()
    ]
    last = table[table["degrees"] == table["degrees"].max()]
    for width, some in last.groupby("D"):
        ranks = ", ".join(f"{r.scores} {r.rank:.0f}" for r in some.itertuples())
        said.append(
            f"At a right angle (D = {width}) the carrier's mean rank of {blind_sweep.PAGES - 2} is: {ranks}."
        )
    return said


def blind(table: Table) -> list[str]:
    """What a shared basis does not see on the model."""
    said = []
    shared = table[table["basis"] == "shared"]
    for fit, some in shared.groupby("fit", sort=False):
        where = "the cache" if fit == "cache" else "other text"
        cells = "; ".join(
            f"rank {int(r.rank)}: {r.outside:.0%} of pages with {r.mass_outside:.0%} of the mass, "
            f"{r.carriers:.1%} of carriers kept"
            for r in some.itertuples()
            if int(r.rank) in (4, 8, 16, 32, 56, 96, 112)
        )
        said.append(
            f"Shared basis fitted to {where}, pages whose top direction lies mostly outside it. {cells}."
        )
    local = table[table["basis"] == "page-local"]
    for row in local.itertuples():
        for fit, some in shared.groupby("fit", sort=False):
            enough = some[some["carriers"] >= row.carriers]["rank"]
            need = f"rank {int(enough.min())}" if len(enough) else "no rank measured"
            where = "the cache" if fit == "cache" else "other text"
            said.append(
                f"Page-local rank {int(row.rank)} keeps {row.carriers:.1%} of the carriers; a shared basis fitted to "
                f"{where} keeps as many from {need} on."
            )
    return said


def variants(table: Table, part: str, name: str, base: str | tuple[str, ...]) -> list[str]:
    """Every variant against the base, in the mass of the oracle's that it keeps, averaged over budgets."""
    said = []
    for section, some in table.groupby(part, sort=False):
        mean = some.groupby(name, sort=False)["of_oracle"].mean()
        start = next((variant for variant in mean.index if str(variant).startswith(base)), mean.index[0])
        others = ", ".join(f"{v} {mean[v] - mean[start]:+.4f}" for v in mean.index if v != start)
        said.append(f"{section}: {start} keeps {mean[start]:.4f} of the oracle's mass; {others}.")
    return said


def selection(table: Table) -> list[str]:
    """The default against every other way at each budget, by carriers and KL.

    Raises:
        InputError: nothing but decoding was measured.
    """
    if "carriers" not in table:
        raise InputError(
            "selection: expected what choices keep, got digits alone; run selection.py --part kept"
        )
    plain = table[
        (table["page"] == 16) & table["bits"].fillna("8/4/4").eq("8/4/4") & table["rank"].fillna(4).eq(4)
    ]
    said = []
    for budget, some in plain.groupby("budget"):
        cells = []
        for r in some.itertuples():
            told = [f"{r.carriers:.3f}"] * (r.carriers == r.carriers)
            told += [f"KL {r.kl:.3f}, digits {r.digits:.3f}"] * (r.kl == r.kl)
            who = f"{r.selector} ({r.fit})" if isinstance(r.fit, str) and r.fit else r.selector
            cells.append(f"{who} {', '.join(told)}")
        what = ", carriers kept" if some["carriers"].notna().any() else ""
        said.append(
            f"Budget {int(budget)}, P = 16, rank 4 and the shared rank of its bytes{what}: "
            + "; ".join(cells)
            + "."
        )
    return said


def layers(table: Table) -> list[str]:
    """Which layers want rank, and what the choice brings on contexts it was not made from."""
    groups = table[(table["part"] == "group") & table["saved"].notna()]
    first = groups.loc[groups["saved"].idxmax()]
    clear = int((groups["saved_low"] > 0).sum())
    said = [
        f"The KL saved is above 0, interval and all, for {clear} of {len(groups)} groups of layers. Most: "
        f"{first['selector']}, {first['saved']:.3f} nats ({first['saved_low']:.3f} to {first['saved_high']:.3f}) of "
        f"{table['kl'].iloc[0]:.3f}."
    ]
    tested = table[table["part"].isin(["oracle", "uniform", "by layer"])]
    cells = "; ".join(
        f"{r.selector} ({r.bytes_a_token:.1f} bytes a token) KL {r.kl:.3f} ({r.kl_low:.3f} to {r.kl_high:.3f}), "
        f"digits {r.digits:.3f}"
        for r in tested.itertuples()
    )
    return [*said, f"On {int(tested['questions'].iloc[0])} other questions: {cells}."]


def agreement(mine: Table, other: Table) -> Table:
    """For every number with an interval that two tables of the same rows hold: how often the intervals meet.

    Rows are matched by the columns that are no numbers with intervals. A row a column: rows, share whose intervals
    meet, largest difference of the means.
    """
    measured = [c.removesuffix("_low") for c in mine if c.endswith("_low") and c in other]
    derived = {"questions", "answered"}
    keys = [
        c
        for c in mine
        if c in other
        and c not in derived
        and not any(c in (m, f"{m}_low", f"{m}_high") for m in measured)
        and not c.endswith("verdict")
    ]
    both = mine.astype(dict.fromkeys(keys, str)).merge(
        other.astype(dict.fromkeys(keys, str)), on=keys, suffixes=("", "_other")
    )
    rows = []
    for name in measured:
        some = both.dropna(subset=[f"{name}_low", f"{name}_low_other"])
        meet = (some[f"{name}_low"] <= some[f"{name}_high_other"]) & (
            some[f"{name}_low_other"] <= some[f"{name}_high"]
        )
        gap = (some[name] - some[f"{name}_other"]).abs()
        if len(some):
            rows.append(
                {
                    "number": name,
                    "rows": len(some),
                    "intervals_meet": meet.mean(),
                    "largest_difference": gap.max(),
                }
            )
    return pd.DataFrame(rows)
