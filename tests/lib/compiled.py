"""A kernel compiled here and now, without a cache and without threads."""

from __future__ import annotations

from tilestream.cuda.compile import KernelReport, Source, best, compile_split, is_settled
from tilestream.errors import CompileError


def compile_source(source: Source) -> KernelReport:
    """Compile a kernel with the register split that spills least; see ``compile_text``.

    Splits are tried from the first on, until one spills nothing, too much, or no less than the one before: what is
    given to the consumers is taken from the loader.
    """
    tried: list[KernelReport | CompileError] = []
    for index in range(len(source.register_splits)):
        try:
            tried.append(compile_split(source, index))
        except CompileError as refused:
            tried.append(refused)
        if is_settled(tried, source.register_splits):
            break
    return best(tried)
