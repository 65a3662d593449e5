"""Sparse programs on a GPU: statements over a sparse matrix as ragged pipelines, the others by PyTorch."""

from tilestream.sparse.pipelines.program import BoundProgram, PipelineProgram, parse_dtype

__all__ = ["BoundProgram", "PipelineProgram", "parse_dtype"]
