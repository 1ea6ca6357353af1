"""Hugging Face transformers: `enable(model, config)` makes `generate` prefill densely and decode sparsely.

How: transformers' attention interface gets one more implementation, "locks", whose masks are those of its
"sdpa". A hook before the decoder's forward pass puts a paged cache in the place of an empty one, tells it
which tokens are padding, and hands its layers to the attention function. There a pass is one of three things:

* a prompt on an empty cache: transformers' own SDPA;
* several tokens on a filled cache (a chunk of a prompt, a second prompt, drafts): SDPA over all of it;
* one token on a filled cache: the sparse step, or without a budget attention to all of it, which our kernels
  read where it lies and SDPA, where they do not run, from a copy.

Layers with a sliding window stay dense within their window.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from locks import api, checks
from locks.pages import num_pages

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.cache_utils import Cache, DynamicCache, get_layer_types_and_kwargs

    from locks.hf_cache import LocksConfig, PagedCache, PagedLayer, Step, fork, page_layers
except ImportError as error:
    raise ImportError("locks.hf needs transformers >= 5.16: pip install 'locks-attention[hf]'") from error

__all__ = [
    "LocksConfig",
    "PagedCache",
    "PagedLayer",
    "Stats",
    "Step",
    "cache_argument",
    "disable",
    "enable",
    "fork",
    "reset_stats",
    "stats",
]

NAME = "locks"
# What a forward pass calls its cache: since transformers 5.24, and before.
_CACHE_NAMES = ("cache", "past_key_values")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# What models pass to their attention beside the tensors and does not change a result here.
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}
# The same, as long as it has this value.
_REQUIRED = {"is_causal": True, "output_attentions": False}
# What changes a result. Anything else that is unknown is refused when a model is enabled, not at every call.
_OTHER = {"sliding_window", "softcap", "s_aux", "position_bias"}


@dataclass(frozen=True)
class Stats:
    """Counts since `enable` or `reset_stats`, over the layers without a sliding window.

    A row is one sequence in one layer at one forward pass. Pages and tokens are summed over KV heads. Bytes
    count K and V at 2 bytes an element, whatever the cache's dtype.

    decode_rows: rows of forward passes with one token on a filled cache;
    sparse_rows: those of them that the sparse step served;
    dense_rows: rows attended to densely (prompts, chunks, drafts, decode rows of a config without a budget);
    pages_read, attended_tokens: what the sparse rows attended to; context_tokens: what there was;
    summary_bytes, page_bytes: what the sparse rows read to rank pages and to attend to them;
    dense_bytes: what dense attention would have read for the same rows.
    """

    decode_rows: int = 0
    sparse_rows: int = 0
    dense_rows: int = 0
    pages_read: int = 0
    attended_tokens: int = 0
    context_tokens: int = 0
    summary_bytes: int = 0
    page_bytes: int = 0
    dense_bytes: int = 0


class _Weights(NamedTuple):
    """What a layer's counts are multiplied with: tokens of a page, KV heads, bytes of a token's key and value, and what
    ranking reads of a KV head: `scan` bytes and `scan_page` more for each page.
    """

    page: int
    heads: int
    kv: int
    scan: float
    scan_page: float


class _Counter:
    """One layer's counts; what depends on lengths is summed on the device, so that nothing waits for it."""

    def __init__(self) -> None:
        self.decode_rows = self.sparse_rows = self.dense_rows = 0
        # Pages that were attended to, and the sums of `_lengths`; in place, so that a graph's replays count too.
        self.sums: dict[_Weights, tuple[Tensor, Tensor]] = {}

    def sparse(self, layer: PagedLayer, counts: Tensor, lengths: Tensor) -> None:
        ranker, width = layer.config.ranker, layer.k_cache.shape[-1]
        scan = ranker.scan_bytes(width, 0)
        weights = _Weights(
            ranker.page,
            counts.shape[1],
            2 * (width + layer.v_cache.shape[-1]),
            scan,
            ranker.scan_bytes(width, 1) - scan,
        )
        self.sparse_rows += counts.shape[0]
        if weights not in self.sums:
            self.sums[weights] = counts.sum(), lengths.clone()
            return
        attended, seen = self.sums[weights]
        attended += counts.sum()
        seen += lengths

    def read(self) -> Stats:
        sums = [0.0] * 6
        for weights, (counts, lengths) in self.sums.items():
            page, heads, kv, scan, scan_page = weights
            count, (rows, tokens, pages, ranked) = int(counts), lengths.tolist()
            # The newest page is always read, as far as it goes.
            attended = count * page - heads * (pages * page - tokens)
            context, scanned = heads * tokens, heads * (scan * rows + scan_page * ranked)
            step = (count, attended, context, scanned, kv * attended, kv * context)
            sums = [a + b for a, b in zip(sums, step, strict=True)]
        return Stats(self.decode_rows, self.sparse_rows, self.dense_rows, *map(round, sums))


