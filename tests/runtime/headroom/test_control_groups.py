"""What control groups leave, of both kinds and as a container sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mars_export.runtime import machine


def group(place: Path, limit: str, used: int, cached: int, swap: str = "max") -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.swap.max").write_text(f"{swap}\n")
    (place / "memory.stat").write_text(f"anon 5\nactive_anon 7\ninactive_file {cached - 1}\nactive_file 1\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemAvailable: 4000 kB\nSwapFree: 0 kB\n")
    (tmp_path / "own").write_text("0::/service/one\n")
    return tmp_path


def test_the_tightest_group_above_counts_and_files_in_memory_are_free(groups: Path) -> None:
    assert machine.group_left() is None
    assert machine.available() == 4000 * 1024
    group(groups / "cgroup" / "service" / "one", "max", 10, 4)
    assert machine.group_left() is None
    group(groups / "cgroup" / "service", "1000", 900, 300)
    assert machine.group_left() == 1000 - 900 + 300
    group(groups / "cgroup" / "service" / "one", "500", 450, 10)
    assert machine.group_left() == machine.available() == 60
    (groups / "meminfo").write_text("SwapFree: 1 kB\n")
    assert machine.group_left() == 60 + 1024
    group(groups / "cgroup" / "service" / "one", "500", 450, 10, swap="7")
    assert machine.group_left() == 67


def test_a_container_sees_its_group_as_the_root_and_may_not_know_its_name(groups: Path) -> None:
    group(groups / "cgroup", "1000", 400, 100)
    assert machine.group_left() == 700
    (groups / "own").write_text("0::/\n")
    assert machine.group_left() == 700


def test_groups_of_the_first_kind(groups: Path) -> None:
    (groups / "own").write_text("9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n")
    place = groups / "cgroup" / "memory" / "a"
    place.mkdir(parents=True)
    (place / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (place / "memory.usage_in_bytes").write_text("600\n")
    (place / "memory.stat").write_text(
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 20\n"
    )
    assert machine.group_left() is None
    (place / "memory.limit_in_bytes").write_text("1000\n")
    assert machine.group_left() == 1000 - 600 + 50
