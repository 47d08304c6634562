"""What comparisons keep of a run's traces."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ddp_lab.analysis.summary import WindowAnalysis
from ddp_lab.analysis.traces.timeline import RankTimeline


@dataclass(frozen=True)
class Traced:
    """The part of a run's analysis that comparisons need. All events of many ranks would take too much memory.

    Attributes:
        summary: The table of `summary.csv`.
        steps: The table of `exposure.csv`, by number of the pass in a sweep.
        audit: The table of `audit.csv`.
        timeline: Of the rank whose lanes are drawn.
        step: The optimizer step that is drawn.
    """

    summary: pd.DataFrame
    steps: Mapping[int, pd.DataFrame]
    audit: pd.DataFrame
    timeline: RankTimeline
    step: int

    @property
    def failed_checks(self) -> list[str]:
        """Subjects of failed checks, each once."""
        return self.audit.loc[self.audit["result"] == "fail", "subject"].unique().tolist()


def keep(analysis: WindowAnalysis) -> Traced:
    """Choose what is drawn: the step of median duration (mean over ranks), and in it the rank of median duration.

    Of an even number, the shorter of the middle two counts.
    """
    durations = analysis.exposure.steps.pivot_table(index="step", columns="rank", values="step_ms")
    step = middle(durations.mean(axis="columns"))
    rank = middle(durations.T[step])
    timeline = next(timeline for timeline in analysis.timelines if timeline.rank == rank)
    return Traced(analysis.summary, {1: analysis.exposure.steps}, analysis.audit, timeline, step)


def middle(values: pd.Series) -> int:
    """The label of the lower median."""
    return int(values.sort_values(kind="stable").index[(len(values) - 1) // 2])
