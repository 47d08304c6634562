"""The columns of the collective benchmark's CSV. Its page and `docs/command-line.md` use the same texts."""

from ddp_lab.analysis.columns import Column

RESULT_COLUMNS = {
    "collective": Column("collective", "", "what was measured; `sharding.` before what the project's strategies call"),
    "world_size": Column("ranks", "", "processes that took part"),
    "backend": Column("backend", "", "gloo, nccl or nccl-legacy"),
    "device": Column("device", "", "where the tensors were: cpu or cuda"),
    "link_bits_per_s": Column("link", "Mbit/s", "rate of each rank's link by `--link`", 1e-6, 0),
    "size_bytes": Column(
        "size", "KiB", "payload by nccl-tests' definition; of what is shared out, the whole", 1 / 1024
    ),
    "count": Column("count", "", "elements in nccl-tests' sense: of what is shared out, those of one rank"),
    "type": Column("type", "", "fp32, bf16 or fp16"),
    "redop": Column("redop", "", "what is done to elements: sum or none"),
    "iterations": Column("calls", "", "timed calls; in each, the slowest rank's time counts"),
    "time_us": Column("time", "us", "mean time of a call, from a start that all ranks share"),
    "algbw_gb_per_s": Column("algbw", "GB/s", "size over mean time, in 10^9 bytes a second", 1, 3),
    "busbw_gb_per_s": Column("busbw", "GB/s", "algbw times nccl-tests' factor for collective and ranks", 1, 3),
    "wrong": Column("#wrong", "", "wrong elements of one checked call, summed over ranks; none for a barrier"),
    "p50_us": Column("p50", "us", "median time of a call"),
    "p95_us": Column("p95", "us", "time that 5 % of the calls exceeded"),
    "p99_us": Column("p99", "us", "time that 1 % of the calls exceeded"),
    "spread_pct": Column("spread", "%", "between the quartiles of the calls' times, as share of the median"),
}

FIT_COLUMNS = {
    **{name: RESULT_COLUMNS[name] for name in ("collective", "world_size", "backend", "device", "link_bits_per_s")},
    "type": RESULT_COLUMNS["type"],
    "sizes": Column("sizes", "", "distinct sizes that the model was fitted on"),
    "model": Column("model", "", "latency and time a byte"),
}
