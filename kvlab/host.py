"""What this machine has to spare right now."""

from __future__ import annotations

import os
import time
from pathlib import Path


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
