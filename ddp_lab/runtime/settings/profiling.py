"""Which steps of which ranks are profiled, and with what."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ddp_lab.collectives.ranks import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import TRACES, flag, flag_name

_profiling = partial(flag, "profiling")


def known_ranks(text: str) -> str:
    """`text`, if it lists ranks.

    Raises:
        UserError: it does not.
    """
    try:
        Ranks.parse(text)
    except ValueError as error:
        raise UserError(f"{flag_name('profile_ranks')} {text}: {error}") from None
    return text


@dataclass(frozen=True)
class ProfilingSettings:
    """The profiler and its schedule."""

    no_profile: bool = _profiling(False, "train without torch.profiler and write no traces")
    profile_wait: int = _profiling(
        4,
        "optimizer steps before each profile window, without the profiler; steps in which a strategy settles are "
        "never profiled, and in a short run windows shrink",
        at_least=0,
    )
    profile_warmup: int = _profiling(
        1, "optimizer steps for which the profiler runs but discards its events", at_least=0
    )
    profile_active: int = _profiling(3, "optimizer steps in each profile window")
    profile_repeat: int = _profiling(1, "number of profile windows")
    profile_ranks: str | None = _profiling(
        None,
        "profile these ranks only, such as 0,1,8 or 0-3 (default: all)",
        normal=known_ranks,
        affects=(TRACES,),
        head="Profiled ranks: {profile_ranks}, of {world_size} in all. Figures of traces are theirs, and it is unknown "
        "for which rank a collective waited, and how fast it was.",
        trials=(None, "0-3,8"),
    )

    def profiles(self, rank: int) -> bool:
        """Whether this rank is profiled."""
        chosen = self.profile_ranks is None or rank in Ranks.parse(self.profile_ranks)
        return chosen and not self.no_profile

    def require_profiled_ranks(self, world_size: int) -> None:
        """Check that every rank that is to be profiled exists.

        Raises:
            UserError: names the first that does not.
        """
        ranks = range(world_size) if self.profile_ranks is None else Ranks.parse(self.profile_ranks)
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
        return self.steps_before_profile(settling_steps) + self.profile_repeat * self._window_steps

    @property
    def _window_steps(self) -> int:
        return self.profile_wait + self.profile_warmup + self.profile_active

    def fitted(self, steps: int, settling_steps: int) -> tuple[Self, str]:
        """With windows that end within `steps` optimizer steps, and what to say of the change; nothing without one.

        Fewer windows come first, then less waiting, then fewer steps in the window. A step to warm up stays if it can.
        """
        needed, left = self.profile_steps(settling_steps), steps - settling_steps
        if self.no_profile or needed <= steps:
            return self, ""
        if left < 1:
            settling = f", of which {settling_steps} settle" if settling_steps else ""
            return replace(self, no_profile=True), f"{steps} steps{settling}: none is left to profile"
        repeat = (steps - self.steps_before_profile(settling_steps)) // self._window_steps
        shorter: dict[str, Any] = {"profile_repeat": max(1, repeat)}
        if repeat < 1:
            active = max(1, min(self.profile_active, steps - max(settling_steps, min(1, self.profile_warmup))))
            warmup = min(self.profile_warmup, steps - active)
            wait = min(self.profile_wait, steps - active - warmup)
            shorter |= {"profile_wait": wait, "profile_warmup": warmup, "profile_active": active}
        instead = " ".join(f"{flag_name(name)} {value}" for name, value in shorter.items())
        said = f"{steps} steps, and the profile would end after {needed}: so {instead}"
        return replace(self, **shorter), said

    def steps_before_profile(self, settling_steps: int) -> int:
        """Optimizer steps before the schedule begins, so that the strategy has settled before the first window."""
        return max(0, settling_steps - self.profile_wait - self.profile_warmup)
