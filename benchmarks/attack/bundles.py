"""Opens and runs hostile bundles as users do."""

from __future__ import annotations

import shutil
from pathlib import Path

from attack import mutators
from mars_export import GenerationConfig, Session


def prepare(good: Path, place: Path) -> None:
    shutil.copytree(good, place)


def mutate(good: Path, target: Path, seed: int) -> str:
    shutil.copytree(good, target)
    return mutators.mutate(target, seed)


def attempt(target: Path, _seed: int) -> None:
    config = GenerationConfig(tau=0.5, max_new_tokens=4, window=2, stop=("the",))
    session = Session.open(target, threads=1)
    session.generate("the man and the inner", config)
    session.generate([{"role": "user", "content": "hi"}], config)
