"""Adds the CPU kernels to a wheel, one library per instruction set; everything else is in pyproject.toml.

One that cannot be compiled here is left out: the first use compiles it, or torch does its work (kernels/cpu/lib.py). An
editable install gets none: its sources change.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # build frontends leave it out
from kvlab.kernels.cpu import build, isa


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the libraries belong beside the sources, in platlib


class Sources(build_py):
    def run(self) -> None:
        super().run()
        for variant in () if self.editable_mode else isa.VARIANTS:
            with TemporaryDirectory() as root:
                if path := (built := build.compile(variant, root=Path(root))).path:
                    self.copy_file(str(path), f"{self.build_lib}/kvlab/kernels/cpu/_kv_{variant}.so", False)
                else:
                    print(f"kernels {variant} are left out: {built.reason}", file=sys.stderr)


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:  # the libraries know the platform, not Python
        return "py3", "none", super().get_tag()[2] if any(Path(self.bdist_dir).rglob("_kv_*.so")) else "any"


setup(distclass=Binary, cmdclass={"build_py": Sources, "bdist_wheel": Wheel})
