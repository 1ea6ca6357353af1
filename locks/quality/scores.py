"""Scores that several tasks share. Each takes what was generated and returns a share of what is right, 0 to 1."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence


def match_all(generated: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in what was generated, whatever their case (RULER)."""
    found = generated.lower()
    return sum(answer.lower() in found for answer in answers) / len(answers)


def match_part(generated: str, answers: Sequence[str]) -> float:
    """1 where any of the answers occurs in what was generated, whatever its case (RULER's question answering)."""
    found = generated.lower()
    return float(any(answer.lower() in found for answer in answers))


def f1(generated: Sequence[str], answer: Sequence[str]) -> float:
    """Harmonic mean of precision and recall, tokens counted as often as they occur."""
    common = sum((Counter(generated) & Counter(answer)).values())
    # 2 p r / (p + r) with p = common / len(generated) and r = common / len(answer).
    return 2 * common / (len(generated) + len(answer)) if common else 0.0


def plain_words(text: str) -> list[str]:
    """Lower-case words without punctuation and without English articles (SQuAD's normal form)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


# LongBench's list of Chinese punctuation.
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def plain_chinese(text: str) -> str:
    """Lower-case text without punctuation of either kind and without white space."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation + _CHINESE))
    return "".join(bare.split())
