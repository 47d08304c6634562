"""Collectives of NCCL and RCCL, as traces of several eras show them.

The events are made up; their form is that of real traces: kernel names, arguments, what lies around what.
"""

import numpy as np
import pytest

from ddp_lab.analysis.traces.nccl import device_collectives
from ddp_lab.collectives.kinds import LABELS
from tests.tables import each_row
from tests.traces import cuda_trace, event, launched, parsed, timeline_of

ARGS = {"Collective name": "allreduce", "In msg nelems": 10, "Out msg nelems": 10, "dtype": "Float", "Group size": 2}
SEND_RECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"


def collectives(*events, groups=None):
    table = parsed(*events).events
    return device_collectives(table[table["cat"] == "kernel"], table, {"pg_config": groups}, world_size=8)


def kernel(at, name="ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", **args):
    """A kernel of 10 us, launched at `at` by thread 1, and its launch."""
    return launched(name, at, at + 100, 10, 20, correlation=int(at), **args)


@each_row(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("broadcast", "broadcast"),
        ("scatter", "scatter"),
        ("reduce", "reduce"),
        ("send", "send_recv"),
        ("recv", "send_recv"),
        # names of ProcessGroupNCCL2
        ("all_reduce", "all_reduce"),
        ("allGatherSingleImpl", "all_gather"),
        ("reduceScatterSingleImpl", "reduce_scatter"),
        ("allToAllSingleImpl", "all_to_all"),
        ("all_to_all_v_single", "all_to_all"),
    ],
)
def test_kinds_by_the_names_that_torch_records(name, kind):
    args = {"Collective name": name, "In msg nelems": 10, "Out msg nelems": 20, "dtype": "BFloat16"}
    calls = collectives(*kernel(5, **args))
    assert calls["kind"].tolist() == [kind] and calls["bytes"].tolist() == [40] and kind in LABELS


def test_the_name_of_a_kernel_is_not_believed_where_an_operator_says_more():
    """Until 2023: all-to-all and others ran as SendRecv, and `External id` was the correlation. Sizes are in the
    operator, if shapes were recorded and if it takes a tensor and no list. Another thread is in an all-reduce."""
    shapes = {"Input Dims": [[64], [48], [], [], [], []], "Input type": ["long int", "long int", "", "", "", "Scalar"]}
    of_list = {"Input Dims": [[], [], [], []], "Input type": ["TensorList", "", "", "Scalar"]}
    gather = {"Input Dims": [[8, 6], [1, 6], []], "Input type": ["float", "float", ""]}
    calls = collectives(
        event("cpu_op", "c10d::alltoall_base_", 0, 9, **shapes),
        event("cpu_op", "c10d::allreduce_", 4, 400, tid=2, **of_list),
        *kernel(5, SEND_RECV, **{"External id": 5}),
        event("cpu_op", "c10d::allreduce_", 10, 9, **of_list),
        *kernel(15, "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", **{"External id": 15}),
        event("cpu_op", "c10d::_allgather_base_", 20, 9, **gather),
        *kernel(25, SEND_RECV, **{"External id": 25}),
    )
    assert calls["kind"].tolist() == ["all_to_all", "all_reduce", "all_gather"]
    assert calls["bytes"].tolist() == pytest.approx([8 * 64, np.nan, 4 * 48], nan_ok=True)
    assert calls["dtype"].tolist() == ["long int", "", "float"]
    assert calls["group"].eq("all ranks").all() and calls["group_size"].eq(8).all()


def test_groups_of_kernels():
    """Told by the kernel, by the operator that issued it, or by nobody."""
    arguments = {**ARGS, "Process Group Name": "7", "Process Group Ranks": "[0, 2]"}
    calls = collectives(
        event("cpu_op", "record_param_comms", 0, 1, **arguments, **{"External id": 5}),
        *kernel(3, **arguments),
        *kernel(4, **{"External id": 5}),
        *kernel(5, **{"External id": 6}),
        *kernel(6, **{"External id": [], "Group size": "two"}),
        groups=[{"pg_name": "0", "ranks": [0, 1, 2, 3]}, {"pg_name": "7", "ranks": [0, 2]}],
    )
    assert calls["group"].tolist() == ["ranks 0, 2, group 7"] * 2 + ["", ""]
    assert calls["group_size"].tolist()[:2] == [2, 2] and calls["group_size"].isna().tolist()[2:] == [True, True]
    assert calls["kind"].tolist() == ["all_reduce"] * 2 + ["other"] * 2 and calls["bytes"].tolist()[1] == 40


def test_payloads_of_what_one_rank_does_not_hold_whole():
    """ProcessGroupNCCL2 records what the rank gives and gets: of a scatter only the root has all; of messages that were
    issued together (`batch_op_issue`) what is sent and what is received."""

    def bytes_of(name, sent, received, **args):
        sizes = {"In msg nelems": sent, "Out msg nelems": received}
        return float(collectives(*kernel(5, **{**ARGS, "Collective name": name, **sizes, **args}))["bytes"].iloc[0])

    assert bytes_of("scatter", 0, 6) == bytes_of("scatter", 12, 6) == 4 * 12
    assert bytes_of("gather", 6, 0) == bytes_of("gather", 6, 12) == 4 * 12
    assert bytes_of("batch_op_issue", 6, 3) == 4 * 9
    assert bytes_of("barrier", 0, 0, dtype="Byte") == 0
    assert bytes_of("broadcast", 6, 6, dtype="Float8_e4m3fn") == 6
    assert np.isnan(bytes_of("broadcast", 6, 6, dtype="Int128"))
    unknown = kernel(5, **{**ARGS, "In msg nelems": None, "Out msg nelems": "many"})
    assert collectives(*unknown)["bytes"].isna().all()


def test_kernels_of_a_graph_share_one_launch():
    """They have names and times. The second graph is launched in step 6, so its kernels are of step 6. Their
    `External id` is the correlation; that some operator has the same number says nothing."""
    trace = cuda_trace()
    trace["traceEvents"].append(event("cpu_op", "record_param_comms", 1005, 2, **{"External id": 91}))
    for number, at in ((0, 10), (1, 1010)):
        trace["traceEvents"].append(event("cuda_runtime", "cudaGraphLaunch", at, 4, correlation=90 + number))
        for start, name in (
            (1500, "gemm"),
            (1600, "ncclDevKernel_AllGather_RING_LL"),
            (1700, "ncclDevKernel_SendRecv"),
        ):
            of_graph = {"stream": 7, "correlation": 90 + number, "External id": 90 + number}
            trace["traceEvents"].append(event("kernel", name, start + 1000 * (number - 1), 50, tid=7, **of_graph))
    calls = timeline_of(trace).collectives_by_step()
    assert calls.loc[calls["step"] == 6, "kind"].tolist() == ["all_gather", "send_recv", "all_reduce"]
    assert calls.loc[calls["stream"] == "stream 7", "bytes"].isna().all()
