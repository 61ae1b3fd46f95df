"""A reply in any protocol: its choices, and its statistics `usage`, `mars` and `timings`."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from time import time
from typing import Any

from ..admission import Admitted
from ..choice import Choice, Delta

MS = 1000.0


class Serializer(ABC):
    """The answers to one request, in the order of its requests. Its id begins with `prefix`."""

    def __init__(self, admitted: Admitted, prefix: str) -> None:
        self.admitted, self.api_request = admitted, admitted.api_request
        self.id, self.created = f"{prefix}{secrets.token_hex(16)}", int(time())
        session = admitted.model.session
        self.choices = [
            Choice(i, request, self.api_request, session) for i, request in enumerate(admitted.requests)
        ]

    @property
    def is_over(self) -> bool:
        return all(choice.is_over for choice in self.choices)

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The body of a finished reply."""

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream."""

    @abstractmethod
    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """The chunks for an event, possibly none; the last ones at the end."""

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that failed, from the body of the error."""
        return body

    # --- statistics ---

    def usage(self) -> dict[str, Any]:
        """Token counts as in OpenAI's API. A prompt with several answers counts once."""
        stats = [request.stats for request in self.admitted.requests]
        prompts = stats[:: self.api_request.n]
        num_prompt = sum(s.prompt_tokens for s in prompts)
        num_new, verified = sum(s.tokens for s in stats), sum(s.accepted_draft_tokens for s in stats)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.num_thinking for choice in self.choices),
                "accepted_prediction_tokens": verified,
                "rejected_prediction_tokens": sum(s.draft_tokens for s in stats) - verified,
            },
        }

    def settings(self) -> dict[str, Any]:
        """The settings in use; those of a stream may have been changed since it began."""
        admitted, first, config = self.admitted, self.admitted.requests[0], self.admitted.config
        is_unchanged = (first.exact, first.tau) == (config.exact, config.tau)
        values: dict[str, Any] = {
            "exact": first.exact,
            "tau": first.tau,
            "metric": config.metric,
            "profile": admitted.profile if is_unchanged else None,
            "masks": config.masks,
        }
        return values if config.is_greedy else values | {"seed": config.seed}

    def timings(self) -> dict[str, Any]:
        """Times in milliseconds with the names of llama-server. Several answers: sums of counts, longest
        times.
        """
        stats = [request.stats for request in self.admitted.requests]
        tokens, forwards = sum(s.tokens for s in stats), sum(s.forwards for s in stats)
        seconds = max(s.decode_time for s in stats)
        later = sum(s.tokens_after_first for s in stats)
        prompts = stats[:: self.api_request.n]
        return {
            "prompt_n": sum(s.prompt_tokens - s.cached_tokens for s in prompts),
            "prompt_ms": round(MS * max(s.prefill_time for s in stats), 3),
            "cached_n": sum(s.cached_tokens for s in prompts),
            "predicted_n": tokens,
            "predicted_ms": round(MS * seconds, 3),
            "predicted_per_second": round(later / seconds, 3) if seconds > 0 else 0.0,
            "forwards": forwards,
            "tokens_per_forward": round(tokens / forwards, 4) if forwards else 0.0,
            "queue_ms": round(MS * max(s.queue_time for s in stats), 3),
        }

    def statistics(self) -> dict[str, Any]:
        """`mars` and `timings` of a finished reply."""
        reasons = ["stop" if choice.is_full else choice.reason for choice in self.choices]
        reason = reasons[0] if len(reasons) == 1 else reasons
        return {"mars": {**self.settings(), "finish_reason": reason}, "timings": self.timings()}
