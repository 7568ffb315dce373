"""For tests of what outlives a process: fresh processes, damaged data."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from typing import Any


def python(code: str, *arguments: object, then: str = "", **environment: str) -> str:
    """What a fresh process prints that runs ``code`` and ``then``."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + textwrap.dedent(then), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "panicked" not in done.stderr, done.stderr
    return done.stdout


def mutated(data: bytes, source: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(out)) if out else 0
        kind = source.randrange(5)
        if kind == 0:
            del out[at : at + source.randint(1, 40)]
        elif kind == 1:
            out[at:at] = out[at : at + source.randint(1, 40)]
        elif kind == 2 and out:
            out[at] = source.choice(b'0123456789"[]{},:-.entrufals%')
        elif out:
            out[at] = source.randrange(256)
    return bytes(out)


def shuffled(data: Any, source: random.Random) -> Any:
    """Plain data with one value somewhere replaced by another kind of value."""
    if isinstance(data, (list, dict)) and data and source.random() < 0.9:
        fresh = data.copy()
        key = source.choice(list(data)) if isinstance(data, dict) else source.randrange(len(data))
        fresh[key] = shuffled(data[key], source)
        return fresh
    return source.choice([None, -1, 0, 1, 2**70, 1.5, "", "x", [], {}, [[]], True, "float32", float("nan"), data])
