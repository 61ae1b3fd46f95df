"""Writes grammar.json: stored grammars, as every implementation must walk and follow them.

`python tests/conformance/make_grammar.py`, then read the diff. `tokenizer` is a small byte-level BPE, `files`
are automata (docs/format.md) in base64. A state of `states` is reached by consuming `tokens`: what is forced
there, and where nothing is, the tokens that may follow (bits, the lowest first, in hexadecimal), whether the
answer may end, and what is likely. Masks come from the slow loop here, each token's bytes one by one; masks,
forced and likely tokens are also those of llguidance (tests/runtime/structured/test_stored_grammars.py).

`answers` are rows over the model of tests/support/scripted.py: `runs` and `fed` ([known, draft tokens,
masks]) of each forward come from the Python loop; where no tau decides, the whole answer comes from the slow
loop
here: one token after the other, the best that is allowed.
"""

from __future__ import annotations

import json
import random
import sys
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.loops import outcomes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.automata import walk  # noqa: E402
from support.scripted import Scripted  # noqa: E402

from mars_export import SessionError  # noqa: E402
from mars_export.runtime.decode.config import GenerationConfig  # noqa: E402
from mars_export.runtime.decode.limits import Limits  # noqa: E402
from mars_export.runtime.decode.schedule import Schedule  # noqa: E402
from mars_export.runtime.structured.constrained_sequence import ConstrainedSequence  # noqa: E402
from mars_export.runtime.structured.grammar import SEPARATORS, Grammars  # noqa: E402
from mars_export.runtime.structured.grammar_state import GrammarState  # noqa: E402
from mars_export.runtime.structured.regular.automaton import Automaton  # noqa: E402
from mars_export.runtime.structured.stored_grammars import compile_grammar, to_bytes  # noqa: E402
from mars_export.runtime.structured.vocabulary import Vocabulary  # noqa: E402
from mars_export.runtime.text.dialects import LIST, TAGS  # noqa: E402

MASK, END = 0, 1
PROMPT = [5, 17, 99, 40]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "room": {"enum": ["kitchen", "hall", "salle \u00e0 manger"]},
                    "level": {"type": "integer", "minimum": 0, "maximum": 100},
                    "note": {"type": "string", "maxLength": 12},
                },
                "required": ["room"],
            },
        },
    }
    for name in ("set_light", "set_light_color", "stop")
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": ["integer", "null"]},
     "tags": {"type": "array", "items": {"enum": ["a", "b <|mask|>", "\u00e9t\u00e9"]}, "maxItems": 3},
     "score": {"type": "number"}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}  # fmt: skip
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("tools as a list", {"tools": TOOLS},
     '[{"name": "set_light", "arguments": {"room": "hall", "level": 7}}]'),
    ("tools in tags", {"tools": TOOLS},
     '<tool_call>\n{"name": "stop", "arguments": {"room": "kitchen"}}\n</tool_call>'),
    ("a schema", {"schema": PERSON},
     '{"name": "Zo\u00eb \\"Z\\"", "age": 31, "tags": ["\u00e9t\u00e9", "a"], "score": -1e3, "ok": true}'),
    ("a regex", {"regex": r"[A-Z]{2}[0-9]{4}(-[a-z]+)?"}, "AB1234-xyz"),
    ("choices", {"choice": ("yes", "no", "yes, but", "n\u00f6")}, "yes, but"),
    ("one text", {"choice": ("there is only this answer, {}",)}, "there is only this answer, {}"),
]  # fmt: skip


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|mask|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text for _, _, text in REQUESTS] * 3 + [json.dumps(TOOLS)], trainer)
    return made


@dataclass
class Stored:
    """A grammar as libmars has it, an automaton, and as Python has it, a request for llguidance."""

    automaton: Automaton
    request: GenerationConfig
    grammars: Grammars
    texts: list[bytes]  # of the tokens

    def mask(self, state: int) -> int:
        """The tokens that may follow, as bits: each token's bytes one by one."""
        allowed = [
            t for t, text in enumerate(self.texts) if text and walk(self.automaton, text, state) is not None
        ]
        return sum(1 << token for token in allowed)


