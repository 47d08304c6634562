"""What must hold on GPUs: how it is counted there, and judged by what the ranks would find."""

import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import masking_utils

from ddp_lab.gpu_check import proofs, ranks
from ddp_lab.gpu_check.host_waits import COUNTED, SAYS, HostWaits
from ddp_lab.gpu_check.parts import FAIL, PASS
from ddp_lab.planner import runs
from ddp_lab.runtime.data import copies
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.strategy.step import StepData
from tests.gpu_check.pretended import Pretended
from tests.in_process import run_in_process

ALONE = Ranks(0, 1, torch.device("cpu"), "gloo")


@pytest.mark.parametrize(
    ("in_steps", "in_race", "how"),
    [("", "CSAN detected", PASS), ("", "", FAIL), ("CSAN detected", "CSAN detected", FAIL)],
)
def test_the_sanitizer_must_find_the_planted_race_alone(in_steps: str, in_race: str, how: str, tmp_path: Path) -> None:
    class Watched(Pretended):
        def answer(self, log: str, command: Sequence[str]) -> str:
            return f'{in_race if "race" in command else in_steps}\n{{"zero1": 1.0}}\n'

    assert proofs.sanitizer(Watched(2, True, tmp_path, is_quick=True)).how == how


def test_the_planted_race_orders_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrived:
        asked = 0

        def query(self) -> bool:
            self.asked += 1
            return self.asked > 2

    arrived, plain, step = Arrived(), copies.received, StepData(3, [])
    monkeypatch.setattr(ranks, "steps", lambda names, group: {"x": copies.received(step, arrived)})  # type: ignore[arg-type]
    assert ranks.race(["x"], ALONE) == {"x": step} and arrived.asked == 3
    assert copies.received is plain


NONE: dict[str, Any] = {"zero1": {}, "pytorch_ddp": {"ddp.py:3": 4}}
SEEN = {"ranks.py:9": 8}


@pytest.mark.parametrize(
    ("found", "planted", "how", "says"),
    [
        (NONE, SEEN, PASS, "no hand-written choice"),
        (NONE, {}, FAIL, "the wait that was planted is not seen"),
        (NONE, "ValueError: planted", FAIL, "(ValueError: planted)"),
        ({"zero1": {"zero1.py:9": 8}}, SEEN, FAIL, f"zero1 waits 8 times in {COUNTED} steps: zero1.py:9"),
        ({"pytorch_ddp": "ValueError: planted"}, SEEN, FAIL, "pytorch_ddp: ValueError: planted"),
    ],
)
def test_waits_are_judged(found: dict[str, Any], planted: Any, how: str, says: str, tmp_path: Path) -> None:
    class Waiting(Pretended):
        def answer(self, log: str, command: Sequence[str]) -> str:
            return json.dumps({proofs.PLANTED: planted} if "planted_wait" in command else found)

    verdict = proofs.waits(Waiting(2, True, tmp_path, is_quick=True))
    assert verdict.how == how and says in verdict.line


def test_a_planted_wait_reads_the_loss_in_every_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setattr(ranks, "read_loss", lambda module, inputs, outputs: reads.append(1))
    with runs.alone():
        ranks.planted_wait([proofs.PLANTED], ALONE)
    assert len(reads) == 2 * HostWaits.steps


def test_only_settled_steps_are_counted() -> None:
    with HostWaits(torch.device("cpu")) as counter:
        for _ in range(counter.steps):
            warnings.warn(SAYS, UserWarning, stacklevel=1)
            warnings.warn("does not yet detect all synchronizing operations", UserWarning, stacklevel=1)
            counter.step()
        warnings.warn(SAYS, UserWarning, stacklevel=1)
    assert list(counter.found.values()) == [COUNTED] and next(iter(counter.found)).startswith(f"{Path(__file__).name}:")


def test_torch_still_warns_in_these_words() -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    if not library.exists():
        pytest.skip("torch without CUDA")
    assert SAYS.encode() in library.read_bytes()


def test_ranks_read_no_masks_and_round_to_fp32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def look(names: list[str], group: Ranks) -> dict[str, Any]:
        return {"masks": masking_utils.fast_all.__module__, "precision": torch.get_float32_matmul_precision()}

    for name in ("fast_all", "find_packed_sequence_indices", "_ignore_bidirectional_mask_sdpa"):
        monkeypatch.setattr(masking_utils, name, lambda *_, **__: None)
    monkeypatch.setattr(ranks, "joined_ranks", lambda config: nullcontext(ALONE))
    monkeypatch.setattr(ranks, "FINDERS", {"look": look})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    torch.set_float32_matmul_precision("high")
    try:
        seen = json.loads(run_in_process(ranks, "look").stdout)  # type: ignore[arg-type]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"masks": "ddp_lab.runtime.data.masks", "precision": "highest"}


def test_any_error_of_a_choice_stops_no_other() -> None:
    def find(name: str) -> int:
        assert name != "bad", "planted"
        return 1

    assert ranks.each(["bad", "good"], find) == {"bad": "AssertionError: planted", "good": 1}
