"""A straight line through points that fade: how much y grows with x, where that is no chance."""

from __future__ import annotations

# A slope counts where the x differ by this share of their mean: where all are nearly alike, what differs in y
# is noise.
MIN_SPREAD = 0.1


class FadingLine:
    """Least squares over fading sums; learning and asking cost the same however many points were seen.

    Args:
        fade: weight of all older points when one is added, below 1: it remembers about ``1 / (1 - fade)``.
        significant: a slope counts when it is so many standard errors from 0.
        alike_from: from this mean x on, the whole of a steady y is put down to x when all x were alike.
    """

    __slots__ = ("_alike_from", "_fade", "_significant", "_sx", "_sxx", "_sxy", "_sy", "_syy", "points")

    def __init__(self, fade: float, *, significant: float, alike_from: float) -> None:
        self._fade = fade
        self._significant = significant
        self._alike_from = alike_from
        self.points = self._sx = self._sy = self._sxx = self._sxy = self._syy = 0.0

    def learn(self, x: float, y: float) -> None:
        """Take one point; neither coordinate is below 0."""
        fade = self._fade
        self.points = self.points * fade + 1.0
        self._sx = self._sx * fade + x
        self._sy = self._sy * fade + y
        self._sxx = self._sxx * fade + x * x
        self._sxy = self._sxy * fade + x * y
        self._syy = self._syy * fade + y * y

    @property
    def steepest(self) -> float:
        """The slope of a line through the origin and the mean: then nothing is left for the intercept."""
        return self._sy / self._sx if self._sx > 0.0 else 0.0

    def slope(self) -> float:
        """Growth of y with x, at most :attr:`steepest`; 0 where it may be chance."""
        n, sx = self.points, self._sx
        if n < 2.0 or sx <= 0.0:
            return 0.0
        xx, yy = n * self._sxx - sx * sx, n * self._syy - self._sy * self._sy
        if xx <= (MIN_SPREAD * sx) ** 2:
            steady = yy <= (self._sy / 2) ** 2
            return self.steepest if steady and sx > self._alike_from * n else 0.0
        xy = n * self._sxy - sx * self._sy
        # t² = r² (n - 2) / (1 - r²), without a division by what a perfect line makes 0.
        if xy <= 0.0 or xy * xy * max(0.5, n - 2.0) < self._significant**2 * (xx * yy - xy * xy):
            return 0.0
        return min(xy / xx, self.steepest)

    def intercept(self, slope: float) -> float:
        """Where a line of that slope through the mean meets x = 0; never below 0."""
        return max(0.0, (self._sy - slope * self._sx) / self.points) if self.points else 0.0
