"""What must hold on GPUs: how it is counted there, and judged by what the ranks would find."""

import json

from ddp_lab.gpu_check import proofs
from ddp_lab.gpu_check.host_waits import COUNTED
from ddp_lab.gpu_check.parts import FAIL, PASS
from tests.gpu_check.pretended import Pretended
from tests.tables import each_row


@each_row(
    ("in_steps", "in_race", "how"),
    [("", "CSAN detected", PASS), ("", "", FAIL), ("CSAN detected", "CSAN detected", FAIL)],
)
def test_the_sanitizer_must_find_the_planted_race_alone(in_steps, in_race, how, tmp_path):
    class Watched(Pretended):
        def answer(self, log, command):
            return f'{in_race if "race" in command else in_steps}\n{{"zero1": 1.0}}\n'

    assert proofs.sanitizer(Watched(2, 2, tmp_path, is_quick=True)).how == how


NONE = {"zero1": {}, "pytorch_ddp": {"ddp.py:3": 4}}
SEEN = {"ranks.py:9": 8}


@each_row(
    ("found", "planted", "how", "says"),
    [
        (NONE, SEEN, PASS, "no hand-written choice"),
        (NONE, {}, FAIL, "the wait that was planted is not seen"),
        (NONE, "ValueError: planted", FAIL, "(ValueError: planted)"),
        ({"zero1": {"zero1.py:9": 8}}, SEEN, FAIL, f"zero1 waits 8 times in {COUNTED} steps: zero1.py:9"),
        ({"pytorch_ddp": "ValueError: planted"}, SEEN, FAIL, "pytorch_ddp: ValueError: planted"),
    ],
)
def test_waits_are_judged(found, planted, how, says, tmp_path):
    class Waiting(Pretended):
        def answer(self, log, command):
            return json.dumps({proofs.PLANTED: planted} if "planted_wait" in command else found)

    verdict = proofs.waits(Waiting(2, 2, tmp_path, is_quick=True))
    assert verdict.how == how and says in verdict.line
