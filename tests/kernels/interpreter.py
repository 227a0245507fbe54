"""Triton's interpreter without work that it does twice: half of the time of small kernels.

It rewires `triton.language` at every call of a device function although the launch has done it; it computes whether
integers overflow and, unless it debugs, asks nobody; it builds a dict for every type that it looks up; it copies every
storage that a launch was given back onto itself, which touches all pages of a pool that is only reserved.
"""

from dataclasses import replace
from functools import cache

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """For arguments on the CPU. Once a process."""
    rewire = interpreter._patch_lang

    @cache
    def modules(fn) -> list:
        return [x for x in fn.__globals__.values() if x is tl or x is tl.core]

    def once(fn):
        wired = not any(tl.core.is_builtin(module.load) for module in modules(fn))
        return interpreter._LangPatchScope() if wired else rewire(fn)

    interpreter._patch_lang = once
    numpy_type, known = interpreter._get_np_dtype, {}

    def looked_up(type_):
        if type_.name not in known:
            known[type_.name] = numpy_type(type_)
        return known[type_.name]

    interpreter._get_np_dtype = looked_up
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
