"""What a run over operators came to: counts, what is bad, and what is refused and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graphrt import GraphPool
from graphrt.core.device.registry import get_platform
from tests.operators.samples import SAMPLES, Case, chosen, dtype_name
from tests.operators.trial import BAD, EQUAL, Sample, Verdict, variants


@dataclass
class Row:
    """One operator with one dtype, called in one way."""

    name: str
    dtype: str
    variant: str
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Samples by outcome."""
        return Counter(v.outcome for v in self.verdicts)

    @property
    def worst(self) -> list[Verdict]:
        """Those that are a defect."""
        return [v for v in self.verdicts if v.outcome in BAD]

    @property
    def stays(self) -> bool:
        """Whether nothing new was ever replayed, so that it proves little."""
        equal = [v for v in self.verdicts if v.outcome == EQUAL]
        return bool(equal) and not any(v.draws for v in equal)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.variant}"


def rows_of(case: Case, limit: int = SAMPLES) -> list[Row]:
    """Try an operator with one dtype in every way that it can be called."""
    samples = chosen(case, limit)
    pool = GraphPool(get_platform(case.device))
    rows = []
    try:
        for variant in variants(case):
            row = Row(case.name, dtype_name(case.dtype), variant)
            row.verdicts = [Sample(case, variant, draws).run(pool) for draws in samples]
            rows.append(row)
    finally:
        pool.close()
    return rows
