"""`make check` makes the whole environment of its tests: no test module needs a package that its command does
not install, directly or as a requirement of another, even if it is installed here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.imports import at_module_level, foreign
from support.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FOLDERS = ("tests", "benchmarks")
# Run in the environments of other systems: benchmarks/peers/catalog.py, and PyTorch's on a GPU machine.
ELSEWHERE = ("benchmarks/gpu/", "benchmarks/peers/", "tests/ray/")
OWN = {"mars_export", "mars_export_kernels", "mars_export_default"}


providers = cache(packages_distributions)


def variable(name: str) -> str:
    (value,) = re.findall(rf"^{name} \??= (.+)$", MAKEFILE, flags=re.M)
    return str(value).replace("$(EXTRAS)", variable("EXTRAS") if name != "EXTRAS" else "")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(ELSEWHERE):
                yield path


def local() -> set[str]:
    """What `pythonpath` of pyproject.toml adds."""
    return {path.stem for folder in FOLDERS for path in (ROOT / folder).iterdir()} | OWN


@cache
def installed(extras: str) -> frozenset[str]:
    """Distributions that `pip install .[extras]` installs, by the metadata of this environment's ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [word for extra in extras.split(",") for word in project["optional-dependencies"][extra]]
    todo = [Requirement(word) for word in (*project["dependencies"], *named, variable("TORCH"))]
    found: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                todo += _requirements(name, extra)
    return frozenset(name for name, _ in found)


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    try:
        words = distribution(name).requires or []
    except PackageNotFoundError:  # for another platform
        return
    for requirement in map(Requirement, words):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def missing(
    packages: Iterable[str], distributions: Collection[str], providers: Mapping[str, list[str]]
) -> set[str]:
    """The packages that none of the distributions provides. `providers`: package -> its distributions, for
    packages that are installed here; others are taken for distributions of the same name.
    """
    known = sys.stdlib_module_names | local()
    return {
        package
        for package in set(packages) - known
        if not any(canonicalize_name(name) in distributions for name in providers.get(package, [package]))
    }


@pytest.mark.parametrize("extras", ["EXTRAS", "MORE_EXTRAS"])
def test_the_environment_has_what_is_imported(extras: str) -> None:
    """Modules are imported by `make check`, for all tests; what a function imports may be of `check-more`."""
    distributions = installed(variable(extras))
    found = {}
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = foreign(tree if extras == "MORE_EXTRAS" else at_module_level(tree))
        if lacks := missing(imported, distributions, providers()):
            found[path.relative_to(ROOT).as_posix()] = lacks
    assert not found, f"in no extra of {extras} in the Makefile: {found}"


def test_a_package_of_another_extra_does_not_count() -> None:
    """scipy comes with lm-eval, so it may be here without being in the environment of `make check`."""
    known = providers() | {"scipy": ["scipy"], "yaml": ["PyYAML"]}
    assert missing({"scipy", "yaml", "os", "support"}, installed(variable("EXTRAS")), known) == {"scipy"}
    assert not missing({"scipy"}, {"scipy"}, known)


def test_one_environment_for_people_and_ci() -> None:
    assert not re.findall(r"\$\(CI\)|\$\$\{?CI\b|ifn?def CI", MAKEFILE)
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert [line.split()[1] for line in commands] == ["check", "check-more"]
