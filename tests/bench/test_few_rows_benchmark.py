"""The benchmark of blocks on few rows: whose turn it is, what is kept of earlier runs, CUTLASS's arms."""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def benchmark() -> Any:
    return importlib.import_module


def test_nobody_is_timed_while_another_compiles_or_is_timed(benchmark: Any, tmp_path: Path) -> None:
    turns = benchmark("benchmarks.lib.turns").Turns(tmp_path, patience_s=3600.0)
    said: list[str] = []

    def compile_and_time(name: str, compile_s: float) -> None:
        with turns.compiling():
            time.sleep(compile_s)
            with turns.turn():  # choices are timed in turns as well
                pass
            said.append(f"{name} compiled")
        with turns.alone():
            said.append(f"{name} begins")
            time.sleep(0.1)
            said.append(f"{name} ends")

    threads = [threading.Thread(target=compile_and_time, args=case) for case in (("quick", 0.1), ("slow", 0.5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said[:2] == ["quick compiled", "slow compiled"]
    assert [words.split()[1] for words in said[2:]] == ["begins", "ends"] * 2


def test_patience_ends(benchmark: Any, tmp_path: Path) -> None:
    turns = benchmark("benchmarks.lib.turns").Turns(tmp_path, patience_s=0.0)
    with turns.compiling(), turns.alone():  # of another process, as far as locks can tell
        pass


def test_what_max_autotune_took_in_another_run_is_kept_and_said(benchmark: Any, tmp_path: Path) -> None:
    few_rows: ModuleType = benchmark("benchmarks.run.few_rows")
    out = tmp_path / "few_rows.json"

    def row(arm: str, us: float, workload: str = "G4") -> Any:
        return few_rows.Row(workload, 128, arm, us, us, 0.0, True)

    few_rows.keep(out, [row("eager", 9.0), row("max-autotune", 8.0), row("eager", 5.0, "G1")], {})
    few_rows.keep(out, [row("eager", 7.0)], {})
    text = out.read_text()
    found = {(r["workload"], r["arm"]): r for r in few_rows.json.loads(text)["rows"]}
    assert {k: r["warm_us"] for k, r in found.items()} == {
        ("G1", "eager"): 5.0, ("G4", "eager"): 7.0, ("G4", "max-autotune"): 8.0,
    }  # fmt: skip
    assert found["G4", "max-autotune"]["detail"] == "another run"


@pytest.mark.parametrize(
    ("hid", "out", "gated", "arms"),
    [
        (512, 256, False, ["CUTLASS 13"]),
        (1536, 384, False, []),
        (512, 256, True, ["CUTLASS 45, 64 rows, and cuBLAS", "CUTLASS 45, 128 rows, and cuBLAS"]),
    ],
)
def test_the_examples_that_take_a_block(
    benchmark: Any, hid: int, out: int, gated: bool, arms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = benchmark("benchmarks.lib.cutlass_examples")
    monkeypatch.setattr(examples.ctypes, "CDLL", lambda path: path)
    for name in ("empty", "zeros"):  # on a GPU
        monkeypatch.setattr(torch, name, lambda *size, **_: torch.ones(1))
    weights = {"up": torch.ones(hid, 32), "down": torch.ones(out, hid)} | ({"gate": torch.ones(1)} if gated else {})
    assert list(examples.arms(Path("lib.so"), torch.ones(128, 32), [weights])) == arms