def _lengths(layer: PagedLayer) -> Tensor:
    """Of a pass's rows: how many, their tokens, their pages, those of them that are ranked, [4] int64."""
    pages = num_pages(layer.seq_lens, layer.config.ranker.page)
    some = torch.stack([torch.ones_like(pages), layer.seq_lens, pages, (pages - 1).clamp(min=0)])
    return some.sum(1)


class _Handle:
    """What `enable` attached to a model."""

    def __init__(self, base: PreTrainedModel, config: LocksConfig) -> None:
        self.base, self.config = base, config
        self.previous = base.config._attn_implementation
        self.names = _parameters(type(base))
        self.cache_name = _cache_name(base)
        self.probing = False
        self.counters: dict[int, _Counter] = {}
        # Of the pass at hand, for each page size: all layers of a cache hold equally many tokens.
        self.lengths: dict[int, Tensor] = {}
        self.hook = self.base.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Prepares the cache of a forward pass of the decoder."""
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        current = self.base.config._attn_implementation
        if current != NAME:
            raise RuntimeError(
                f"attn_implementation: expected {NAME!r} while the model is enabled, got {current!r}; "
                "call locks.hf.disable(model) first"
            )
        given = [kwargs.pop(name) for name in _CACHE_NAMES if name in kwargs]
        cache = self._cache(kwargs.get("use_cache"), *given)
        layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, PagedLayer)}
        tokens = kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        rows, new = tokens.shape[:2]
        lengths = {layer.columns for layer in layers.values()}
        if len(lengths) != 1:
            raise RuntimeError(f"past_key_values: its layers hold {sorted(lengths)} tokens; make a new cache")
        some = next(iter(layers.values()))
        if some.columns and len(some.seq_lens) != rows:
            raise ValueError(f"past_key_values: expected a cache of {rows} rows, got {len(some.seq_lens)}")
        mask = _real(kwargs.get("attention_mask"), some, rows, new)
        if some.columns and len(layers) == len(cache.layers):
            # Nobody reads a mask then, and making one would wait for the device at every step.
            kwargs["attention_mask"] = None
        self.lengths.clear()
        for i, layer in layers.items():
            layer.expect(mask)
            if layer.columns and new == 1:
                self.counters.setdefault(i, _Counter()).decode_rows += rows
        kwargs.update({self.cache_name: cache, "use_cache": True, "locks": (self, layers)})
        return (), kwargs

    def _cache(self, use_cache: bool | None, cache: Any = None) -> Cache:
        if use_cache is None:
            use_cache = self.base.config.use_cache
        if not use_cache:
            raise ValueError(
                "use_cache: expected True, got False: without a cache every step would be dense; "
                "call locks.hf.disable(model) for that"
            )
        if cache is None:
            return PagedCache(self.base.config, self.config)
        if any(isinstance(layer, PagedLayer) for layer in getattr(cache, "layers", ())):
            return cache
        if type(cache) is not DynamicCache or cache.offloading:
            offloaded = " with offloading" if getattr(cache, "offloading", False) else ""
            raise TypeError(
                "past_key_values: expected None, a locks.hf.PagedCache or an empty DynamicCache, "
                f"got a {type(cache).__name__}{offloaded}"
            )
        if cache.get_seq_length():
            raise ValueError(
                f"past_key_values: expected an empty cache, got one with {cache.get_seq_length()} tokens "
                "from before the model was enabled"
            )
        page_layers(cache, self.base.config, self.config)
        return cache

    def counter(self, layer_idx: int) -> _Counter:
        return self.counters.setdefault(layer_idx, _Counter())

    def lengths_of(self, layer: PagedLayer) -> Tensor:
        """`_lengths`, made once a pass."""
        page = layer.config.ranker.page
        if page not in self.lengths:
            self.lengths[page] = _lengths(layer)
        return self.lengths[page]


def _real(mask: Any, layer: PagedLayer, rows: int, new: int) -> Tensor | None:
    """[B, columns + new] bool, which tokens are real; None where all are.

    Raises:
        TypeError, ValueError: no mask over all tokens so far, or one that contradicts the cache.
    """
    width = layer.columns + new
    if mask is None:
        if layer.mask is not None and not bool(layer.mask.all()):
            raise ValueError("attention_mask: expected the padding of the earlier tokens too, got None")
        return None
    if not isinstance(mask, Tensor):
        got = type(mask).__name__
        raise TypeError(f"attention_mask: expected a tensor [{rows}, {width}] or None, got {got}")
    if mask.shape != (rows, width):
        raise ValueError(
            f"attention_mask: expected [{rows}, {width}] (padding of all tokens so far), got "
            f"{list(mask.shape)}; a mask over pairs of tokens has no sparse counterpart"
        )
    mask = mask.to(torch.bool)
    waits = new > 1 or mask.device.type == "cpu" or layer.config.debug
    if waits and layer.columns:
        cached = mask[:, : layer.columns].sum(1).to(layer.seq_lens.device)
        if not torch.equal(cached.int(), layer.seq_lens):
            raise ValueError(
                f"attention_mask: expected the earlier tokens' padding unchanged, {layer.seq_lens.tolist()} "
                f"real tokens, got {cached.tolist()}"
            )
    # A decode step on a GPU does not wait to learn that nothing is padded.
    return None if waits and bool(mask.all()) else mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    locks: tuple[_Handle, dict[int, PagedLayer]] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B, new, Hq, Dv] of one layer, and no weights."""
    if locks is None:
        raise ValueError(
            f"{type(module).__name__}: its attention got no paged cache; expected a model that "
            "locks.hf.enable prepared and that passes keyword arguments on to its attention"
        )
    handle, layers = locks
    index = int(cast(int, module.layer_idx))
    sdpa = AttentionInterface()["sdpa"]
    _refuse_arguments(module, kwargs, window=index not in layers, strict=handle.probing)
    if index not in layers:
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    layer, counter, new = layers[index], handle.counter(index), query.shape[2]
    budget, q = layer.config.budget, query[:, :, 0]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    step = new == 1 and layer.columns > 1
    # transformers makes no mask for one token without padding: this one is the model's own. Nor would a copy of the
    # cache be attended to under it.
    if step and attention_mask is not None and (layer.mask is None or attention_mask.dtype != torch.bool):
        raise ValueError(f"{type(module).__name__}: its own mask has no sparse counterpart")
    if step and budget is not None:
        if dropout:
            raise ValueError(f"dropout: expected 0 at a decode step, got {dropout}; call model.eval()")
        out, counts = _decode(index, layer, budget, q, scale)
        counter.sparse(layer, counts, handle.lengths_of(layer))
        return out[:, None], None
    counter.dense_rows += query.shape[0]
    if step and not dropout and _in_place(layer, q):
        return _attend_all(layer, q, scale)[:, None], None
    if layer.columns > new:
        key, value = layer.dense()
        attention_mask = layer.causal_mask(new)
    return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _in_place(layer: PagedLayer, q: Tensor) -> bool:
    """Whether our kernels run, know the widths, and nobody asks for the gradient that they do not pass on."""
    widths = (q.shape[-1], layer.v_cache.shape[-1])
    impl = api.resolve_impl(layer.config.impl, q.device, q.dtype)
    return impl == "triton" and all(width in checks.HEAD_DIMS for width in widths) and not q.requires_grad


