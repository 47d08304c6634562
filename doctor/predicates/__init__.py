"""What a regular expression cannot say: predicates over facts from several lines, files and ranks, by name."""

from collections.abc import Callable

from doctor.facts import Facts, Match
from doctor.predicates import local, network, program

PREDICATES: dict[str, Callable[[Facts], Match | None]] = {
    function.__name__: function
    for function in (
        program.different_collectives,
        program.rank_behind,
        program.rank_without_dump,
        program.run_ended,
        program.stuck_together,
        program.watchdog_timeout,
        program.different_versions,
        network.mixed_fabrics,
        network.socket_despite_infiniband,
        network.virtual_interface,
        network.interface_not_here,
        network.roce_gid,
        network.infiniband_retry,
        local.acs_or_iommu,
        local.cumem_on_some_ranks,
        local.p2p_across_numa,
        local.p2p_no_progress,
        local.small_shm,
        local.small_memlock,
        local.slow_pairs,
    )
}
