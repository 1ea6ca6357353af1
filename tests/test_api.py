"""What the public operations refuse, by name, and what they return for empty input."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import locks
from locks import PageList, PageMass, SummaryFormat
from locks.api import resolve_impl
from tests.helpers import DEVICE, IMPLS, ids, listed, normal, paged_cache

FMT = SummaryFormat()
# Distinct sizes everywhere, so that no axis can stand for another.
B, HQ, HKV, D, DV, BLOCKS, BLOCK, COLUMNS, M = 2, 6, 3, 64, 80, 9, 32, 4, 5
BYTES = FMT.layout(D).nbytes


def arguments(name: str) -> dict[str, Any]:
    """Valid keyword arguments of an operation."""
    cache = paged_cache([120, 40], block=BLOCK, heads=HKV, D=D, Dv=DV, extra_columns=0)
    table, lens = cache.block_table, cache.seq_lens
    k, v = (torch.zeros(BLOCKS, HKV, BLOCK, width, device=DEVICE) for width in (D, DV))
    q = normal(B, HQ, D, seed=0)
    records = locks.allocate_records(k, FMT)
    table = table.clamp(min=0)
    common = {"block_table": table, "seq_lens": lens, "debug": False}
    if name == "allocate_records":
        return {"k_cache": k, "fmt": FMT}
    if name == "summarize":
        start = torch.zeros(B, dtype=torch.int32, device=DEVICE)
        return {"k_cache": k, "fmt": FMT, "start": start, "max_new_pages": 2, "out": records, **common}
    if name in ("page_logits", "page_mass"):
        more = {"window_pages": 1} if name == "page_mass" else {}
        return {"q": q, "records": records, "fmt": FMT, **more, **common}
    if name == "page_share":
        mass = PageMass(torch.zeros(B, HQ, 7, device=DEVICE), torch.zeros(B, HQ, device=DEVICE))
        return {"mass": mass, "num_kv_heads": HKV}
    if name == "select_pages":
        share = torch.zeros(B, HKV, 7, device=DEVICE)
        return {"share": share, "seq_lens": lens, "page": 16, "budget": 80, "window_pages": 1}
    if name == "sparse_attention":
        pages = PageList(ids([[0, 1, 2, 3, -1]] * HKV, [[0, 1, -1, -1, -1]] * HKV), ids([4] * HKV, [2] * HKV))
        return {"q": q, "k_cache": k, "v_cache": v, "pages": pages, "page": 16, **common}
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "records": records,
        "fmt": FMT,
        "budget": 80,
        "window_pages": 1,
        **common,
    }


OPERATIONS = (
    "allocate_records",
    "summarize",
    "page_logits",
    "page_mass",
    "page_share",
    "select_pages",
    "sparse_attention",
    "decode",
)
# Every tensor argument: its operations, axes and dtype.
TENSORS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "q": (("page_logits", "page_mass", "sparse_attention", "decode"), "2, 6, 64", "float"),
    "k_cache": (("allocate_records", "summarize", "sparse_attention", "decode"), "9, 3, 32, 64", "float"),
    "v_cache": (("sparse_attention", "decode"), "9, 3, 32, 80", "float"),
    "block_table": (("summarize", "page_logits", "page_mass", "sparse_attention", "decode"), "2, 4", "int32"),
    "seq_lens": (
        ("summarize", "page_logits", "page_mass", "select_pages", "sparse_attention", "decode"),
        "2",
        "int32",
    ),
    "start": (("summarize",), "2", "int32"),
    "out": (("summarize",), "9, 3, 2, 256", "uint8"),
    "records": (("page_logits", "page_mass", "decode"), "9, 3, 2, 256", "uint8"),
    "share": (("select_pages",), "2, 3, 7", "float32"),
    "log_mass": (("page_share",), "2, 6, 7", "float32"),
    "total": (("page_share",), "2, 6", "float32"),
    "page_ids": (("sparse_attention",), "2, 3, 5", "int32"),
    "counts": (("sparse_attention",), "2, 3", "int32"),
}
EACH = [(operation, tensor) for tensor, (operations, _, _) in TENSORS.items() for operation in operations]
# What an error calls an argument where that is not its own name.
ALIAS = {("summarize", "out"): "records"}
FIELDS = {"log_mass": "mass", "total": "mass", "page_ids": "pages", "counts": "pages"}


def get(args: dict[str, Any], tensor: str) -> Any:
    return getattr(args[FIELDS[tensor]], tensor) if tensor in FIELDS else args[tensor]


def put(args: dict[str, Any], tensor: str, value: Any) -> None:
    if tensor in FIELDS:
        args[FIELDS[tensor]] = args[FIELDS[tensor]]._replace(**{tensor: value})
    else:
        args[tensor] = value


def call(operation: str, args: dict[str, Any], **changes: Any) -> Any:
    return getattr(locks, operation)(**(args | changes))


def refused(
    operation: str, args: dict[str, Any], error: type[Exception] | tuple[type[Exception], ...], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(operation, args)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_valid_arguments_are_accepted(operation, impl):
    """What the refusals below are measured against, for values checked on the device too."""
    args = arguments(operation)
    if "debug" in args:
        args["debug"] = True
    call(operation, args, impl=impl)


@pytest.mark.parametrize(("operation", "tensor"), EACH)
@pytest.mark.parametrize("value", [None, [1, 2], 3.0])
def test_no_tensor_is_a_type_error(operation, tensor, value):
    if tensor == "start" and value is None:
        value = "none"
    if tensor == "out" and value is None:
        value = "none"
    args = arguments(operation)
    put(args, tensor, value)
    name = ALIAS.get((operation, tensor), tensor)
    refused(operation, args, TypeError, f"^{name}: expected a tensor .*got {value!r}".replace("[", r"\["))


@pytest.mark.parametrize(("operation", "tensor"), EACH)
def test_another_dtype_is_a_type_error_that_says_both(operation, tensor):
    """Integers for floats, wider integers for int32, and never a silent cast."""
    args = arguments(operation)
    kind = TENSORS[tensor][2]
    other = {"float": torch.float64, "float32": torch.float16, "int32": torch.int64, "uint8": torch.int8}[
        kind
    ]
    put(args, tensor, get(args, tensor).to(other))
    name = ALIAS.get((operation, tensor), tensor)
    got = str(other).removeprefix("torch.")
    refused(operation, args, TypeError, rf"^{name}: expected .*{kind}.* \[.*\], got {got} \[")


@pytest.mark.parametrize(("operation", "tensor"), EACH)
def test_an_axis_too_many_or_too_few_is_a_value_error(operation, tensor):
    name = ALIAS.get((operation, tensor), tensor)
    for change in (lambda x: x[None], lambda x: x[0]):
        args = arguments(operation)
        value = change(get(args, tensor))
        put(args, tensor, value)
        got = str(list(value.shape)).replace("[", r"\[").replace("]", r"\]")
        refused(operation, args, ValueError, rf"^{name}: expected .* \[.*\], got \w+ {got}$")


# Axes that another argument fixes: operation, tensor, axis, and the name the error gives.
FIXED = [
    *(("sparse_attention", "k_cache", axis, "k_cache") for axis in (3,)),
    *(("sparse_attention", "v_cache", axis, "v_cache") for axis in (0, 1, 2)),
    ("sparse_attention", "block_table", 0, "block_table"),
    ("sparse_attention", "seq_lens", 0, "seq_lens"),
    *(("sparse_attention", "page_ids", axis, "page_ids") for axis in (0, 1)),
    *(("sparse_attention", "counts", axis, "counts") for axis in (0, 1)),
    *(("decode", "k_cache", axis, "k_cache") for axis in (3,)),
    *(("decode", "v_cache", axis, "v_cache") for axis in (0, 1, 2)),
    ("decode", "block_table", 0, "block_table"),
    ("decode", "seq_lens", 0, "seq_lens"),
    *(("decode", "records", axis, "records") for axis in (0, 1, 2, 3)),
    *(("page_mass", "records", axis, "records") for axis in (3,)),
    ("page_mass", "block_table", 0, "block_table"),
    ("page_mass", "seq_lens", 0, "seq_lens"),
    *(("page_logits", "records", axis, "records") for axis in (3,)),
    ("page_logits", "seq_lens", 0, "seq_lens"),
    *(("summarize", "out", axis, "records") for axis in (0, 1, 2, 3)),
    ("summarize", "start", 0, "start"),
    ("summarize", "seq_lens", 0, "seq_lens"),
    *(("page_share", "total", axis, "total") for axis in (0, 1)),
    ("select_pages", "seq_lens", 0, "seq_lens"),
]


@pytest.mark.parametrize(("operation", "tensor", "axis", "name"), FIXED)
def test_a_size_that_disagrees_with_another_argument_is_a_value_error(operation, tensor, axis, name):
    args = arguments(operation)
    value = get(args, tensor)
    put(args, tensor, torch.cat([value, value], axis))
    # An axis that nothing fixed so far is called by its name.
    expected = [str(x) if a == axis else rf"({x}|[A-Za-z_ /]+)" for a, x in enumerate(value.shape)]
    got = [str(2 * x) if a == axis else str(x) for a, x in enumerate(value.shape)]
    want = rf"^{name}: expected [\w ]+ \[{', '.join(expected)}\], got \w+ \[{', '.join(got)}\]$"
    refused(operation, args, ValueError, want)


@pytest.mark.parametrize(("operation", "tensor"), EACH)
def test_another_device_is_a_value_error(operation, tensor):
    """The meta device stands for a second one."""
    first = {
        "allocate_records": "k_cache",
        "summarize": "k_cache",
        "page_share": "log_mass",
        "select_pages": "share",
    }
    args = arguments(operation)
    put(args, tensor, get(args, tensor).to("meta"))
    if tensor == first.get(operation, "q"):
        if operation == "allocate_records":
            # There is no other tensor to disagree with.
            assert call("allocate_records", args).device.type == "meta"
            return
        refused(operation, args, ValueError, rf"^\w+: expected device meta, got {DEVICE}")
    else:
        name = ALIAS.get((operation, tensor), tensor)
        refused(operation, args, ValueError, rf"^{name}: expected device {DEVICE}.*, got meta")


@pytest.mark.parametrize(("operation", "tensor"), EACH)
def test_a_last_axis_that_is_not_contiguous_is_a_value_error(operation, tensor):
    """No copy is made in silence."""
    args = arguments(operation)
    value = get(args, tensor)
    put(args, tensor, torch.stack([value, value], -1)[..., 0])
    name = ALIAS.get((operation, tensor), tensor)
    refused(
        operation, args, ValueError, rf"^{name}: expected a contiguous last axis \(stride 1\), got strides \("
    )


@pytest.mark.parametrize("width", [0, 16, 48, 63, 72, 100, 272, 512])
@pytest.mark.parametrize(
    "operation", ["allocate_records", "summarize", "sparse_attention", "page_mass", "page_logits"]
)
def test_a_head_width_that_is_not_supported_is_refused(operation, width):
    args = arguments(operation)
    name = "q" if "q" in args else "k_cache"
    for tensor in ("q", "k_cache"):
        if tensor in args:
            value = args[tensor]
            args[tensor] = value.new_zeros(*value.shape[:-1], width)
    refused(
        operation,
        args,
        ValueError,
        f"^{name}: expected a head width that is a multiple of 16 in 64..256, got {width}$",
    )


@pytest.mark.parametrize("operation", ["sparse_attention", "decode"])
def test_a_value_width_that_is_not_supported_is_refused(operation):
    args = arguments(operation)
    args["v_cache"] = args["v_cache"][..., :40]
    refused(
        operation,
        args,
        ValueError,
        "^v_cache: expected a head width that is a multiple of 16 in 64..256, got 40$",
    )


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
def test_every_head_width_of_the_design_is_accepted(width):
    records = locks.allocate_records(torch.zeros(2, 3, 32, width, device=DEVICE), FMT)
    assert records.shape == (2, 3, 2, FMT.layout(width).nbytes)
    assert records.dtype == torch.uint8
    assert not records.any()
    assert records.device.type == DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_cache_dtype_is_accepted(dtype):
    args = arguments("decode")
    for tensor in ("q", "k_cache", "v_cache"):
        args[tensor] = args[tensor].to(dtype)
    assert call("decode", args, impl="torch").out.dtype == dtype


@pytest.mark.parametrize("tensor", ["k_cache", "v_cache"])
@pytest.mark.parametrize("operation", ["sparse_attention", "decode"])
def test_a_cache_of_another_dtype_than_the_querys_is_refused(operation, tensor):
    args = arguments(operation)
    args[tensor] = args[tensor].to(torch.float16)
    refused(operation, args, TypeError, rf"^{tensor}: expected float32 \[.*\], got float16 \[")


@pytest.mark.parametrize("operation", ["allocate_records", "summarize", "sparse_attention", "decode"])
@pytest.mark.parametrize("block", [0, 8, 24, 40])
def test_a_block_that_does_not_hold_whole_pages_is_refused(operation, block):
    args = arguments(operation)
    for tensor in ("k_cache", "v_cache"):
        if tensor in args:
            value = args[tensor]
            args[tensor] = value.new_zeros(BLOCKS, HKV, block, value.shape[-1])
    message = rf"^k_cache: expected a block size that is a multiple of the page \(16\), got {block}$"
    refused(operation, args, ValueError, message)


@pytest.mark.parametrize("operation", ["page_logits", "page_mass", "sparse_attention", "decode"])
def test_query_heads_that_do_not_divide_are_refused(operation):
    args = arguments(operation)
    args["q"] = args["q"][:, :5]
    refused(operation, args, ValueError, "^q: expected a multiple of Hkv = 3 query heads, got Hq = 5$")


@pytest.mark.parametrize(
    ("operation", "name", "value"),
    [
        ("page_share", "mass", None),
        ("page_share", "mass", 3),
        ("page_share", "mass", torch.zeros(2)),
        # None stands for all pages.
        ("sparse_attention", "pages", 3),
        ("sparse_attention", "pages", torch.zeros(2)),
    ],
)
def test_what_is_no_result_of_the_stage_before_is_refused(operation, name, value):
    args = {**arguments(operation), name: value}
    refused(operation, args, TypeError, rf"^{name}: expected a Page(Mass|List), got ")


@pytest.mark.parametrize("operation", ["page_logits", "page_mass", "sparse_attention", "decode"])
@pytest.mark.parametrize("scale", ["0.1", [0.1], True, math.nan, math.inf])
def test_a_scale_that_is_no_finite_number_is_refused(operation, scale):
    args = {**arguments(operation), "scale": scale}
    refused(operation, args, (TypeError, ValueError), r"^scale: expected a finite number or None, got ")


@pytest.mark.parametrize("heads", [None, 3.0, True, "3"])
def test_a_number_of_kv_heads_that_is_no_int_is_refused(heads):
    args = {**arguments("page_share"), "num_kv_heads": heads}
    refused("page_share", args, TypeError, r"^num_kv_heads: expected an int, got ")


@pytest.mark.parametrize("heads", [0, 4, 5, 7])
def test_a_number_of_kv_heads_that_does_not_divide_is_refused(heads):
    args = {**arguments("page_share"), "num_kv_heads": heads}
    refused(
        "page_share", args, ValueError, f"^q: expected a multiple of Hkv = {heads} query heads, got Hq = 6$"
    )


@pytest.mark.parametrize("operation", ["allocate_records", "summarize", "page_logits", "page_mass", "decode"])
@pytest.mark.parametrize("fmt", [None, 16, {"page": 16}])
def test_what_is_no_format_is_refused(operation, fmt):
    args = {**arguments(operation), "fmt": fmt}
    refused(operation, args, TypeError, "^fmt: expected a SummaryFormat, got ")


@pytest.mark.parametrize("operation", ["page_mass", "select_pages", "decode"])
@pytest.mark.parametrize(
    ("window_pages", "error", "message"),
    [
        (0, ValueError, "expected at least 1, got 0"),
        (-2, ValueError, "expected at least 1, got -2"),
        (1.0, TypeError, "expected an int, got 1.0"),
        (True, TypeError, "expected an int, got True"),
        (None, TypeError, "expected an int, got None"),
    ],
)
def test_a_window_that_is_no_positive_int_is_refused(operation, window_pages, error, message):
    args = {**arguments(operation), "window_pages": window_pages}
    refused(operation, args, error, f"^window_pages: {message}$")


@pytest.mark.parametrize("operation", ["select_pages", "decode"])
@pytest.mark.parametrize(
    ("budget", "window_pages", "error", "message"),
    [
        (
            32,
            1,
            ValueError,
            r"expected at least 48 tokens \(first page, 1 newest, one candidate, 16 tokens each\), got 32",
        ),
        (
            64,
            3,
            ValueError,
            r"expected at least 80 tokens \(first page, 3 newest, one candidate, 16 tokens each\), got 64",
        ),
        (0, 1, ValueError, "expected at least 48 tokens"),
        (-64, 1, ValueError, "expected at least 48 tokens"),
        (49, 1, ValueError, r"expected a multiple of the page \(16 tokens\), got 49"),
        (72, 1, ValueError, r"expected a multiple of the page \(16 tokens\), got 72"),
        (64.0, 1, TypeError, r"expected a number of tokens \(int\), got 64.0"),
        (True, 1, TypeError, r"expected a number of tokens \(int\), got True"),
        (None, 1, TypeError, r"expected a number of tokens \(int\), got None"),
    ],
)
def test_a_budget_that_buys_no_candidate_or_half_a_page_is_refused(
    operation, budget, window_pages, error, message
):
    args = {**arguments(operation), "budget": budget, "window_pages": window_pages}
    refused(operation, args, error, f"^budget: {message}")


@pytest.mark.parametrize(("budget", "window_pages"), [(48, 1), (80, 3)])
def test_the_least_budget_is_accepted_and_buys_one_candidate(budget, window_pages):
    share = torch.zeros(1, 1, 8, device=DEVICE)
    share[..., 2] = 1
    pages = locks.select_pages(share, ids(128), page=16, budget=budget, window_pages=window_pages)
    assert listed(pages) == [0, 2, *range(8 - window_pages, 8)]
    assert pages.page_ids.shape[-1] == budget // 16


@pytest.mark.parametrize("max_new_pages", [0, -1, 1.5, "1", True])
def test_a_bound_on_new_pages_that_is_no_positive_int_is_refused(max_new_pages):
    args = {**arguments("summarize"), "max_new_pages": max_new_pages}
    refused("summarize", args, ValueError, "^max_new_pages: expected at least 1 or None, got ")


@pytest.mark.parametrize("operation", ["select_pages", "sparse_attention"])
@pytest.mark.parametrize("page", [0, -16, 16.0, None, 8, 48])
def test_a_page_that_is_not_supported_is_refused(operation, page):
    args = {**arguments(operation), "page": page}
    refused(operation, args, (ValueError, TypeError), r"^page: expected one of \(16, 32, 64\), got ")


@pytest.mark.parametrize("operation", OPERATIONS[1:])
@pytest.mark.parametrize("impl", ["cuda", "Triton", "", 1])
def test_an_implementation_that_there_is_not_is_refused(operation, impl):
    args = {**arguments(operation), "impl": impl}
    refused(operation, args, ValueError, r"^impl: expected one of \('triton', 'torch'\) or None, got ")


def test_the_implementation_is_triton_on_a_gpu_and_torch_elsewhere():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_impl(None, cpu, torch.float32) == "torch"
    assert resolve_impl(None, cuda, torch.bfloat16) == "triton"
    assert resolve_impl("torch", cuda, torch.float32) == "torch"
    assert resolve_impl("triton", cuda, torch.bfloat16) == "triton"
    assert resolve_impl("torch", cpu, torch.bfloat16) == "torch"


def test_triton_without_a_gpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match=r"^impl: 'triton' needs a CUDA device or TRITON_INTERPRET=1, got tensors on cpu"
    ):
        resolve_impl("triton", torch.device("cpu"), torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_impl("triton", torch.device("cpu"), torch.float32) == "triton"


def test_the_interpreter_refuses_bfloat16(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"^impl: Triton's interpreter computes no bfloat16"):
        resolve_impl("triton", torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("operation", ["summarize", "page_logits", "page_mass", "sparse_attention", "decode"])
@pytest.mark.parametrize(
    ("tensor", "at", "value", "message"),
    [
        ("seq_lens", (1,), -1, r"^seq_lens: expected 0..128 \(the table's room\), got -1 in row 1$"),
        ("seq_lens", (0,), 129, r"^seq_lens: expected 0..128 \(the table's room\), got 129 in row 0$"),
        ("block_table", (1, 1), BLOCKS, r"^block_table: expected block ids 0..8, got 9 at \[1, 1\]$"),
        ("block_table", (0, 3), -1, r"^block_table: expected block ids 0..8, got -1 at \[0, 3\]$"),
    ],
)
def test_debug_checks_lengths_and_block_ids(operation, tensor, at, value, message):
    args = {**arguments(operation), "debug": True}
    args[tensor][at] = value
    refused(operation, args, ValueError, message)


@pytest.mark.parametrize("operation", ["summarize", "page_logits", "page_mass", "sparse_attention", "decode"])
@pytest.mark.parametrize("impl", IMPLS)
def test_debug_accepts_a_full_table_and_any_block_id_behind_a_rows_end(operation, impl):
    """Row 1's 64 tokens fill two of its four blocks of 32."""
    args = {**arguments(operation), "debug": True, "impl": impl}
    args["seq_lens"][0], args["seq_lens"][1] = COLUMNS * BLOCK, 2 * BLOCK
    args["block_table"][1, 2:] = -1
    args["block_table"][0, 0], args["block_table"][0, 1] = 0, BLOCKS - 1
    call(operation, args)