def _attend_all(layer: PagedLayer, q: Tensor, scale: float) -> Tensor:
    """The decode step of a config without a budget: out [B, Hq, Dv], every key and value read once, in place."""
    config = layer.config
    out, _ = api.sparse_attention(
        q,
        layer.k_cache,
        layer.v_cache,
        layer.table,
        layer.seq_lens,
        None,
        # Only how the work is cut: a selector may have pages of its own.
        page=config.fmt.page,
        scale=scale,
        impl="triton",
        debug=config.debug,
    )
    return out


# No gradient flows through cached keys, so none flows at all.
@torch.no_grad()
def _decode(index: int, layer: PagedLayer, budget: int, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The sparse step: out [B, Hq, Dv] and how many pages each KV head attended to [B, Hkv]."""
    config, ranker = layer.config, layer.config.ranker
    if config.debug:
        checks.table_values(layer.table, layer.seq_lens, layer.k_cache.shape[0], layer.k_cache.shape[2])
    mass = ranker.page_mass(
        q,
        layer.state,
        layer.k_cache,
        layer.table,
        layer.seq_lens,
        scale=scale,
        window_pages=config.window_pages,
    )
    share = api.page_share(mass, layer.k_cache.shape[1], impl=config.impl)
    pages = api.select_pages(
        share,
        layer.seq_lens,
        page=ranker.page,
        budget=budget,
        window_pages=config.window_pages,
        impl=config.impl,
    )
    out, _ = api.sparse_attention(
        q,
        layer.k_cache,
        layer.v_cache,
        layer.table,
        layer.seq_lens,
        pages,
        page=ranker.page,
        scale=scale,
        impl=config.impl,
        debug=config.debug,
    )
    if config.on_step is not None:
        config.on_step(Step(index, q, scale, mass, pages, layer))
    return out, pages.counts


def _refuse_arguments(module: nn.Module, kwargs: dict[str, Any], *, window: bool, strict: bool) -> None:
    """Raises for what a model passes to its attention and neither the sparse step nor SDPA computes."""
    for name, value in kwargs.items():
        if value is None or name in _HARMLESS or (name == "sliding_window" and window):
            continue
        if name in _REQUIRED and value == _REQUIRED[name]:
            continue
        if strict or name in _REQUIRED or name in _OTHER:
            raise ValueError(
                f"{type(module).__name__}: layer {module.layer_idx} passes {name} = {value!r} to its "
                "attention, which has no sparse counterpart; run the model without locks"
            )


def _mask(**kwargs: Any) -> Tensor | None:
    """SDPA's mask. One token without padding has none: while a graph is captured transformers would make it one."""
    one = kwargs.get("q_length") == 1 and kwargs.get("attention_mask") is None
    if one and kwargs.get("local_size") is None and kwargs.get("allow_is_causal_skip", True):
        return None
    return AttentionMaskInterface()["sdpa"](**kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def enable(model: PreTrainedModel, config: LocksConfig | None = None) -> PreTrainedModel:
    """Makes `model.generate` and `model(...)` prefill densely and decode sparsely; returns the model.

    Two forward passes over three tokens check that the model's attention is of a kind that is supported. A
    model that is enabled already gets the new config; caches keep the one they were made with.

    Args:
        model: a decoder-only transformers model of one text config, with or without its language-model head.
        config: None for `LocksConfig()`.

    Raises:
        TypeError: no transformers model.
        ValueError: something about the model that has no sparse counterpart, by name.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    if not isinstance(config, LocksConfig | None):
        raise TypeError(f"config: expected a locks.hf.LocksConfig, got {config!r}")
    config = LocksConfig() if config is None else config
    if _handle(model) is not None:
        disable(model)
    base = _base(model)
    _refuse_model(model, base)
    api.resolve_impl(config.impl, model.device, model.dtype)
    handle = _Handle(base, config)
    object.__setattr__(base, "_locks", handle)
    try:
        base.set_attn_implementation(NAME)
        _probe(model, handle)
    except BaseException:
        disable(model)
        raise
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `enable`; returns the model. Its paged caches can no longer be used with it."""
    handle = _enabled(model)
    handle.hook.remove()
    handle.base.set_attn_implementation(handle.previous or "sdpa")
    object.__delattr__(handle.base, "_locks")
    return model


def stats(model: PreTrainedModel, layer: int | None = None) -> Stats:
    """Counts of one layer, or of all of them together; waits for the device."""
    handle = _enabled(model)
    counters = handle.counters.values() if layer is None else [handle.counter(layer)]
    every = [dataclasses.astuple(counter.read()) for counter in counters]
    return Stats(*(sum(column) for column in zip(*every, strict=True)))


def reset_stats(model: PreTrainedModel) -> None:
    """Starts counting anew."""
    _enabled(model).counters.clear()


def _handle(model: PreTrainedModel) -> _Handle | None:
    return getattr(_base(model), "_locks", None)


def _base(model: PreTrainedModel) -> PreTrainedModel:
    """The module that makes masks and runs the layers: where a forward pass meets its cache."""
    return cast(PreTrainedModel, model.get_decoder())


def _enabled(model: PreTrainedModel) -> _Handle:
    handle = _handle(model)
    if handle is None:
        raise ValueError(f"model: expected one that locks.hf.enable prepared, got {type(model).__name__}")
    return handle


def _probe(model: PreTrainedModel, handle: _Handle) -> None:
    """Runs a prompt of two tokens and a decode step, to see what the model passes to its attention.

    Raises:
        ValueError: by name, something unknown, or layers that do not attend through the interface.
    """
    base = handle.base
    device = next(base.get_input_embeddings().parameters()).device
    cache = PagedCache(base.config, dataclasses.replace(handle.config, on_step=None))
    expected = [i for i, layer in enumerate(cache.layers) if isinstance(layer, PagedLayer)]
    handle.probing = True
    try:
        for passes, new in enumerate((2, 1), start=1):
            ids = torch.zeros((1, new), dtype=torch.long, device=device)
            with torch.no_grad():
                model(input_ids=ids, **cache_argument(model, cache))
            counts = sorted(handle.counters.items())
            served = [i for i, counter in counts if counter.dense_rows + counter.sparse_rows == passes]
            if served != expected:
                raise ValueError(
                    f"{type(base).__name__}: expected layers {expected} to attend through transformers' "
                    f"attention interface, got {served}; run the model without locks"
                )
    finally:
        handle.probing = False
        handle.counters.clear()


# Asked at every step.
@functools.cache
def _parameters(kind: type[nn.Module]) -> Sequence[str]:
    """Names of the forward pass's positional parameters."""
    return list(inspect.signature(kind.forward).parameters)[1:]


def _cache_name(model: nn.Module) -> str:
    return next(name for name in _CACHE_NAMES if name in _parameters(type(model)))


def cache_argument(model: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword by which the installed transformers' models take a cache: "cache" or "past_key_values"."""
    return {_cache_name(model): cache}


def _refuse_model(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Raises for every kind of model whose attention is known to be another."""
    config = model.config
    attentions = [m for m in base.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]

    def refuse(why: str, instead: str = "run the model without locks") -> None:
        raise ValueError(f"{type(model).__name__} cannot decode sparsely: {why}; {instead}")

    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder model")
    if config.get_text_config(decoder=True) is not config:
        refuse("it is a model of several modalities", "load its text model alone")
    if not set(_CACHE_NAMES) & set(_parameters(type(base))):
        refuse("it keeps no key/value cache (a state-space or recurrent model)")
    if (
        getattr(config, "alibi", False)
        or getattr(getattr(config, "attn_config", None), "alibi", False)
        or any("alibi" in name for name in dir(type(base)))
    ):
        refuse("its positions are ALiBi biases on the logits")
    if getattr(config, "kv_lora_rank", None) is not None:
        refuse("it has multi-head latent attention (kv_lora_rank)")
    for name in ("attn_logit_softcapping", "attention_logit_softcapping"):
        if getattr(config, name, None) is not None:
            refuse(f"it caps its logits ({name} = {getattr(config, name)})")
    if any(isinstance(getattr(module, "sinks", None), Tensor) for module in attentions):
        refuse("its attention has learned sinks")
    if getattr(config, "add_cross_attention", False):
        refuse("it has cross-attention (add_cross_attention)")
    if getattr(config, "use_bidirectional_attention", False) or not all(m.is_causal for m in attentions):
        refuse("its attention is not causal")
    if getattr(config, "num_kv_shared_layers", None):
        refuse("its layers share keys and values (num_kv_shared_layers)")
    types, _ = get_layer_types_and_kwargs(config)
    other = sorted(set(types) - set(_LAYER_TYPES))
    if other:
        refuse(f"it has layers of type {', '.join(other)}")
    if "full_attention" not in types:
        refuse("every layer has a sliding window and would stay dense")
    if not type(base)._can_set_attn_implementation():
        refuse("it does not use transformers' attention interface")
    kept = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if kept not in (None, "dynamic"):
        refuse(f"generation_config asks for a cache of type {kept!r}", "set cache_implementation to None")
    if model.dtype not in checks.FLOATS:
        refuse(f"its dtype is {model.dtype}", "use bfloat16, float16 or float32")
    for module in attentions:
        width = getattr(module, "head_dim", None)
        if width is not None and width not in checks.HEAD_DIMS:
            refuse(f"its heads are {width} wide, not a multiple of 16 in 64..256")
