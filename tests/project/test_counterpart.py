"""libmars has the runtime's names: the first line of each C++ unit names its Python file, and the classes and
methods of both agree (CONTRIBUTING.md, "The C++ counterpart").
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from support.cpp_names import FUNCTIONS, Names, of_header, of_python, with_bases
from support.paths import ROOT

CPP = ROOT / "runtime" / "cpp"
# Packages in which a change touches both languages; the others are built on different libraries.
BOTH = ("accept", "batcher", "decode", "session", "structured")
# Units with another name than their Python file, and why.
RENAMED = {
    "bundle/bundle": "declares Manifest and Bundle",
    "decode/draft_tokens": "is the first part of drafts.py",
    "decode/estimates": "is the second part of drafts.py",
    "decode/exact_planner": "is the part of planner.py for exact mode",
    "decode/prefill": "is the second class of schedule.py",
    "decode/queue": "is the first class of schedule.py",
    "device/lost": "has one kind of failure",
    "device/ort/open": "is a part of library.py",
    "device/ort/rows": "has rows of ONNX Runtime only",
    "session/answers": "has all answers of a call",
    "session/opened": "is the part of session.py that sessions and streams share",
    "structured/automaton": "has the automaton and its file",
    "text/text": "is the bundle's part of tokenizer.py",
}
# Names that one language has and the other has not, by the reason.
CPP_ONLY: dict[str, str] = {
    "GenerationConfig.bound GenerationConfig.is_exact": "tau and exact are optional fields",
    "GenerationConfig.check Limits.rows": "structs are filled in before they are checked",
    "is_one_of duration_of num_common parse_automaton DraftTokens.is_forced": "an expression",
    "StepForecast.num_draft_tokens Sequence.num_tokens Vocabulary.text TextStream.stopped": "an expression",
    "ThinkingStream.is_over ThinkingStream.size": "an expression",
    "Error DeviceError MemoryError": "Python has built-in exceptions of this kind",
    "Interrupt Interrupted Sequence.watch": "Python ends no running step",
    "check_numbers": "inline in Penalties.of",
    "Choice built_in_cost": "arguments, or a tuple",
    "Accepted event_of": "the public Event is made where it is read, and has no error",
    "Backend.free_memory Backend.max_entries Batch.step_rows": "a step may be split",
    "Batch.num_active PrefixCache.held": "Python reads the attribute",
    "Schedule.num_entries": "Python sums over `running`",
    "Run Schedule.is_in_step": "Python's generators `run` and `Schedule.step`",
    "Sequence.cancel Sequence.expire": "Python has end",
    "Sequence.tau Sequence.set_tau Sequence.set_exact": "Python has change",
    "Sequence.wants_topk ConstrainedSequence.wants_topk": "top-k is copied only if it is read",
    "RequestState Answers Openings NewSequence Opened": "the state that handles share",
    "Prompt Message SessionInfo Session.info": "Python has built-in types and the manifest",
    "Session.config_of_profile Session.decode Session.text_stream Session.warm_up": "Python: profile, text",
    "Stream.next Request.next Request.failed": "Python iterates",
    "Automaton Matcher Walk leaves_a_choice read_automaton": "Python has llguidance",
}
PYTHON_ONLY: dict[str, str] = {
    "Penalties Sequence.penalties Occurrences SampledTokens top_of": "logit_bias, penalties and logprobs",
    "PrefixEntry Copies Cache.upload Cache.download": "the prefix cache on disk",
    "KvBudget.short_entries built_in": "an expression, or another name",
    "GenerationConfig.host_chooses GenerationConfig.logits_field": "only two fields need logits",
    "GenerationConfig.is_structured GenerationConfig.may_think GenerationConfig.structure": "only `grammar`",
    "GenerationConfig.passes GenerationConfig.with_values": "structs are copied and changed",
    "Limits.max_answers Limits.max_of_client Limits.of_rows Stats.copy Stats.to_dict": "inline in C++",
    "AnswerText Sequence.event Sequence.text": "C++ makes events of what was accepted",
    "Schedule.running run": "C++ has counts and `Run`",
    "StepForecast.all_accepted": "a function of exact_planner.cpp",
    "Sequence.change Sequence.is_over": "C++ has set_tau and set_exact; its streams know when they end",
}
SPELLED = {"size": "__len__", "empty": "__bool__", "first": "__iter__"}


def units() -> dict[str, Path]:
    """Each C++ unit by its name, and the file whose first line counts: the header if there is one."""
    files = sorted((CPP / "src").rglob("*.?pp"))
    own = [f for f in files if f.suffix == ".hpp" or not f.with_suffix(".hpp").exists()]
    return {str(f.relative_to(CPP / "src").with_suffix("")): f for f in own}


def counterpart(file: Path) -> str | None:
    """The Python file that the first line names; None if it says that there is none."""
    with file.open(encoding="utf-8") as lines:
        first = next(lines)
    named = re.match(r"// (?:(runtime/\S+\.py)|No Python file): \S", first)
    assert named, f"{file}: the first line must begin with `// runtime/...py: ` or `// No Python file: `"
    return named[1]


@cache
def python_names() -> dict[str, dict[str, Names]]:
    """The names of each file of the runtime."""
    return {str(f.relative_to(ROOT)): of_python(f.read_text("utf-8")) for f in ROOT.glob("runtime/**/*.py")}


@cache
def headers() -> dict[str, dict[str, Names]]:
    """The names of each header of libmars, the public ones included."""
    files = [*(CPP / "src").rglob("*.hpp"), *(CPP / "include").rglob("*.hpp")]
    return {str(f.relative_to(CPP).with_suffix("")): of_header(f.read_text("utf-8")) for f in files}


def cpp_only(python: dict[str, dict[str, Names]]) -> set[str]:
    """`Class`, `Class.method` or `function` of a C++ unit that its Python file has not. Classes may be in
    another file of its folder, and those of a public header in any Python file.
    """
    named = {f"src/{u}": counterpart(file) for u, file in units().items() if u.startswith(BOTH)}
    everywhere = {name: own for names in python.values() for name, own in names.items() if name}
    found: set[str] = set()
    for unit, names in headers().items():
        path = named.get(unit)
        if path is None and not unit.startswith("include/"):
            continue
        own = everywhere
        if path is not None:
            beside = [python[name] for name in python if Path(name).parent == Path(path).parent]
            own = {name: each for names in beside for name, each in names.items()} | python[path]
        for name, cpp in names.items():
            if name == FUNCTIONS:
                found |= cpp.methods - own[FUNCTIONS].methods if path is not None else set()
            elif name not in own:
                found.add(name)
            else:
                have = with_bases(name, {**everywhere, **own}) | _functions_beside(name, python)
                alike = {m for m in cpp.methods if {SPELLED.get(m), m.removeprefix("set_")} & have}
                found |= {f"{name}.{method}" for method in cpp.methods - have - alike}
    return found


def python_only(python: dict[str, dict[str, Names]]) -> set[str]:
    """The same of Python's loop, which libmars has not in any header."""
    classes = {name: own for names in headers().values() for name, own in names.items() if name}
    functions = {method for names in headers().values() for own in names.values() for method in own.methods}
    found: set[str] = set()
    for path, names in python.items():
        if not path.startswith(("runtime/accept.py", "runtime/decode/")):
            continue
        for name, own in names.items():
            if name == FUNCTIONS:
                found |= {method for method in own.methods - functions if not method.startswith("_")}
            elif name not in classes:
                found.add(name)
            else:
                have = with_bases(name, classes)
                found |= {f"{name}.{m}" for m in own.methods - have if f"set_{m}" not in have}
    return found


def _functions_beside(name: str, python: dict[str, dict[str, Names]]) -> set[str]:
    """Functions of the files with this class: they may be methods in C++."""
    return {method for names in python.values() if name in names for method in names[FUNCTIONS].methods}


def listed(table: dict[str, str]) -> set[str]:
    return {name for names in table for name in names.split()}


def test_every_unit_names_its_python_file() -> None:
    found = {unit: counterpart(file) for unit, file in units().items()}
    assert len(found) > 60
    assert not {path for path in found.values() if path and not (ROOT / path).is_file()}
    other = {unit for unit, path in found.items() if path and Path(path).stem != Path(unit).name}
    assert other == set(RENAMED)


def test_cpp_has_no_other_names_than_python() -> None:
    assert cpp_only(python_names()) == listed(CPP_ONLY)


def test_python_s_loop_has_no_other_names_than_cpp() -> None:
    assert python_only(python_names()) == listed(PYTHON_ONLY)


def test_a_name_that_changes_in_python_only_is_found() -> None:
    path = "runtime/decode/schedule.py"
    changed = of_python((ROOT / path).read_text("utf-8").replace("def add(", "def welcome("))
    assert cpp_only(python_names() | {path: changed}) - listed(CPP_ONLY)
