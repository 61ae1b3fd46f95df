"""Derives a table of turns from a jinja2 chat template, for runtimes without jinja2.

A table is written only if it renders the same text as the template in every conversation that is tried.
Finds the marks around thinking and the control tokens, too.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tokenizers import Tokenizer, models

from ..runtime.bundle.manifest import TextInfo
from ..runtime.bundle.turns import START, SWITCH, ChatTurns, ThinkingMarks
from ..runtime.errors import BundleError, CheckpointError, SessionError
from ..runtime.text.dialects import dialect_of
from ..runtime.text.tokenizer import Text
from .checkpoint.vocabulary import Vocabulary

# Tried in this order: all common roles, then without the ones that many templates treat specially.
ROLE_SETS = (
    ("system", "user", "assistant", "tool"),
    ("system", "user", "assistant"),
    ("user", "assistant"),
    ("user",),
)
MAX_PATTERN = 4  # messages; every sequence of roles up to this length is rendered
NUM_RANDOM, MAX_RANDOM = 300, 10
SPACED = "\u00a0 \n{}\t \n\u2028"
STRING_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
CONTENTS = (
    "",
    "a",
    " ",
    "\n",
    "  x \n\n",
    "é日本🙂\u0301",
    "{{ x }} {% if %}",
    "'\"\\n\\",
    "<s>",
    "</s>",
    "[INST]",
    "\u2028\x85\u00a0",
    "None",
    "0",
    "[]",
    "\r\n",
)
# Around thinking, in the templates of model families.
KNOWN_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)

Render = Callable[[Sequence[Mapping[str, str]]], str | None]


def derive_chat_turns(vocabulary: Vocabulary) -> ChatTurns | None:
    """The table whose text equals the chat template's for every conversation that the table can render.

    None if there is no template, if it asks for the date, or if its text depends on more than neighbouring
    roles. Raises CheckpointError if the template is not valid jinja2.
    """
    source = vocabulary.chat_template
    if source is None:
        return None
    try:
        text = _text(vocabulary, source)
    except BundleError as error:
        raise CheckpointError(
            str(error).replace(
                "export again with a corrected template", "correct chat_template and export again"
            )
        ) from error
    if "strftime_now" in source:
        return None
    render = _rendering(text)
    for roles in ROLE_SETS:
        # Templates may treat an answer at the end of a conversation as one that is still being written.
        for ends in (roles, tuple(role for role in roles if role != "assistant")):
            turns = _observed(render, roles, ends)
            turns = turns and _with_trimmed(render, turns)
            turns = turns and _with_reserved(render, turns, source)
            if turns and _is_proven(render, turns, source):
                return turns
    return None


def _text(vocabulary: Vocabulary, source: str) -> Text:
    bos, eos = vocabulary.bos_token, vocabulary.eos_token
    info = TextInfo("", source, bos, eos, special_tokens=vocabulary.special_tokens)
    return Text(Tokenizer(models.BPE()), info)


def _rendering(text: Text, **template: object) -> Render:
    def render(messages: Sequence[Mapping[str, str]]) -> str | None:
        try:
            return text.render(messages, template=template)
        except SessionError:
            return None

    return render


def _observed(render: Render, roles: Sequence[str], ends: Sequence[str]) -> ChatTurns | None:
    """The text between two message contents; None if it depends on more than their roles."""
    between: dict[str, dict[str, str]] = {}
    after: dict[str, str] = {}
    patterns = [
        p for n in range(1, MAX_PATTERN + 1) for p in itertools.product(roles, repeat=n) if p[-1] in ends
    ]
    for pattern in patterns:
        contents = [f"q{i}mars{i}z" for i in range(len(pattern))]
        text = render(_conversation(pattern, contents))
        # The table does not cover a conversation that the template refuses or whose contents it changes.
        if text is None or re.findall("|".join(contents), text) != contents:
            continue
        parts = re.split("|".join(contents), text)
        for previous, role, part in zip((START, *pattern), pattern, parts, strict=False):
            if between.setdefault(previous, {}).setdefault(role, part) != part:
                return None
        if after.setdefault(pattern[-1], parts[-1]) != parts[-1]:
            return None
    used = {START, *(role for nexts in between.values() for role in nexts)}
    return ChatTurns(between, after) if used == {START, *roles} else None


def _conversation(roles: Sequence[str], contents: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def _patterns(turns: ChatTurns, longest: int) -> Iterator[tuple[str, ...]]:
    """Every sequence of roles that the table can render, shortest first."""
    front: list[tuple[str, ...]] = [()]
    for _ in range(longest):
        front = [(*p, role) for p in front for role in turns.between.get(p[-1] if p else START, {})]
        yield from (p for p in front if p[-1] in turns.after)


def _agrees(render: Render, turns: ChatTurns, conversations: Iterable[list[dict[str, str]]]) -> bool:
    """Whether the template gives the same text for all conversations that the table can render."""
    return all((text := turns.render(c)) is None or text == render(c) for c in conversations)


def _with(pattern: Sequence[str], role: str, content: str) -> list[dict[str, str]]:
    return _conversation(pattern, [content if r == role else "plain" for r in pattern])


def _with_trimmed(render: Render, turns: ChatTurns) -> ChatTurns | None:
    for role in turns.between:
        spaced = [_with(p, role, SPACED.format("x")) for p in _patterns(turns, 3) if role in p]
        if not _agrees(render, turns, spaced):
            turns = replace(turns, trimmed=(*turns.trimmed, role))
            if not _agrees(render, turns, spaced):
                return None
    return turns


def _with_reserved(render: Render, turns: ChatTurns, source: str) -> ChatTurns | None:
    """Add the template's strings that change its behaviour if they are part of a content."""
    patterns = list(_patterns(turns, 2))  # `_is_proven` tries the words in longer ones
    for word in _literals(source):
        contents = (f"a{word}b", f"{word}b", f"a{word}", f"a{word}b{word}c")
        used = (_with(p, role, c) for p in patterns for role in dict.fromkeys(p) for c in contents)
        if not _agrees(render, turns, used):
            if len(word.strip()) < 3:
                return None  # too short: nearly every message contains it
            turns = replace(turns, reserved=(*turns.reserved, word))
    return turns


