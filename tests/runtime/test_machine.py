"""What Linux says of a machine: memory and cores that control groups leave, processors, GPUs."""

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
    monkeypatch.setattr(machine, "BOARD", tmp_path / "board")
    monkeypatch.setattr(machine, "GPUS", tmp_path / "gpus")
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


def test_cores_are_those_of_the_affinity_mask_or_what_the_group_is_worth(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    own, service = groups / "own", groups / "cgroup" / "service"
    (service / "one").mkdir(parents=True)
    (service / "one" / "cpu.max").write_text("max 100000\n")
    assert machine.cores() == 8 and machine.default_threads() is None
    (service / "cpu.max").write_text("250000 100000\n")
    assert machine.cores() == machine.default_threads() == 3
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 6})
    own.write_text("")
    assert machine.cores() == machine.default_threads() == 2


def test_a_processor_on_x86_and_on_arm_and_the_gpus(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = groups / "cpuinfo"
    monkeypatch.setattr("platform.processor", lambda: "")
    assert machine.processor(cpuinfo) == ""
    cpuinfo.write_text(
        "CPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n"
    )
    assert machine.processor(cpuinfo) == "Arm 0x41/0xd05, Arm 0x41/0xd0b"
    (groups / "board").write_text("A Board\0")
    assert machine.processor(cpuinfo) == "A Board, Arm 0x41/0xd05, Arm 0x41/0xd0b"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Processor\n")
    assert machine.processor(cpuinfo) == "A Processor"
    assert machine.gpus() == []
    (groups / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (groups / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   34\n")
    assert machine.gpus() == ["NVIDIA H200"]
