"""Which implementation of an op runs on a device, and a place to say so: rows carry it.

Every op is a torch reference (the definition). A faster one stands beside it under the same name and is chosen here by
device type; today the reference is the only one, on every device.
"""

from __future__ import annotations

OPS = ("attention", "encode", "decode", "select")
IMPLEMENTATIONS: dict[str, dict[str, str]] = {op: {} for op in OPS}  # op -> {device type: implementation}


def chosen(device: str) -> dict[str, str]:
    """{op: implementation} for a device such as "cpu" or "cuda:0"."""
    kind = str(device).split(":")[0]
    return {op: IMPLEMENTATIONS[op].get(kind, "torch") for op in OPS}