@pytest.mark.parametrize(
    ("tensor", "at", "value", "message"),
    [
        ("counts", (1, 2), M + 1, r"^counts: expected 0..5, got \[\[4, 4, 4\], \[2, 2, 6\]\]$"),
        ("counts", (0, 0), -1, r"^counts: expected 0..5, got \[\[-1, 4, 4\], \[2, 2, 2\]\]$"),
        ("page_ids", (0, 1, 3), 8, "^page_ids: expected ids of pages that the row has"),
        ("page_ids", (1, 0, 1), 3, "^page_ids: expected ids of pages that the row has"),
        ("page_ids", (0, 0, 0), -1, "^page_ids: expected ids of pages that the row has"),
    ],
)
def test_debug_checks_a_page_list(tensor, at, value, message):
    """Row 0 has eight pages, row 1 three."""
    args = {**arguments("sparse_attention"), "debug": True}
    getattr(args["pages"], tensor)[at] = value
    refused("sparse_attention", args, ValueError, message)
    # The last id that each row has, and the longest list, are fine.
    args = {**arguments("sparse_attention"), "debug": True}
    args["pages"].page_ids[0, 0, 4], args["pages"].counts[0, 0] = 7, M
    args["pages"].page_ids[1, 1, 1] = 2
    call("sparse_attention", args)