def _literals(source: str) -> list[str]:
    words = set()
    for literal in STRING_LITERAL.findall(source):
        try:
            words.add(str(ast.literal_eval(literal.replace("\n", "\\n"))))
        except (SyntaxError, ValueError):
            words.add(literal[1:-1])
    return sorted(words - {""}, key=lambda word: (len(word), word))


def _is_proven(render: Render, turns: ChatTurns, source: str) -> bool:
    draw = random.Random(0)
    pieces = [*CONTENTS, *_literals(source)]

    def content() -> str:
        return "".join(draw.choices(pieces, k=draw.randint(0, 3)))

    def walk() -> list[str]:
        roles = [START]
        for _ in range(draw.randint(1, MAX_RANDOM)):
            roles.append(draw.choice([*turns.between.get(roles[-1], ())] or [START]))
        return roles[1:]

    exact = [_conversation(p, [content() for _ in p]) for p in _patterns(turns, MAX_PATTERN)]
    longer = [_conversation(p, [content() for _ in p]) for p in (walk() for _ in range(NUM_RANDOM))]
    return bool(exact) and _agrees(render, turns, exact + longer)


def find_thinking(vocabulary: Vocabulary, turns: ChatTurns | None) -> ThinkingMarks | None:
    """The template's marks of thinking. `turns`: the template's table."""
    template = vocabulary.chat_template or ""
    for marks in KNOWN_MARKS:
        if all(mark in template for mark in marks):
            return ThinkingMarks(*marks, *(_after_with(vocabulary, turns, value) for value in (True, False)))
    return None


def _marks(vocabulary: Vocabulary) -> set[str]:
    """The marks of thinking and of calls, which are a part of answers."""
    template = vocabulary.chat_template or ""
    thinking = next((marks for marks in KNOWN_MARKS if all(mark in template for mark in marks)), ())
    return {*thinking, *dialect_of(vocabulary.tool_template or vocabulary.chat_template).marks}


def with_plain_marks(vocabulary: Vocabulary) -> str:
    """The checkpoint's tokenizer.json. Marks of thinking and of calls are not special in it: texts of answers
    leave special tokens out.
    """
    marks, data = _marks(vocabulary), json.loads(vocabulary.tokenizer_json)
    changed = [t for t in data.get("added_tokens") or [] if t["special"] and t["content"] in marks]
    for token in changed:
        token["special"] = False
    return json.dumps(data, ensure_ascii=False) if changed else vocabulary.tokenizer_json


def find_control_tokens(vocabulary: Vocabulary, turns: ChatTurns | None) -> tuple[str, ...]:
    """The added tokens that are not special in the bundle although the templates write them: in a message
    they could forge a turn, a call or the result of one.
    """
    templates = [vocabulary.chat_template, vocabulary.tool_template]
    written = [template for template in templates if template is not None]
    if turns is not None:
        written += [text for after in (*turns.between.values(), turns.after) for text in after.values()]
    marks = _marks(vocabulary)
    added = Tokenizer.from_str(with_plain_marks(vocabulary)).get_added_tokens_decoder().values()
    return tuple(
        token.content
        for token in added
        if not token.special
        and token.content.strip()
        and (token.content in marks or any(token.content in text for text in written))
    )


def _after_with(vocabulary: Vocabulary, turns: ChatTurns | None, value: bool) -> Mapping[str, str] | None:
    """`after` of the table with this value of `enable_thinking`; None if other text depends on it, too."""
    source = vocabulary.chat_template
    if turns is None or source is None or SWITCH not in source:
        return None
    text = _text(vocabulary, source)
    render = _rendering(text, **{SWITCH: value})
    found = _observed(render, turns.roles, tuple(turns.after))
    if found is None or found.between != turns.between:
        return None
    return found.after if _is_proven(render, replace(turns, after=found.after), source) else None
