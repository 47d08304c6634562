"""What a regular expression cannot say: predicates over facts from several lines, files and ranks, by name."""

from collections.abc import Callable

from ddp_lab.doctor.facts import Facts, Match
from ddp_lab.doctor.predicates import failures, local, network, program

PREDICATES: dict[str, Callable[[Facts], Match | None]] = {
    function.__name__: function
    for function in (
        program.different_collectives,
        program.different_collectives_of_unknown_groups,
        program.rank_behind,
        program.rank_without_dump,
        program.run_ended,
        program.stuck_together,
        program.watchdog_timeout,
        program.different_versions,
        network.closed_by_one_host,
        failures.program_exception,
        failures.out_of_memory,
        failures.memory_refused,
        failures.store_barrier_too_many,
        failures.store_barrier_too_few,
        network.mixed_fabrics,
        network.socket_despite_infiniband,
        network.virtual_interface,
        network.interface_not_here,
        network.roce_gid,
        network.infiniband_retry,
        network.retry_exceeded_unknown,
        network.efa_not_found,
        local.acs_or_iommu,
        local.cumem_host,
        local.rdma_no_memory_though_unlimited,
        local.p2p_across_numa,
        local.p2p_no_progress,
        local.small_shm,
        local.small_memlock,
        local.slow_pairs,
    )
}
