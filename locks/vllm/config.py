"""What a user can set, from `--additional-config '{"locks": {...}}'` or the same JSON in LOCKS_CONFIG."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from locks import checks
from locks.format import SummaryFormat
from locks.layer_ranks import LayerRank, rank_of
from locks.layer_ranks import parse as parse_layer_ranks
from locks.pages import budget_pages

VARIABLE = "LOCKS_CONFIG"
KEY = "locks"


@dataclass(frozen=True)
class PluginConfig:
    """How an engine decodes.

    Args:
        budget: tokens that a KV head attends to at a decode step, a multiple of the page, first and newest page
            included.
        page: tokens of a page; an engine block is a multiple of it.
        rank: basis vectors of a page's summary.
        layer_ranks: of single layers in place of `rank`, such as "8@18-20" or "8@3-4,8@18-20".
        mean_bits: bits of an element of a summary's mean.
        basis_bits: bits of an element of its basis.
        coef_bits: bits of a coefficient.
        window_pages: how many of the newest pages are always kept.
        dense_below: rows of fewer tokens attend to all their pages, and their summaries are not read.

    Raises:
        TypeError, ValueError: a value that is not possible, by name.
    """

    budget: int = 2048
    page: int = SummaryFormat.page
    rank: int = SummaryFormat.rank
    layer_ranks: str = ""
    mean_bits: int = SummaryFormat.mean_bits
    basis_bits: int = SummaryFormat.basis_bits
    coef_bits: int = SummaryFormat.coef_bits
    window_pages: int = 1
    dense_below: int = 0

    def __post_init__(self) -> None:
        # Makes the format, which checks its own values.
        checks.summary_format(self.fmt)
        for other in self.others:
            checks.summary_format(dataclasses.replace(self.fmt, rank=other.rank))
        checks.window(self.window_pages)
        budget_pages(self.budget, self.page, self.window_pages)
        if type(self.dense_below) is not int or self.dense_below < 0:
            raise ValueError(f"dense_below: expected tokens, at least 0, got {self.dense_below!r}")

    @cached_property
    def fmt(self) -> SummaryFormat:
        """The summaries' format."""
        names = [field.name for field in dataclasses.fields(SummaryFormat)]
        return SummaryFormat(**{name: getattr(self, name) for name in names})

    @cached_property
    def others(self) -> tuple[LayerRank, ...]:
        """What `layer_ranks` says."""
        if not isinstance(self.layer_ranks, str):
            raise TypeError(f"layer_ranks: expected text such as '8@18-20', got {self.layer_ranks!r}")
        try:
            return parse_layer_ranks(self.layer_ranks)
        except ValueError as error:
            raise ValueError(f"layer_ranks: {error}") from error

    def of_layer(self, layer: int) -> PluginConfig:
        """The configuration of one of the model's layers, which has one rank."""
        return dataclasses.replace(self, rank=rank_of(layer, self.others, self.rank), layer_ranks="")

    @property
    def kept_pages(self) -> int:
        """M, the pages that a sparse row attends to."""
        return self.budget // self.page

    @property
    def covered_below(self) -> int:
        """Rows of fewer tokens attend to all their pages."""
        return max(self.budget + 1, self.dense_below)


def options() -> str:
    """The valid settings and their defaults, for messages."""
    return ", ".join(f"{field.name} ({field.default!r})" for field in dataclasses.fields(PluginConfig))


def parse(settings: object, source: str) -> PluginConfig:
    """The configuration that `settings` describes.

    Args:
        settings: a mapping of option names to values.
        source: where they were given, for messages.

    Raises:
        ValueError: no mapping, an unknown option or a value that is not possible; lists the valid options.
    """
    valid = f"options and their defaults: {options()}"
    if not isinstance(settings, Mapping):
        raise ValueError(f"{source}: expected a JSON object of options, got {settings!r}; {valid}")
    known = {field.name for field in dataclasses.fields(PluginConfig)}
    unknown = sorted(str(name) for name in settings if name not in known)
    if unknown:
        raise ValueError(f"{source}: unknown option {', '.join(unknown)}; {valid}")
    try:
        return PluginConfig(**{str(name): value for name, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}; {valid}") from error


def from_environment() -> PluginConfig | None:
    """What LOCKS_CONFIG describes; None where it is not set.

    Raises:
        ValueError: no JSON, or settings that are not possible.
    """
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return None
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{VARIABLE}: expected a JSON object, got {text!r} ({error})") from error
    return parse(settings, VARIABLE)


def from_engine(vllm_config: Any) -> PluginConfig | None:
    """What an engine was given: its `additional_config["locks"]`, else LOCKS_CONFIG; None where neither is set.

    Raises:
        ValueError: settings that are not possible.
    """
    extra = getattr(vllm_config, "additional_config", None)
    if isinstance(extra, Mapping) and KEY in extra:
        return parse(extra[KEY], f"additional_config[{KEY!r}]")
    return from_environment()
