"""Page-local compact key summaries for long-context decoding."""

from locks.api import (
    allocate_records,
    decode,
    page_logits,
    page_mass,
    page_share,
    select_pages,
    sparse_attention,
    summarize,
)
from locks.decoder import Decoder
from locks.format import SummaryFormat
from locks.types import Attended, Certificate, Decoded, Factors, PageList, PageMass, Record

__all__ = [
    "Attended",
    "Certificate",
    "Decoded",
    "Decoder",
    "Factors",
    "PageList",
    "PageMass",
    "Record",
    "SummaryFormat",
    "allocate_records",
    "decode",
    "page_logits",
    "page_mass",
    "page_share",
    "select_pages",
    "sparse_attention",
    "summarize",
]
