"""A pattern is searched only in lines that have the text that it demands: it must demand no more than it matches."""

from ddp_lab.doctor.reading.complaints import _PATTERNS
from ddp_lab.doctor.reading.literals import demanded
from ddp_lab.doctor.reading.texts import to_text
from ddp_lab.doctor.rulebook import all_rules, compiled
from tests.doctor.test_look_alikes import logs

OF_RULES = [
    pattern
    for rule in all_rules()
    for pattern in compiled((*rule.patterns, *rule.all_of, *rule.unless, *rule.explains))
]
SEARCHED = [*OF_RULES, *_PATTERNS.values()]
WITH_TEXTS = [pattern for pattern in SEARCHED if demanded(pattern)[0] and not demanded(pattern)[1]]


def test_every_case_is_found_as_by_a_search_in_each_line():
    text = to_text("log", "\n".join(log for _, log in [*logs("fires"), *logs("silent")]).encode())
    for pattern in WITH_TEXTS:
        assert {line.number for line in text.search(pattern)} == {
            line.number for line in text.lines if pattern.search(line.text)
        }
