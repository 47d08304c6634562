"""A log is read in any packing and encoding, wrapped or with very long lines; of a huge one the end is read."""

import bz2
import codecs
import gzip
import io
import lzma

from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading import content
from ddp_lab.doctor.reading.inputs import Inputs, read_inputs, take
from ddp_lab.doctor.reading.texts import ANSI, LONGEST_LINE, OVERLAP, to_text
from tests.tables import each_row

LINE = "n1:11:12 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes"
LOG = f"step 1\n{LINE}\nstep 2\n"


def verdict(inputs):
    """Rule and line number of the evidence."""
    assert inputs.problems == []
    finding = diagnose(inputs.facts)[0]
    return finding.rule.name, finding.lines[0].number


@each_row(
    "write",
    [
        str.encode,
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        lambda text: text.encode("utf-16-le"),
        lambda text: gzip.compress(text.encode()),
        lambda text: bz2.compress(text.encode()),
        lambda text: lzma.compress(text.encode()),
        lambda text: bz2.compress(text.encode("utf-16")),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("step 1", "step \0\0 1").encode(),
        lambda text: text.encode() + b"\0" * 5000,
    ],
)
def test_packings_and_encodings(write, tmp_path):
    (tmp_path / "train.log").write_bytes(write(LOG))
    assert verdict(read_inputs([str(tmp_path / "train.log")])) == ("shm-full", 2)


@each_row(
    ("before", "prefix"),
    [
        ("E0422 05:07:49.013000 204 torch/distributed/elastic/multiprocessing/api.py:732] ", ""),
        ("[rank3]:E0422 05:07:49.013000 204 torch/_dynamo/utils.py:7] ", "[rank3]:"),
        ("\x1b[36m(TrainWorker pid=4411, ip=10.0.0.7)\x1b[0m ", ""),
        ("(raylet, ip=10.0.0.7) ", ""),
        ("[rank: 3] ", ""),
        ("[RANK 3] ", ""),
        ("2024-03-02T08:11:05.123456789Z stderr F ", ""),
        ("[pod/train-0/main] 2024-03-02T08:11:05+00:00 ", ""),
        ("[1,3]<stderr>:", ""),
        ("[prterun-n1-77@1,3]<stderr>: ", ""),
        ("3: [rank3]: ", "[rank3]: "),
        ("[default3]:[rank3]: ", "[rank3]: "),
        ("worker-1: ", ""),
        ("[ 1234.567890] ", "[ 1234.567890] "),
        ("[Epoch 1] ", "[Epoch 1] "),
        ("node1:11:12 [0] NCCL INFO ", "node1:11:12 [0] NCCL INFO "),
    ],
)
def test_what_a_launcher_puts_before_a_line_is_no_part_of_it(before, prefix):
    """But it is quoted; and the rule that needs what the line says finds it."""
    message = "RuntimeError: Cannot re-initialize CUDA in forked subprocess."
    text = to_text("log", f"{before}{message}\n{before}\n{before}Traceback".encode())
    assert text.lines[0].text == prefix + message
    assert len(text.lines[0].full) == len(ANSI.sub("", before) + message)
    assert diagnose(Facts([text]))[0].rule.name == "cuda-before-fork"


@each_row("width", [60, 80, 105])
def test_wrapped_lines(width):
    """As copied from a terminal: no line is wider than it."""
    lines = ["-" * width, "loss 0.5", *(LINE[i : i + width] for i in range(0, len(LINE), width)), "loss 0.4"]
    text = to_text("log", "\n".join(lines).encode())
    assert [line.number for line in text.lines] == list(range(1, len(lines) + 1))
    inputs = Inputs()
    take(inputs, "log", io.BytesIO("\n".join(lines).encode()))
    assert verdict(inputs) == ("shm-full", 3)


@given(before=st.integers(0, 3 * LONGEST_LINE))
def test_long_lines_are_searched_whole(before):
    inputs = Inputs()
    take(inputs, "log", io.BytesIO(f"first\n{'x' * before} {LINE}{'y' * 5000}".encode()))
    assert verdict(inputs) == ("shm-full", 2)
    assert len(diagnose(inputs.facts)[0].lines) == 1, "what two overlapping parts have is one line"
    assert OVERLAP < LONGEST_LINE


@each_row("pack", [bytes, gzip.compress])
def test_of_a_huge_file_the_end_is_read(pack, monkeypatch):
    monkeypatch.setattr(content, "HEAD_BYTES", 4096)
    monkeypatch.setattr(content, "TAIL_BYTES", 8192)
    monkeypatch.setattr(content, "_CHUNK", 1024)
    version = "n1:11:12 [0] NCCL INFO NCCL version 2.26.2+cuda12.8\n"
    body = "".join(f"step {step}\n" for step in range(20_000))
    inputs = Inputs()
    take(inputs, "log", io.BytesIO(pack((version + body + LOG).encode())))
    assert verdict(inputs) == ("shm-full", 20_003)
    assert inputs.facts.processes[0].version == "2.26.2"
    assert "MiB in its middle (" in inputs.looked_at[0] and "lines) left out" in inputs.looked_at[0]
