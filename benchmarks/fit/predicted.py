"""What every comparison of predictions with measurements shares."""

from __future__ import annotations


class Predicted:
    """Something that was measured and predicted; microseconds."""

    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured: above 0 where it is too long."""
        return self.predicted_us / self.measured_us - 1
