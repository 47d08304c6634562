"""What collectives cost: formulas against numbers worked out by hand, and files of measurements."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import collective_costs, hardware
from planner.clock import Clock, Queue
from planner.cluster import Cluster, Link
from planner.collective_costs import BASE_S
from planner.volumes import KINDS, volume
from training.communication.traffic import Collective
from training.errors import UserError
from training.records.record import cpu_name

SLOW, FAST = Link("slow", 1e-4, 1e8), Link("fast", 1e-6, 1e11)
P = 12 * 2**20
GLOO = BASE_S["gloo"]


def gloo_nodes(nodes: int, ranks_per_node: int = 1) -> Cluster:
    return Cluster(hardware.device("cpu"), nodes, ranks_per_node, FAST, SLOW, "gloo")


def both(cluster: Cluster, kind: str, ranks: int | tuple[int, ...]) -> tuple[float, float, float]:
    group = tuple(range(ranks)) if isinstance(ranks, int) else ranks
    cost = collective_costs.from_links(cluster).cost(kind, P, group)
    return cost.latency_s, cost.transfer_s, cost.share


def test_ring_all_reduce_by_hand() -> None:
    """Four ranks on four nodes: 6 hops of P/4 over links of 100 MB/s and 0.1 ms."""
    assert both(gloo_nodes(4), "all_reduce", 4) == pytest.approx((GLOO + 6e-4, 1.5 * P / 1e8, 1))


@pytest.mark.parametrize(
    ("kind", "hops", "payloads", "share"),
    [
        ("all_gather", 3, 3 / 4, 1),
        ("reduce_scatter", 6, 6 / 4, 1),  # Gloo's is an all-reduce
        ("broadcast", 2, 3, 1 / 4),  # two copies from the root at once, then one from whom it reached
        ("scatter", 1, 3 / 4, 1 / 4),
        ("gather", 1, 3 / 4, 1 / 4),
        ("all_to_all", 1, 1, 1),  # the two of a pair take turns
        ("send", 1, 1, 1 / 4),
    ],
)
def test_gloo_by_hand(kind: str, hops: int, payloads: float, share: float) -> None:
    expected = (GLOO + hops * 1e-4, payloads * P / 1e8, share)
    assert both(gloo_nodes(4), kind, 4) == pytest.approx(expected)


# Milliseconds over links of 100 Mbit/s, nodes of one rank: docs/planner-costs.md has the commands.
@pytest.mark.parametrize(
    ("nodes", "kind", "payload", "measured_ms"),
    [
        (2, "all_reduce", 4 * 2**20, 343.8),
        (2, "all_gather", 4 * 2**20, 263.5),
        (2, "reduce_scatter", 4 * 2**20, 349.4),
        (2, "broadcast", 4 * 2**20, 337.3),
        (2, "reduce", 4 * 2**20, 337.5),
        (2, "all_to_all", 4 * 2**20, 329.1),
        (4, "all_reduce", 2 * 2**20, 254.7),
        (4, "all_gather", 2 * 2**20, 137.0),
        (4, "reduce_scatter", 2 * 2**20, 281.7),
        (4, "broadcast", 2 * 2**20, 501.4),
        (4, "reduce", 2 * 2**20, 258.9),
        (4, "all_to_all", 2 * 2**20, 180.1),
    ],
)
def test_gloo_against_measurement(nodes: int, kind: str, payload: int, measured_ms: float) -> None:
    cluster = replace(hardware.cluster(f"{nodes}x1xcpu", "loopback", "1gbit"), between=hardware.link("100mbit", 0.99))
    cost = collective_costs.from_links(cluster).cost(kind, payload, tuple(range(nodes)))
    assert cost.latency_s + cost.transfer_s == pytest.approx(measured_ms * 1e-3, rel=0.1)


def test_an_all_gather_of_broadcasts_sends_no_more_than_it_must() -> None:
    """Each of n ranks broadcasts P/n at once: shares that add up to more than 1 draw them out."""
    for nodes in (2, 4, 8):
        one = collective_costs.from_links(gloo_nodes(nodes)).cost("broadcast", P // nodes, tuple(range(nodes)))
        assert one.transfer_s * max(1.0, nodes * one.share) == pytest.approx((nodes - 1) / nodes * P / 1e8)


def test_a_reduce_scatter_of_scatters_sends_no_more_than_it_must() -> None:
    one = collective_costs.from_links(gloo_nodes(4)).cost("scatter", P, (0, 1, 2, 3))
    assert one.transfer_s * 4 * one.share == pytest.approx(0.75 * P / 1e8)


def test_groups_side_by_side_share_a_nodes_link() -> None:
    """2 nodes of 4: a group with one rank on each has a quarter of the link; one of all ranks has it alone."""
    cluster = gloo_nodes(2, 4)
    assert both(cluster, "all_reduce", (0, 4))[1] == pytest.approx(4 * P / 1e8)
    assert both(cluster, "all_reduce", 8)[1] == pytest.approx(2 * 7 / 8 * P / 1e8)
    assert both(cluster, "all_reduce", (0, 1, 2, 3))[1] == pytest.approx(2 * 3 / 4 * P / 1e11)
    assert both(cluster, "all_to_all", 8)[1] == pytest.approx(4 * 4 / 7 * P / 1e8)
    assert both(cluster, "broadcast", 8)[1] == pytest.approx(4 * P / 1e8)


def test_hops_between_nodes_are_told_from_those_inside() -> None:
    """2 nodes of 4: a ring of 8 has 14 hops, 2 of them between nodes."""
    assert both(gloo_nodes(2, 4), "all_reduce", 8)[0] == pytest.approx(GLOO + 2e-4 + 12e-6)


def test_nccl_takes_a_tree_where_a_ring_has_too_many_hops() -> None:
    cluster = hardware.cluster("64x8xH100", "nvlink4", "8xndr")
    world = tuple(range(cluster.world_size))
    costs = collective_costs.from_links(cluster)
    assert cluster.between is not None
    small, large = costs.cost("all_reduce", 2**20, world), costs.cost("all_reduce", 2**38, world)
    ring_hops = 2 * 63 * cluster.between.latency_s
    assert small.latency_s < ring_hops < large.latency_s
    assert large.transfer_s == pytest.approx(2 * 511 / 512 * 2**38 / cluster.inside.bytes_per_s)  # 360 of 368 GB/s


def test_nccl_inside_a_node_by_hand() -> None:
    cluster = hardware.cluster("8xH100", "nvlink4")
    latency, transfer, _ = both(cluster, "all_gather", 8)
    assert latency == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    assert transfer == pytest.approx(7 / 8 * P / 360e9)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_never_take_less_time(
    backend: str, kind: str, nodes: int, ranks: int, payload: int, more: int
) -> None:
    costs = collective_costs.from_links(Cluster(hardware.device("L4"), nodes, ranks, FAST, SLOW, backend))
    world = tuple(range(nodes * ranks))
    one, other = (costs.cost(kind, size, world) for size in (payload, payload + more))
    assert 0 < one.latency_s + one.transfer_s <= other.latency_s + other.transfer_s
    assert 0 < one.share <= 1


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "scatter", "all_to_all"]), st.integers(2, 64))
def test_links_carry_no_less_than_a_strategy_says_it_sends(kind: str, ranks: int) -> None:
    sent = Collective(kind, 1, 1, ranks, "gradients").wire_bytes
    for backend in ("nccl", "gloo"):
        asked = volume(kind, backend, ranks)
        assert asked.busiest * asked.share >= sent * 0.999


def test_unknown_kinds_give_near_ones() -> None:
    with pytest.raises(UserError, match="all_reduce"):
        both(gloo_nodes(2), "allreduce", 2)


FIT = {"type": "fp32", "sizes": 5, "held_out_error_pct": 1.0}
LINE = {"from_bytes": 0.0, "latency_s": 1e-3, "seconds_per_byte": 1e-8}
FITS = [
    {**FIT, "collective": "all_reduce", "type": "bf16", "pieces": [{**LINE, "latency_s": 9.0}]},
    {**FIT, "collective": "all_reduce", "pieces": [LINE]},
    {**FIT, "collective": "broadcast", "pieces": [{**LINE, "latency_s": 2e-3}]},
    {**FIT, "collective": "sharding.all_gather", "pieces": [{**LINE, "seconds_per_byte": 8e-9}]},
]


def write(path: Path, **changes: object) -> Path:
    content = {
        "schema_version": 1,
        "world_size": 2,
        "backend": "gloo",
        "device_name": cpu_name(),
        "link_bits_per_s": None,
        "fits": FITS,
        "rows": [],
    }
    path.write_text(json.dumps(content | changes))
    return path


TWO, FOUR = hardware.cluster("2xcpu", "loopback"), hardware.cluster("4xcpu", "loopback")


def test_measured_costs_are_taken_as_they_are(tmp_path: Path) -> None:
    cost = collective_costs.from_fits(write(tmp_path / "a.json"), TWO).cost("all_reduce", P, (0, 1))
    assert (cost.latency_s, cost.transfer_s, cost.share) == pytest.approx((1e-3, P * 1e-8, 1))


def test_a_small_one_keeps_its_link_busy_for_its_bytes_too(tmp_path: Path) -> None:
    """2 ms at 4 KiB, and 2.5 ms at 200 kB, of which at 10 ns a byte the link is busy for 2, and not 1.5."""
    path = write(tmp_path / "a.json", rows=[row(4096, 2000), row(200_000, 2500), row(2_000_000, 20_500)])
    costs = collective_costs.from_fits(path, TWO)
    for payload, latency_ms, transfer_ms in ((200_000, 0.5, 2.0), (2_000_000, 0.5, 20.0), (4096, 1.0, 1.0)):
        cost = costs.cost("all_reduce", payload, (0, 1))
        assert (cost.latency_s, cost.transfer_s) == pytest.approx((latency_ms * 1e-3, transfer_ms * 1e-3))


def row(size: int, time_us: float, **changes: object) -> dict[str, object]:
    plain = {"collective": "all_reduce", "type": "fp32", "from_rank": None, "size_bytes": size, "time_us": time_us}
    return plain | changes


def test_between_measured_sizes_a_line_joins_them(tmp_path: Path) -> None:
    """1 ms of latency by the fit; 3 ms at 1 MB, 9 ms at 2 MB, of which the fit knows nothing; then 10 ns a byte."""
    others = [row(1_500_000, 99e3, type="bf16"), row(1_500_000, 99e3, from_rank=0), row(0, 99e3)]
    path = write(tmp_path / "a.json", rows=[row(2_000_000, 9000), row(1_000_000, 3000), *others])
    costs = collective_costs.from_fits(path, TWO)
    for payload, milliseconds in ((500_000, 2), (1_000_000, 3), (1_500_000, 6), (2_000_000, 9), (2_100_000, 10)):
        cost = costs.cost("all_reduce", payload, (0, 1))
        assert cost.latency_s + cost.transfer_s == pytest.approx(milliseconds * 1e-3)


def test_a_larger_payload_never_takes_less(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", rows=[row(1_000_000, 500), row(2_000_000, 400)])
    cost = collective_costs.from_fits(path, TWO).cost("all_reduce", 2_000_000, (0, 1))
    assert cost.latency_s + cost.transfer_s == pytest.approx(500e-6)


def at_once(costs: collective_costs.FittedCosts, kind: str, payload: int) -> float:
    """Seconds until one from each rank is done, each in a group of its own."""
    clock, ranks = Clock(), tuple(range(costs.world_size))
    flights = [clock.issue(costs.cost(kind, payload, ranks), Queue(2)) for _ in ranks]
    for flight in flights:
        clock.wait(flight)
    return clock.now_s


def test_what_broadcasts_at_once_take_beyond_their_bytes_leaves_links_free(tmp_path: Path) -> None:
    """Of two ranks, each sends one way: half the link. One alone takes 2 ms + P * 10 ns, two at once 1 ms + 2P * 8 ns,
    which is 5 ms more for P of 1 MB; a scatter's half of 2P goes to the other rank."""
    costs = collective_costs.from_fits(write(tmp_path / "a.json"), TWO)
    for kind, payload in (("broadcast", 10**6), ("scatter", 2 * 10**6)):
        cost = costs.cost(kind, payload, (0, 1))
        assert (cost.idle_s, cost.latency_s, cost.transfer_s) == pytest.approx((5e-3, 2e-3, 10e-3)), kind
        assert cost.share == pytest.approx(0.5), kind
        assert at_once(costs, kind, payload) == pytest.approx(1e-3 + 2e6 * 8e-9)
    assert costs.cost("all_reduce", P, (0, 1)).share == 1
    assert not costs.cost("send", P, (0, 1)).idle_s, "nobody else sends"
    over_nccl = replace(costs, backend="nccl")
    assert not over_nccl.cost("broadcast", P, (0, 1)).idle_s, "whose all-gather is another thing"


