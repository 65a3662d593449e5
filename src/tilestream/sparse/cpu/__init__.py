"""Scheduled programs as compiled loops on the CPU: one loop nest a region."""

from tilestream.sparse.cpu.program import CpuProgram, CpuResult

__all__ = ["CpuProgram", "CpuResult"]
