"""Chat templates that are tables of turns, and tables that are wrong."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, models

from mars_export.exporter.checkpoint.vocabulary import Vocabulary
from mars_export.exporter.turns import derive_chat_turns
from mars_export.runtime.bundle.turns import START, ChatTurns
from mars_export.runtime.text.tokenizer import Text
from support import tiny

ALL = ("system", "user", "assistant", "tool")


SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    + tiny.CHAT_TEMPLATE
)


TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n"
    "{% if m.role == 'user' %}{{ m.content | trim }}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)


ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set note = messages[0].content + '\n\n' %}"
    "{% else %}{% set rest = messages %}{% set note = '' %}{% endif %}{{ bos_token }}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first %}{{ note }}{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


THINKING = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > last.user and loop.last %}<think>\n\n</think>\n\n"
    "{% endif %}"
    "{{ text }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


GROUPED_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}<|im_start|>assistant\n"
)


def large() -> str:
    """A template as long as those of current models with thinking and tools, about 4,000 characters."""
    tags = "".join(
        f"{{% elif m.role == 'note{i}' %}}{{% set content = m.content | trim %}}<note{i}>{{{{ content }}}}"
        f"{{% if m.reasoning_content is defined %}}{{{{ m.reasoning_content }}}}{{% endif %}}</note{i}>\n"
        for i in range(20)
    )
    return (
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
        "{% if m.role in ('system', 'user', 'assistant') %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + tags + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )


GOOD_ONES = {
    "chatml": (tiny.CHAT_TEMPLATE, ALL, ALL),
    "default-system": (SYSTEM_FIRST, ALL, ALL),
    "trimmed": (TRIMMED, ALL, ALL),
    "alternating": (ALTERNATING, ("system", "user", "assistant"), ("user", "assistant")),
    "no-system": (NO_SYSTEM, ("user", "assistant"), ("user", "assistant")),
    "thinking": (THINKING, ALL, ("system", "user", "tool")),
    "grouped-tools": (GROUPED_TOOLS, ALL, ALL),
}


def vocabulary(template: str | None) -> Vocabulary:
    return Vocabulary("", 1, "<mask>", (2,), 2, "<s>", "</s>", template)


def text_of(template: str) -> Text:
    return tiny.text(Tokenizer(models.BPE()), template, "<s>", "</s>")


@cache
def derived(template: str | None) -> ChatTurns | None:
    return derive_chat_turns(vocabulary(template))


TURNS = ChatTurns({START: {"user": ""}, "user": {"user": "|"}}, {"user": "!"}, ("user",), ("</think>",))


WRONG_TABLES: list[tuple[str, Any, str]] = [
    ("between", [], "between: an object is expected"),
    ("between", {"start": {"user": 1}}, "between.start.user: a string is expected"),
    ("between", {"start": "user"}, "between.start: an object is expected"),
    ("between", {"user": {"user": ""}}, "a text at the start and one after the last message are needed"),
    ("after", {}, "a text at the start and one after the last message are needed"),
    ("after", {"user": None}, "after.user: a string is expected"),
    ("trimmed", "user", "trimmed: a list is expected"),
    ("reserved", [1], r"reserved.*strings? (is|are) expected"),
]