def test_what_broadcasts_at_once_take_at_any_size_is_work(tmp_path: Path) -> None:
    """As above, but two at once take 4 ms + 2P * 8 ns: 8 ms more, of which 2 ms are there without any bytes."""
    line = {**LINE, "latency_s": 4e-3, "seconds_per_byte": 8e-9}
    costs = collective_costs.from_fits(write(tmp_path / "a.json", fits=[*FITS[:3], {**FITS[3], "pieces": [line]}]), TWO)
    cost = costs.cost("broadcast", 10**6, (0, 1))
    assert (cost.idle_s, cost.latency_s, cost.transfer_s) == pytest.approx((6e-3, 4e-3, 10e-3))
    assert at_once(costs, "broadcast", 10**6) == pytest.approx(4e-3 + 2e6 * 8e-9)
    assert costs.cost("broadcast", 1, (0, 1)).idle_s == pytest.approx(6e-9)


@pytest.mark.parametrize("payload", [10**3, 10**4, 10**5, 2 * 10**5])
def test_what_is_work_is_the_same_at_any_size(payload: int, tmp_path: Path) -> None:
    """To 1 MB all take as long as no bytes do: 1 ms alone, 3 ms at once. So 2 ms are work, however much of either time
    links are busy at the rate of large ones."""

    def flat_then(fit: dict, latency: float, rate: float) -> dict:
        line = {"from_bytes": 0.0, "latency_s": latency, "seconds_per_byte": 0.0}
        return {**fit, "pieces": [line, {"from_bytes": 1e6, "latency_s": 0.0, "seconds_per_byte": rate}]}

    of_links = {**FITS[1], "pieces": [{**LINE, "seconds_per_byte": 1e-9}]}
    fits = [of_links, flat_then(FITS[2], 1e-3, 1e-9), flat_then(FITS[3], 3e-3, 4e-9)]
    costs = collective_costs.from_fits(write(tmp_path / "a.json", fits=fits), TWO)
    cost = costs.cost("broadcast", payload, (0, 1))
    assert (cost.idle_s, cost.latency_s + cost.transfer_s) == pytest.approx((0.0, 3e-3), abs=1e-9)