def test_records_whose_storage_16_bit_numbers_cannot_be_read_from_are_refused():
    args = arguments("page_mass")
    whole = torch.zeros(args["records"].numel() + 64, dtype=torch.uint8, device=DEVICE)
    for shift in (1, 2, 8):
        args["records"] = whole[shift : shift + args["records"].numel()].view(BLOCKS, HKV, 2, BYTES)
        refused(
            "page_mass", args, ValueError, "^records: expected storage aligned to 16 bytes and even strides"
        )
    args["records"] = torch.zeros(BLOCKS, HKV, 2, BYTES + 1, dtype=torch.uint8, device=DEVICE)[..., :BYTES]
    refused(
        "page_mass",
        args,
        ValueError,
        "^records: expected storage aligned to 16 bytes and even strides, got strides",
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_batch_gives_empty_results(impl):
    empty = {"block_table": ids().view(0, COLUMNS), "seq_lens": ids(), "impl": impl}
    for operation in ("page_logits", "page_mass", "sparse_attention", "decode", "summarize"):
        args = arguments(operation) | empty
        if "q" in args:
            args["q"] = args["q"][:0]
        if operation == "summarize":
            args["start"] = ids()
            args["out"][:] = 7
        if operation == "sparse_attention":
            args["pages"] = PageList(*(x[:0] for x in args["pages"]))
        got = call(operation, args)
        if operation == "page_logits":
            assert got.shape == (0, HQ, COLUMNS * BLOCK // 16, 16)
        elif operation == "page_mass":
            assert got.log_mass.shape == (0, HQ, COLUMNS * BLOCK // 16)
            assert got.total.shape == (0, HQ)
        elif operation == "summarize":
            assert (got == 7).all()
        else:
            assert got.out.shape == (0, HQ, DV)
            assert got.lse.shape == (0, HQ)
        if operation == "decode":
            assert got.pages.page_ids.shape == (0, HKV, M)
            assert got.pages.counts.shape == (0, HKV)
    share = torch.zeros(0, HKV, 7, device=DEVICE)
    got = locks.select_pages(share, ids(), page=16, budget=80, impl=impl)
    assert got.page_ids.shape == (0, HKV, M)
    mass = PageMass(torch.zeros(0, HQ, 7, device=DEVICE), torch.zeros(0, HQ, device=DEVICE))
    assert locks.page_share(mass, HKV, impl=impl).shape == (0, HKV, 7)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_without_columns_holds_rows_without_tokens(impl):
    nothing = {"block_table": ids([], []), "seq_lens": ids(0, 0), "impl": impl}
    got = call("decode", arguments("decode") | nothing)
    assert got.out.shape == (B, HQ, DV)
    assert not got.out.any()
    assert got.lse.tolist() == [[-math.inf] * HQ] * B
    assert got.pages.page_ids.tolist() == [[[-1] * M] * HKV] * B
    assert got.pages.counts.tolist() == [[0] * HKV] * B
    mass = call("page_mass", arguments("page_mass") | nothing)
    assert mass.log_mass.shape == (B, HQ, 0)
    assert mass.total.tolist() == [[-math.inf] * HQ] * B
    assert locks.page_share(mass, HKV, impl=impl).shape == (B, HKV, 0)
    assert call("page_logits", arguments("page_logits") | nothing).shape == (B, HQ, 0, 16)
    attended = call("sparse_attention", arguments("sparse_attention") | nothing)
    assert not attended.out.any()
    assert attended.lse.tolist() == [[-math.inf] * HQ] * B
    records = call("summarize", arguments("summarize") | nothing)
    assert not records.any()


def test_summarize_writes_into_its_out_and_makes_zeros_without_one():
    args: dict[str, Any] = {**arguments("summarize"), "impl": "torch"}
    args["k_cache"].normal_()
    assert call("summarize", args) is args["out"]
    assert args["out"].any()
    made = call("summarize", args, out=None, start=None, max_new_pages=None)
    assert made is not args["out"]
    # 7 full pages in row 0 and 2 in row 1, for each head.
    assert int(made.any(-1).sum()) == (7 + 2) * HKV


def test_arguments_behind_the_tensors_are_keyword_only():
    args = arguments("select_pages")
    with pytest.raises(TypeError, match="positional argument"):
        locks.select_pages(args["share"], args["seq_lens"], 16, 80)  # pyright: ignore[reportCallIssue]


def test_importing_the_library_loads_neither_implementation():
    """A machine without triton imports it; each implementation loads when it first runs."""
    code = "import sys, locks; print({'triton', 'locks.torch_impl', 'locks.triton_impl'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
