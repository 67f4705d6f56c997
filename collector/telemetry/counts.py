"""What a part of the pipeline counts until its counts are taken, by the rows of the table: a counter is named once.

    counts[SKIPPED_SPANS, reason] += 1        counts[DECODED_SPANS] += len(spans)

Not safe from several threads; whoever takes the counts adds them to the live metrics, which are.
"""

from __future__ import annotations

from .table import Kind, Metric

Row = Metric | tuple[Metric, *tuple[str, ...]]
"""A metric without labels, or a metric and its label values in the table's order."""


class Counts(dict[Row, float]):
    """Numbers by row; what was never counted is 0. A gauge's number is its state, a counter's what was added."""

    __slots__ = ()

    def __missing__(self, row: Row) -> int:
        """Nothing is stored by asking."""
        return 0

    def merge(self, other: Counts) -> None:
        """Add what somebody else counted; of a gauge the other's number is the newer one."""
        for row, number in other.items():
            self[row] = number if metric_of(row).kind is Kind.GAUGE else self[row] + number

    def by_label(self, metric: Metric) -> dict[str, float]:
        """What was counted of a metric with one label, by its value; zeros left out."""
        ((_, values),) = metric.labels
        return {value: self[metric, value] for value in values if self[metric, value]}

    def total(self, metric: Metric) -> float:
        """The sum over all label values of a metric."""
        return sum(number for row, number in self.items() if metric_of(row) is metric)


def metric_of(row: Row) -> Metric:
    """The metric of a row."""
    return row if isinstance(row, Metric) else row[0]