def test_links_are_as_fast_as_whatever_filled_them_best(tmp_path: Path) -> None:
    """Four ranks: a broadcast has 3/4 P on each link, an all-reduce 3/2 P in P * 10 ns, an all-gather of 4P four times
    3/4 P in 4P * 4 ns: these are faster. In memory, where an all-reduce has to add up, it is so."""
    line = {"from_bytes": 0.0, "latency_s": 2e-3, "seconds_per_byte": 4e-9}
    together = [{**fit, "pieces": [line]} for fit in FITS[3:]]
    costs = collective_costs.from_fits(write(tmp_path / "a.json", world_size=4, fits=[*FITS[:3], *together]), FOUR)
    cost = costs.cost("broadcast", 10**6, (0, 1, 2, 3))
    assert (cost.latency_s, cost.transfer_s, cost.share) == pytest.approx((2e-3, 10e-3, 0.75e6 * 4e-9 / 0.75 / 10e-3))
    assert at_once(costs, "broadcast", 10**6) == pytest.approx(2e-3 + 4e6 * 4e-9)


def test_kinds_that_were_not_measured_are_reckoned_from_others(tmp_path: Path) -> None:
    """Of a scatter between two, half the payload goes over the link."""
    costs = collective_costs.from_fits(write(tmp_path / "a.json", fits=FITS[:3]), TWO)
    cost = costs.cost("scatter", P, (0, 1))
    assert (cost.latency_s, cost.transfer_s) == pytest.approx((2e-3, P / 2 * 1e-8))


