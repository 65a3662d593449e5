"""The table of ATen operators stands where the plan of a whole model reads it too."""

from tilestream.plan.aten_table import (
    CHECKS,
    CONVERSIONS,
    FILLS,
    GEMMS,
    TABLE,
    UPDATES,
    VIEWS,
    Kind,
    Row,
    row,
)

__all__ = ["CHECKS", "CONVERSIONS", "FILLS", "GEMMS", "TABLE", "UPDATES", "VIEWS", "Kind", "Row", "row"]
