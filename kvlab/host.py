"""This machine: what it has to spare right now, and where a user's files may be kept."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/kvlab`, or `~/.cache/kvlab`; not created. A relative value is ignored (XDG standard)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvlab"


def busy_cores(seconds: float = 0.2) -> int:
    """Cores that other programs keep busy, rounded; 0 where the system does not say (no /proc/stat).

    This process sleeps meanwhile. The load average would not do: it remembers our own past (an install, an older run).
    """
    try:
        before = _jiffies()
        time.sleep(seconds)
        after = _jiffies()
    except (OSError, ValueError):
        return 0
    total, idle = (b - a for a, b in zip(before, after))
    return round((os.cpu_count() or 1) * (1 - idle / total)) if total > 0 else 0


def _jiffies() -> tuple[int, int]:
    """(all, idle) since boot, summed over cores."""
    values = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(values), values[3] + values[4]
