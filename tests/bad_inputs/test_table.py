"""Every row of the table that concerns reading has an input, and codes and exit codes are those of the registry."""

from __future__ import annotations

from collections import Counter

from bad_files.table import CASES
from bcqfmt.codes import CODES

READING = {*range(1, 38), *range(55, 69)}

# Where the inputs differ from the table, because the specification decides otherwise:
#  8  a byte order mark comes before the brace and breaks that rule (BCQ-V104), not the one about UTF-8
# 10  a key that is twice in the descriptor is a fault of the descriptor (BCQ-V203)
# 12  what is no integer is no JSON of the format (BCQ-V106); what is one, but not here, a malformed entry (BCQ-V109)
# 22  names of dense tensors are carried and shown escaped, so such files are legal; names of weights are restricted
# 23  the same; only the length of a name is limited for all
# 27  the same check stands before any file is opened; tests/converters/hub/test_hub_remote.py has it for requests
# 33  exit 2, there is no option to choose one: the person removes the file that is left over
# 35  a missing config.json is exit 3, a malformed one 4
# 37  a file that was replaced under its name stays open and whole: legal
# 60  the limit is 2^40 bits of planes a weight
# 61  three dimensions are a stack and legal; other numbers of dimensions are not
# 62  legal: dense tensors are carried as they are
# 66  legal: newer minor versions and ignorable keys
# 68  the files' own headers are the truth; what contradicts them has a code of its own for each kind


def test_every_row_has_an_input() -> None:
    assert {case.row for case in CASES} == READING


def test_legal_inputs_are_in_the_rows_that_have_them() -> None:
    assert {case.row for case in CASES if not case.code} == {22, 23, 28, 29, 37, 58, 61, 62, 66}


def test_exit_codes_are_those_of_the_registry() -> None:
    assert {(case.name, case.exit) for case in CASES} == {
        (case.name, CODES[case.code].exit if case.code else 0) for case in CASES
    }


def test_names_are_distinct() -> None:
    assert not [name for name, count in Counter(case.name for case in CASES).items() if count > 1]


def test_every_additional_code_is_known() -> None:
    assert {code for case in CASES for code in case.also} <= CODES.keys()
