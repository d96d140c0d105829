"""Commands that are killed, disturbed or started twice lose nothing and compute nothing wrong; `attacks.py` has how."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from system_calls import available

# They are run in a process with one thread, which forks.
pytestmark = pytest.mark.skipif(not available, reason="Linux on x86-64 or ARM alone lets others look at system calls")
KINDS = ("kill", "fail", "reply", "read", "pair", "replace", "clock")


def attacked(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """The cases that were tried, and a line for each that did harm."""
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "attacks.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[str]] = json.loads(answer.stdout)
    return found


def test_a_few(tmp_path: Path) -> None:
    found = attacked(tmp_path, "few")
    assert found["harm"] == []
    assert len(found["cases"]) == 4


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_kind(tmp_path: Path, kind: str) -> None:
    found = attacked(tmp_path, kind)
    assert found["harm"] == []
    print(f"{kind}: {len(found['cases'])} cases")
