"""Similarity of texts: ROUGE-L, F1 of words, BLEU and chrF, by the usual libraries, imported on first use."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any


def is_there(library: str) -> bool:
    return find_spec(library) is not None


def rouge_l(output: str, answer: str) -> float:
    """F1 of the longest common subsequence of words."""
    return _rouge("rougeL", output, answer)


def token_f1(output: str, answer: str) -> float:
    """F1 of the common words in any order (ROUGE-1)."""
    return _rouge("rouge1", output, answer)


def bleu(output: str, answer: str) -> float:
    """BLEU of one text, with the orders of n-grams that it has (sacrebleu's sentence score)."""
    import sacrebleu

    return _share(sacrebleu.sentence_bleu(output, [answer], use_effective_order=True).score / 100)


def chrf(output: str, answer: str) -> float:
    """chrF2: F2 of character n-grams."""
    import sacrebleu

    return _share(sacrebleu.sentence_chrf(output, [answer]).score / 100)


def _rouge(kind: str, output: str, answer: str) -> float:
    return _share(_scorer().score(answer, output)[kind].fmeasure)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL", "rouge1"])


def _share(value: float) -> float:
    """Clip to 0 ... 1, because floating point may exceed 1."""
    return min(max(float(value), 0.0), 1.0)
