"""What collectives cost: formulas against numbers worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import Cluster, Link
from ddp_lab.planner.costs.links import BASE_S, KINDS, LinkCosts

SLOW, FAST = Link("slow", 1e-4, 1e8), Link("fast", 1e-6, 1e11)
P = 12 * 2**20
GLOO = BASE_S["gloo"]


def gloo_nodes(nodes, ranks_per_node=1):
    return Cluster(hardware.device("cpu"), nodes, ranks_per_node, FAST, SLOW, "gloo")


def cost_of(cluster, kind, ranks):
    group = tuple(range(ranks)) if isinstance(ranks, int) else ranks
    cost = LinkCosts(cluster).cost(kind, P, group)
    return cost.latency_s, cost.transfer_s, cost.share


def test_gloo_by_hand():
    """Four ranks on four nodes, over links of 100 MB/s and 0.1 ms. A ring's all-reduce: 6 hops of P/4."""
    for kind, hops, payloads, share in (
        ("all_reduce", 6, 6 / 4, 1),
        ("all_gather", 3, 3 / 4, 1),
        ("reduce_scatter", 6, 6 / 4, 1),  # Gloo's is an all-reduce
        ("broadcast", 2, 3, 1 / 4),  # two copies from the root at once, then one from whom it reached
        ("scatter", 1, 3 / 4, 1 / 4),
    ):
        assert cost_of(gloo_nodes(4), kind, 4) == pytest.approx((GLOO + hops * 1e-4, payloads * P / 1e8, share)), kind


def test_groups_side_by_side_share_a_nodes_link():
    """2 nodes of 4: a group with one rank on each has a quarter of the link; one of all ranks has it alone. A ring of 8
    has 14 hops, 2 of them between nodes."""
    cluster = gloo_nodes(2, 4)
    assert cost_of(cluster, "all_reduce", 8)[0] == pytest.approx(GLOO + 2e-4 + 12e-6)
    assert cost_of(cluster, "all_reduce", (0, 4))[1] == pytest.approx(4 * P / 1e8)
    assert cost_of(cluster, "all_reduce", 8)[1] == pytest.approx(2 * 7 / 8 * P / 1e8)
    assert cost_of(cluster, "all_reduce", (0, 1, 2, 3))[1] == pytest.approx(2 * 3 / 4 * P / 1e11)
    assert cost_of(cluster, "broadcast", 8)[1] == pytest.approx(4 * P / 1e8)
    assert cost_of(cluster, "all_to_all", 8)[1] == pytest.approx(4 * 4 / 8 * P / 1e8)  # of each of 4 ranks, half


def test_nccl_takes_a_tree_where_a_ring_passes_too_many_nodes():
    """Two nodes take a ring, whose bytes take 6.5 % longer with each doubling of the nodes; 64 nodes take a tree."""
    few, many = (hardware.cluster(gpus, "nvlink4", "8xndr") for gpus in ("2x8xH100", "64x8xH100"))
    ring, tree = (LinkCosts(nodes).cost("all_reduce", 2**38, tuple(range(nodes.world_size))) for nodes in (few, many))
    assert ring.transfer_s == pytest.approx(2 * 15 / 16 * 2**38 / 368e9 * 1.065)
    assert tree.transfer_s == pytest.approx(2 * 511 / 512 * 2**38 / 360e9 / 0.9)
    assert tree.latency_s < 2 * 63 * 9.6e-6 and ring.latency_s > 2 * 14 * 3.4e-6
    gathered = LinkCosts(many).cost("all_gather", 2**38, tuple(range(512)))
    assert gathered.transfer_s == pytest.approx(511 / 512 * 2**38 / 368e9 * (1 + 6 * 0.065))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_never_take_less_time(backend, kind, nodes, ranks, payload, more):
    costs = LinkCosts(Cluster(hardware.device("L4"), nodes, ranks, FAST, SLOW, backend))
    world = tuple(range(nodes * ranks))
    small, large = (costs.cost(kind, size, world) for size in (payload, payload + more))
    assert 0 < small.latency_s + small.transfer_s <= large.latency_s + large.transfer_s
    assert 0 < small.share <= 1


def test_messages_that_pass_from_a_node_to_the_next_share_its_link():
    """If stages are n ranks apart, n messages share the link. Within a node none does."""
    costs = LinkCosts(Cluster(hardware.device("L4"), 2, 4, FAST, SLOW, "gloo"))
    single, double, within = (costs.cost("send_recv", 10**9, ranks).transfer_s for ranks in ((3, 4), (2, 4), (1, 2)))
    assert double == pytest.approx(2 * single) and single == pytest.approx(1e9 / SLOW.bytes_per_s) and within < single


def test_boards_without_a_switch_and_network_cards():
    """Of four devices that are linked in pairs, two have a third of the rate, and four all of it."""
    board = LinkCosts(replace(hardware.cluster("4xH100"), inside=replace(FAST, peers=3)))
    full = LinkCosts(replace(board.cluster, inside=FAST))
    times = [
        [costs.cost("all_gather", P, tuple(range(ranks))).transfer_s for ranks in (2, 4)] for costs in (board, full)
    ]
    assert times[0] == pytest.approx([3 * times[1][0], times[1][1]])
    nodes = LinkCosts(hardware.cluster("2x4xH100", between="4xndr"), slowing_by_card=0.1)
    assert nodes.cost("all_gather", P, (0, 4)).slowing == pytest.approx(0.4)
    assert nodes.cost("all_gather", P, (0, 1)).slowing == 1.0
