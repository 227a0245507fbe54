"""Compile the CPU kernels with AddressSanitizer and UBSan and fuzz them: python sanitize.py [VARIANT ...]

`fuzz.py LIBRARY VARIANT` runs once for every variant (generic, and avx2 where the CPU has it), in a process that has
libasan in front. A finding aborts it; the exit code is 1 if any of them did not end with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvlab.kernels.cpu import build
from kvlab.kernels.cpu.isa import runnable

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")
FUZZ = Path(__file__).with_name("fuzz.py")
TIMEOUT_S = 1800.0  # sanitized code compiles slowly


def main(variants: list[str]) -> int:
    failed = []
    for variant in variants or [v for v in ("generic", "avx2") if v in runnable()]:
        built = build.compile(variant, extra=FLAGS, timeout=TIMEOUT_S, say=print)
        if built.path is None:
            sys.exit(f"{variant}: {built.reason}")
        env = {**os.environ, **build.sanitizer_env(build.compiler()), "UBSAN_OPTIONS": "print_stacktrace=1"}
        print(f"{variant}: {FUZZ.name} on {built.path}", flush=True)
        if subprocess.run([sys.executable, FUZZ, built.path, variant], env=env).returncode:
            failed.append(variant)
    if failed:
        print(f"sanitize: failed on {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
