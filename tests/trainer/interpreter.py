"""Triton's interpreter without what it does over and over."""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from triton.language import core

#: All that the interpreter patches.
LANGUAGE = (tl, core)


def hasten() -> None:
    """Numbers stay what they are; the checks take half of the time.

    Triton patches its language at each launch, and again at each call of a function within a kernel: here it
    does so once, for the life of the process. And beside each sum and product of integers it computes another
    of 64 bits to compare with: the checks' sizes are far from 2³¹, and wrong offsets give wrong numbers.
    """
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if not builder.options.sanitize_overflow:
        return  # done before
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched = interpreter._patch_lang(hasten)  # whose module names the language
    unpatched = type(patched)
    interpreter._patch_lang = lambda _: unpatched()
