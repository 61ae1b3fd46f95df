"""The statistics in a reply: `usage`, `mars` and `timings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....decode.stats import Stats
from ..admission import Admitted
from ..choice import Choice

MS = 1000.0


def usage(admitted: Admitted, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts as in OpenAI's API. A prompt with several answers counts once."""
    stats = _stats(admitted)
    prompts = stats[:: admitted.ask.n]
    num_prompt = sum(s.prompt_tokens for s in prompts)
    num_new, verified = sum(s.tokens for s in stats), sum(s.verified for s in stats)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_thinking for choice in choices),
            "accepted_prediction_tokens": verified,
            "rejected_prediction_tokens": sum(s.proposed for s in stats) - verified,
        },
    }


def settings(admitted: Admitted, choices: Sequence[Choice] = ()) -> dict[str, Any]:
    """The settings in use; those of a stream may have been changed since it began."""
    first, config = admitted.requests[0], admitted.config
    is_unchanged = (first.exact, first.tau) == (config.exact, config.tau)
    values: dict[str, Any] = {
        "exact": first.exact,
        "tau": first.tau,
        "metric": config.metric,
        "profile": admitted.profile if is_unchanged else None,
        "window": config.window,
        "level": admitted.level,
    }
    if not config.is_greedy:
        values["seed"] = config.seed
    if choices:
        reasons = ["stop" if choice.is_cut else choice.reason for choice in choices]
        values["finish_reason"] = reasons[0] if len(reasons) == 1 else reasons
    return values


def timings(admitted: Admitted) -> dict[str, Any]:
    """Times in milliseconds with the names of llama-server. Several answers: sums of counts,
    longest times.
    """
    stats = _stats(admitted)
    tokens, forwards = sum(s.tokens for s in stats), sum(s.forwards for s in stats)
    seconds = max(s.decode_time for s in stats)
    later = sum(s.tokens_after_first for s in stats)
    return {
        "prompt_n": sum(s.prompt_tokens - s.cached_tokens for s in stats[:: admitted.ask.n]),
        "prompt_ms": round(MS * max(s.prefill_time for s in stats), 3),
        "cached_n": sum(s.cached_tokens for s in stats[:: admitted.ask.n]),
        "predicted_n": tokens,
        "predicted_ms": round(MS * seconds, 3),
        "predicted_per_second": round(later / seconds, 3) if seconds > 0 else 0.0,
        "forwards": forwards,
        "tokens_per_forward": round(tokens / forwards, 4) if forwards else 0.0,
        "queue_ms": round(MS * max(s.queue_time for s in stats), 3),
    }


def _stats(admitted: Admitted) -> list[Stats]:
    return [request.stats for request in admitted.requests]
