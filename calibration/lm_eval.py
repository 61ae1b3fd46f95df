"""The model class of lm-evaluation-harness: its only home, imported by the harness (entry point lm_eval.models) or run as a module.

A harness that finds entry points takes `lm_eval --model mars_export`; 0.4.13 and before do not look for them, and there
`python -m mars_export.calibration.lm_eval` takes the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from ..runtime.errors import CalibrationError
from .harness import NO_LIKELIHOOD, Answers


@register_model("mars_export")
class MarsLM(LM):  # type: ignore[misc]
    """A bundle at one setting: --model_args bundle=PATH,tau=0.95 or profile=NAME; also metric, threads, max_gen_toks, run_on.

    `run_on` is cpu or cuda. The harness passes a `device` whether its user gave one or not, a GPU by default, so that is not heeded.
    """

    def __init__(
        self, bundle: str, tau: float | None = None, metric: str | None = None, profile: str | None = None, max_gen_toks: int = 256,
        run_on: str = "cpu", threads: int | None = None, batch_size: int | str = 1, max_batch_size: int | None = None,
        device: str | None = None,  # noqa: ARG002
    ) -> None:  # fmt: skip
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
            raise CalibrationError(
                f"batch_size must be a positive number, not {batch_size}; automatic sizes are not supported"
            )
        self.answers = Answers.open(
            str(bundle), tau, metric, profile, max_gen_toks, run_on, threads, int(batch_size)
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        return self.answers.answer([request.args for request in requests])

    def loglikelihood(self, requests: Sequence[Any]) -> Any:  # noqa: ARG002
        raise CalibrationError(NO_LIKELIHOOD)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> Any:  # noqa: ARG002
        raise CalibrationError(NO_LIKELIHOOD)

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.answers.render(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        return self.answers.tokenizer_name


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
