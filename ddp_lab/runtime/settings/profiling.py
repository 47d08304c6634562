"""Which steps of which ranks are profiled, and with what."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.record_format import ranks_in
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import flag, flag_name

_profiling = partial(flag, "profiling")


def known_ranks(text: str) -> str:
    """`text`, if it lists ranks.

    Raises:
        UserError: it does not.
    """
    ranks_in(text, flag_name("profile_ranks"))
    return text


@dataclass(frozen=True)
class ProfilingSettings:
    """The profiler and its schedule."""

    no_profile: bool = _profiling(False, "train without torch.profiler and write no traces")
    profile_wait: int = _profiling(
        4,
        "optimizer steps before each profile window, without the profiler; steps in which a strategy settles are "
        "never profiled",
        at_least=0,
    )
    profile_warmup: int = _profiling(
        1, "optimizer steps for which the profiler runs but discards its events", at_least=0
    )
    profile_active: int = _profiling(3, "optimizer steps in each profile window", at_least=1)
    profile_repeat: int = _profiling(1, "number of profile windows", at_least=1)
    keep_windows: int | None = _profiling(
        None, "keep only the traces of so many of the run's newest profile windows (default: all)", at_least=1
    )
    profile_ranks: str | None = _profiling(
        None, "profile these ranks only, such as 0,1,8 or 0-3 (default: all)", normal=known_ranks
    )

    def profiles(self, rank: int) -> bool:
        """Whether this rank is profiled."""
        chosen = self.profile_ranks is None or rank in ranks_in(self.profile_ranks, "--profile-ranks")
        return chosen and not self.no_profile

    def require_profiled_ranks(self, world_size: int) -> None:
        """Check that every rank that is to be profiled exists.

        Raises:
            UserError: names the first that does not.
        """
        ranks = range(world_size) if self.profile_ranks is None else ranks_in(self.profile_ranks, "--profile-ranks")
        if (highest := max(ranks)) >= world_size:
            raise UserError(
                f"--profile-ranks {self.profile_ranks}: there is no rank {highest}; the run has ranks 0 to "
                f"{world_size - 1}"
            )

    def profile_steps(self, settling_steps: int = 0) -> int:
        """Optimizer steps that the profiler's whole schedule takes.

        Args:
            settling_steps: Steps that the strategy needs to settle (`Strategy.settling_steps`).
        """
        window = self.profile_wait + self.profile_warmup + self.profile_active
        return self.steps_before_profile(settling_steps) + self.profile_repeat * window

    def steps_before_profile(self, settling_steps: int) -> int:
        """Optimizer steps before the schedule begins, so that the strategy has settled before the first window."""
        return max(0, settling_steps - self.profile_wait - self.profile_warmup)
