"""No verdict on a job that went on: frightening words, errors that were caught, runs and attempts in one log."""

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.texts import to_text
from tests.tables import each_row

STEPS = [f"step {step} loss {2.5 - step / 100:.3f}" for step in range(60)]
INFO = "n1:{pid}:{pid} [0] NCCL INFO {said}"


def verdicts(*lines: str) -> list[str]:
    facts = Facts(texts=[to_text("train.log", "\n".join(lines).encode())])
    return [f"{finding.rule.name} {finding.rule.confidence}" for finding in diagnose(facts)]


@each_row(
    "line",
    [
        "Logging system not yet initialized, buffering",
        "inotify: too many open files, limit raised to 65536",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver (login node, expected)",
        "Retrying download: ConnectionError: Connection reset by peer (attempt 1/5)",
        'config: {"oom_kill": false, "exit_code": 137}',
        "last pod reason: OOMKilled, restarted with 64Gi",
        "test_device_assert PASSED: caught 'device-side assert triggered'",
        "healthcheck passed: no uncorrectable ECC error encountered",
        "bash: fork: retry: Resource temporarily unavailable",
        "KeyError: 'x' (ignored)",
        "could not open /etc/foo.conf (No such file or directory, errno 2)",
        "MemoryError handled, using mmap",
        "RuntimeError: CUDA error: out of memory; falling back to CPU for evaluation",
        "RuntimeError: Socket Timeout (attempt 1 of 3, retrying)",
        "malloc(): using jemalloc arenas",
        "Error: network docker_default not found",
        "Driver/library version mismatch check: ok",
        "Connection closed by remote peer, reconnecting",
        "UserWarning: CUDA initialization: Found no NVIDIA driver on your system",
        "WARNING optional extension not available: ImportError: libcudart.so.11.0: cannot open shared object file",
        "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local network address. The server "
        "socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        "PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'",
        "WARNING: OOM: Ran out of memory with exception: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_words_between_healthy_steps(line: str) -> None:
    assert verdicts(*STEPS, line, *STEPS) == []


def test_a_second_run_in_one_log_is_no_other_rank() -> None:
    """As `>>` writes it, after an upgrade and with another network."""
    first = [INFO.format(pid=100, said=said) for said in ("NCCL version 2.20.5+cuda12.4", "Using network IB")]
    second = [INFO.format(pid=900, said=said) for said in ("NCCL version 2.26.2+cuda12.8", "Using network Socket")]
    ranks = [INFO.format(pid=pid, said="comm 0x1 rank 0 nranks 1 cudaDev 0 - Init COMPLETE") for pid in (100, 900)]
    assert verdicts(*first, ranks[0], *STEPS, *second, ranks[1], *STEPS) == []


def test_a_caught_error_is_not_why_the_job_ended_later() -> None:
    ended = ["ValueError: checkpoint is not writable", "exitcode  : 1 (pid: 20)"]
    caught = ["RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "batch size 32 fits"]
    assert verdicts(*caught, *STEPS, *STEPS, *ended)[0] == "program-exception likely"
    early = [
        "ValueError: cannot identify image, replaced by a blank one",
        *STEPS,
        *STEPS,
        "KeyError: 'labels'",
        ended[1],
    ]
    facts = Facts(texts=[to_text("train.log", "\n".join(early).encode())])
    assert diagnose(facts)[0].details == ["It is KeyError: 'labels'."]


def test_a_scheduler_that_ends_a_job_hides_no_cause() -> None:
    limit = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    assert verdicts("[rank2]: KeyError: 'labels'", limit)[0] == "program-exception likely"
    assert verdicts(*STEPS, limit) == ["job-ended-by-scheduler None"]
