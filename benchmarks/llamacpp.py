"""The benchmarks' end of llamacpp_worker.py: a llama.cpp that was compiled on this machine by `make llamacpp`.

Prebuilt wheels hold generic code and are several times slower, so nothing else is taken for the peer.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "llamacpp"
WEIGHTS = ("as shipped (Q4_1)", "Q8_0", "Q4_0")


class Absent(Exception):
    """No llama.cpp here."""


class Worker:
    """call("turn", id=..., threads=2, steps=4) -> what the worker's method returns; RuntimeError with what it says."""

    def __init__(self) -> None:
        python = FOLDER / "bin" / "python"
        if not python.exists():
            raise Absent(f"no llama.cpp in {FOLDER}: `make llamacpp` compiles one (20 minutes on two cores)")
        script = Path(__file__).with_name("llamacpp_worker.py")
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words, text=True
        )
        self.pid = self.process.pid
        try:
            self.info = self.call("info")
        except RuntimeError as error:
            raise Absent(f"{error}; `make llamacpp` installs it") from error

    def call(self, do: str, **arguments):
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.process.kill()
            code = self.process.wait()
            self.words.seek(0)
            words = self.words.read().strip().splitlines() or [""]
            raise RuntimeError(f"llama.cpp's process ended (code {code}): {words[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def models(self, shipped: Path) -> dict[str, Path]:
        """Load every kind of weights; missing files are made next to the environment. {kind: file}"""
        out = {}
        for kind in WEIGHTS:
            path = shipped
            if not kind.startswith("as shipped"):
                path = FOLDER / f"{shipped.stem}.to-{kind}.gguf"
                if not path.exists():
                    self.call("quantize", source=str(shipped), target=str(path), kind=kind)
            self.call("load", name=kind, path=str(path))
            out[kind] = path
        return out

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
