"""Plain English where people read it: pages, `--help`, errors, comments. Phrases that stay out, and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache

from support import prose
from support.missing import need
from support.paths import ROOT
from support.prose import Passage

FRONT = "(?:proxy|balancer|gateway|address|firewall|front|ingress|Ingress|door)"  # a server is behind one
# A pattern, and what to write instead. They are of readers' reports on earlier texts: right by grammar, but
# no idiom, so that a reader stops.
PHRASES = {
    rf"(?<!left )(?<!leave )\bbehind\b(?! (?:an?|the|one|your|its)\b[\w' -]*\b{FRONT}\b)": "after",
    r"\b(?:what|which|that) (?:is|are) none\b": "name the case: invalid, missing, not a ...",
    r"\b(?:what|which|that) (?:is|are|was|were) no (?!longer|more|less|other)": "is not a ...",
    r"(?<![Tt]here )\bis no (?!longer|more|less|later|other|room|limit)": "is not a ...",
    r"\bheld (?:against|to)\b": "compared with, tested against",
    r"\b(?:can|cannot|could|may) be had\b": "is available",
    r"\b(?:is|are|was|were) (?:said|heard)\b": "is reported, is documented",
    r"\b(?:nobody|somebody|anybody|whoever|whomever)\b": "name the actor",
    r"\bno one('s)?\b": "name the actor",
    r"\bhands know\b": "familiar",
    r"^Who\b(?!.*\?)|\bWho (?:knows|has)\b": "if you ...",
    r"\ba mere\b": "only",
    r"\bWhose\b(?!.*\?)": "which ...",
    r"(?<!instead )\bof before\b": "older, earlier",
    r"\bof then\b|\bof (?:today|yesterday)'s\b": "of that version, of that date",
    r"\b[Kk]now(?:s)? (?:no|nothing|neither|only|of no)\b": "say what the module is for",
    r"\b(?:bears|borne)\b": "tolerates, supports",
    r"\banew\b": "again",
    r"\bvouch": "guarantee",
    r"\b(?:is|are|was|were|be) told\b": "is reported, is documented",
    r"\btells? its\b|\bwants? to hear\b": "reports",
    r"\bso many\b(?! that)": "N, that many",
    r"\b(?:what|that|which) lies?\b|\blies? (?:beside|there|where|on disk)\b|\bwherever \w+ lies?\b": "is",
    r"\b[Ww]here (?:there (?:is|are|was)|that is|it is none|none is|none are)\b": "if, when",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bidler\b|\bidlest\b": "less busy, least busy",
    r"\bfarewell\b": "shutdown message",
    r"\bWhat is so\b|\bthat is so\b": "state it",
    r"\bmakers\b": "developers, vendor",
    r"\bof ours\b|\bof theirs\b": "mars-export's, of mars-export",
    r"\bas (?:it|they|its author|one) likes?\b": "any",
    r"\bwith a word\b|\band a word\b|\bby a word\b": "with a warning",
    r"\bbelongs? into\b": "belongs in",
    r"\bin the place of\b": "instead of",
    r"\bby lot\b": "at random",
    r"\b(?:therein|thereof|whereof|wherein|whereby|whence|thence|hereby|thereby|herein)\b": "say it directly",
    r"\b[Ww]hat (?:passes|counts|fits|stays|lacks)\b": "name the thing: the settings that pass, ...",
    r"\bover there\b": "there",
    r"\bdear(?:er)?\b": "more expensive, slower",
    r"\bfor ever\b": "forever",
    r"\bthe very\b": "the same, exactly the",
    r"\bbut for\b": "except",
    r"\bha(?:s|ve) not (?:the|a|an|its|their)\b": "does not have",
    r"\b(?:what|that|which) (?:is|are|was|were) there\b": "exists, is present",
    r"\b(?:what|that) (?:is|was) (?:said|told)\b": "the text, the message",
    r"\b(?:gone|went) bad\b|\bgoes bad\b": "is invalid",
    r"\btwins?\b": "counterpart",
    r"\ba stranger\b|\bof strangers\b": "a new user, an untrusted source",
    r"\blooks? after\b|\bsees to it\b": "manages, ensures",
    r"\bat its word\b|\bkeeps? its word\b|\btaken at\b": "trusted",
    r"\bby reckoning\b|\breckoned\b": "estimated",
    r"\basks? (?:it|them) (?:nothing|for nothing)\b": "does not use",
    r"\bcomes? to stand\b|\bcame to stand\b|\bstands? for itself\b": "is",
}
PAGES = sorted(
    {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "exporter/default").rglob("*.md"),
        *(ROOT / "runtime/serve/web").iterdir(),
    }
)
SOURCES = sorted(
    {
        *ROOT.glob("*.py"),
        *(
            path
            for package in ("runtime", "exporter", "calibration", "examples")
            for path in (ROOT / package).rglob("*.py")
        ),
        *(
            path
            for package in ("runtime/cpp", "examples")
            for path in (ROOT / package).rglob("*.*")
            if path.suffix in {".cpp", ".hpp", ".h"}
        ),
    }
)


def problems(passages: Iterable[Passage]) -> str:
    """A line for each phrase, with the words around it."""
    found = [
        f"{passage.where}: ...{passage.text[max(0, hit.start() - 40) : hit.end() + 40]}...\n"
        f"    '{hit[0]}': {instead}"
        for passage in passages
        for pattern, instead in PHRASES.items()
        for hit in re.finditer(pattern, passage.text)
    ]
    return "\n".join([f"{len(found)} phrases", *found] if found else [])


@cache
def sources() -> list[Passage]:
    return [
        *itertools.chain.from_iterable((prose.python if p.suffix == ".py" else prose.cpp)(p) for p in SOURCES)
    ]


def in_sources(*kinds: str) -> Iterator[Passage]:
    return (passage for passage in sources() if passage.kind in kinds)


def test_the_check_itself() -> None:
    def of(text: str) -> str:
        return problems([Passage("file:1", "comment", text)])

    assert "'behind': after" in of("the step behind it")
    assert "'of before'" in of("bundles of before keep their graph")
    assert not of("a server behind a reverse proxy, before it instead of before; nothing is left behind")
    assert len(list(in_sources("comment"))) > 1000
    assert len(list(in_sources("docstring", "string"))) > 5000


def test_pages() -> None:
    pages = ((prose.markdown if page.suffix == ".md" else prose.html)(page) for page in PAGES)
    found = problems(itertools.chain.from_iterable(pages))
    assert not found, found


def test_help() -> None:
    found = problems(prose.helps())
    assert not found, found


def test_errors() -> None:
    found = problems(in_sources("string"))
    assert not found, found


def test_comments() -> None:
    found = problems(in_sources("comment", "docstring"))
    assert not found, found


def test_the_readme_is_easy_to_read() -> None:
    """By the Automated Readability Index, which counts letters, not syllables."""
    need("textstat", "dev")
    import textstat

    text = " ".join(
        passage.text
        for passage in prose.markdown(ROOT / "README.md")
        if not passage.text.startswith(("|", "#"))
    )
    assert textstat.automated_readability_index(text) <= 11, "easy for a reader of 17"
    assert textstat.words_per_sentence(text) <= 18