def states(stored: Stored, script: list[int], seed: int) -> list[dict[str, Any]]:
    """Along the script, and along random answers."""
    draw = random.Random(seed)
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for path in range(5):
        matcher, tokens, state = stored.grammars.matcher(stored.request), list[int](), 0
        while len(tokens) < 24:
            forced = list(matcher.forced())
            entry: dict[str, Any] = {"tokens": list(tokens), "forced": forced, "may_end": matcher.may_end}
            allowed: list[int] = []
            if not forced:
                likely = matcher.likely()
                mask = matcher.mask()
                allowed = [int(token) for token in mask.nonzero()[0]]
                entry |= {"likely": None if likely is None else list(likely)}
                plain, own = stored.mask(state), sum(1 << token for token in allowed)
                entry["mask"] = own.to_bytes(-(-len(mask) // 8), "little").hex()
                # A text that may begin in several ways begins in one of those that a tokenizer writes.
                edges = stored.automaton.edges[state]
                is_begun = state not in stored.automaton.ends and [e[0] == e[1] for e in edges] == [True]
                assert own == plain or (is_begun and own & plain == own)
            found[tuple(tokens)] = entry
            if forced:
                token = forced[0]
            elif not allowed:
                break
            elif path == 0 and len(tokens) < len(script) and script[len(tokens)] in allowed:
                token = script[len(tokens)]
            else:
                if matcher.may_end and draw.random() < 0.3:
                    break
                short = [t for t in allowed if stored.texts[t].isascii()]
                token = draw.choice(short if short and draw.random() < 0.8 else allowed)
            matcher.consume(token)
            tokens.append(token)
            after = walk(stored.automaton, stored.texts[token], state)
            assert after is not None
            state = after
    return list(found.values())


def config_of(case: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(
        tau=case["tau"],
        max_new_tokens=case["max_new_tokens"],
        masks=case["masks"],
        prompt_lookup=case["prompt_lookup"],
    )


def slow_answer(case: dict[str, Any], stored: Stored) -> list[int]:
    """One token after the other: what is forced, else the best that is allowed."""
    model = model_of(case, len(stored.texts))
    matcher, answer, queue = stored.grammars.matcher(stored.request), list[int](), list[int]()
    while len(answer) < case["max_new_tokens"]:
        queue = queue or list(matcher.forced())
        at = len(PROMPT) + len(answer)
        if queue:
            token = queue.pop(0)
        elif matcher.is_over:
            return [*answer, END]
        else:
            mask = matcher.mask()
            allowed = {int(t) for t in mask.nonzero()[0]} | ({END} if matcher.may_end else set())
            first, _ = model.wanted([MASK + 1] * at, 0)
            order = model.likeliest(at, first, max(case["top_k"], 1))
            known = next((t for t in order if t in allowed), None)
            if known is None:
                logits = model.logits(at, first)
                known = max(sorted(allowed), key=lambda t: (float(logits[t]), -t))
            token = known
        answer.append(token)
        if token == END:
            return answer
        matcher.consume(token)
    return answer


def model_of(case: dict[str, Any], vocab_size: int) -> Scripted:
    return Scripted(
        case["script"], len(PROMPT), vocab_size, case["seed"], case["top_k"], case["logits"],
        case["max_slots"],
    )  # fmt: skip


def ran(case: dict[str, Any], stored: Stored) -> dict[str, Any]:
    model, matcher = model_of(case, len(stored.texts)), stored.grammars.matcher(stored.request)
    grammar_state = GrammarState(matcher, [END], case["logits"], case["block"] - 1)
    row = ConstrainedSequence(0, PROMPT, config_of(case), [END], grammar_state=grammar_state)
    schedule = Schedule(model, case["block"], MASK, Limits.of_rows(1))
    schedule.add(row)
    runs, error = [], None
    while not schedule.is_idle:
        for event in outcomes(schedule):
            error = error or event.error
            if event.error is None:
                runs.append(list(event.token_ids))
    if error is not None and not isinstance(error, SessionError):
        raise error
    fed = []
    for step in model.steps:
        known, masks = int(step.output_index[0, 0]) + 1, int((step.input_ids == MASK).sum())
        fed.append([known, step.slots - known - masks, masks])
    return {
        "runs": runs, "fed": fed, "error": None if error is None else str(error),
        "finish_reason": row.finish_reason, "forced": row.stats.forced,
        "draft_tokens": row.stats.draft_tokens,
        "accepted_draft_tokens": row.stats.accepted_draft_tokens, "forwards": row.stats.forwards,
    }  # fmt: skip


def lines(value: dict[str, Any]) -> str:
    """JSON with one file or answer a line."""

    def text(part: Any) -> str:
        is_list = isinstance(part, list) and isinstance(part[0], dict)
        return "[\n" + ",\n".join(map(json.dumps, part)) + "\n]" if is_list else json.dumps(part)

    return "{\n" + ",\n".join(f'"{name}": {text(part)}' for name, part in value.items()) + "\n}\n"


def main() -> None:
    made = tokenizer()
    vocab_size = made.get_vocab_size() + 4  # padded beyond the tokenizer
    vocabulary = Vocabulary(made, vocab_size, [END])
    draw = random.Random(2611)
    files, answers = [], []
    for number, (name, request, text) in enumerate(REQUESTS):
        config = GenerationConfig(**request)
        dialect = TAGS if "tags" in name else LIST
        automaton = compile_grammar(config, dialect, SEPARATORS)
        stored = Stored(automaton, config, Grammars(vocabulary, dialect), vocabulary.texts)
        script = vocabulary.write(text.encode("utf-8"))
        assert walk(automaton, text.encode("utf-8")) in automaton.ends, text
        content = b64encode(to_bytes(automaton)).decode("ascii")
        file = {
            "name": name,
            "dialect": "list" if dialect.is_list else "tags",
            "request": request,
            "file": content,
        }
        files.append(file | {"states": states(stored, script, number)})
        for i in range(14):
            case: dict[str, Any] = {"name": f"{name} {i}", "grammar": number, "seed": draw.randrange(2**32)}
            case["script"] = [*script, END]
            case["tau"] = (None, 1.0, 0.95, 0.6)[i % 4]
            case["top_k"] = draw.choice([0, 4, 4])
            case["logits"] = case["top_k"] == 0 or draw.random() < 0.7
            case["block"] = draw.choice([2, 4, 8])
            case["masks"] = draw.choice(["full", "full", 2])
            case["max_new_tokens"] = draw.choice([3, 60, 60, 60])
            case["max_slots"] = draw.choice([None, None, 16])
            case["prompt_lookup"] = 2 if case["tau"] is None and draw.random() < 0.3 else 0
            case["expected"] = ran(case, stored)
            whole = [token for run in case["expected"]["runs"] for token in run]
            if case["expected"]["error"] is None and case["tau"] in (None, 1.0):
                assert whole == slow_answer(case, stored), case["name"]
            answers.append(case)
    value = {
        "mask": MASK, "end": END, "prompt": PROMPT, "vocab_size": vocab_size,
        "tokenizer": made.to_str(), "files": files, "answers": answers,
    }  # fmt: skip
    (HERE / "grammar.json").write_text(lines(value))


if __name__ == "__main__":
    main()