def test_scaling_to_more_ranks_is_by_hops_and_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json")
    costs = collective_costs.from_fits(path, FOUR, scale=True)
    cost = costs.cost("all_reduce", P, (0, 1, 2, 3))
    assert (cost.latency_s, cost.transfer_s) == pytest.approx((3e-3, 1.5 * P * 1e-8))
    assert "2 ranks" in costs.remarks[0]


def test_a_measurement_of_another_device_is_taken_as_it_is_with_a_remark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", backend="nccl", device_name="Tesla T4")
    (remark,) = collective_costs.from_fits(path, hardware.cluster("2xH100", "nvlink4"), scale=True).remarks
    assert "measured on Tesla T4, not on H100" in remark
    assert collective_costs.from_fits(path, hardware.cluster("2xT4", "pcie3")).remarks == ()


@pytest.mark.parametrize(
    ("changes", "cluster", "says"),
    [
        ({}, FOUR, "with 2 ranks, but the cluster has 4"),
        ({"backend": "nccl"}, TWO, "over nccl"),
        ({"link_bits_per_s": 10**9}, TWO, "1 Gbit/s"),
        ({"fits": []}, TWO, "no collective"),
        ({"schema_version": 2}, TWO, "not a file"),
        ({"world_size": 1}, TWO, "one rank"),
        ({"device_name": "Another CPU"}, TWO, "measured on Another CPU, not on "),
        (
            {"backend": "nccl", "device_name": "Tesla T4"},
            hardware.cluster("2xH100", "nvlink4"),
            "Tesla T4, not on H100",
        ),
    ],
)
def test_measurements_of_something_else_are_refused(tmp_path: Path, changes: dict, cluster: Cluster, says: str) -> None:
    with pytest.raises(UserError, match=says):
        collective_costs.from_fits(write(tmp_path / "a.json", **changes), cluster)


@pytest.mark.parametrize("text", ["", "[]", "{}", None])
def test_files_that_hold_no_measurement(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        collective_costs.from_fits(path, TWO)
