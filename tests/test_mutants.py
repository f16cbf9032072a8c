"""The list of mutants is about the code as it is."""

from tests.mutants.__main__ import ROOT, listed

MUTANTS = listed()


def test_there_are_enough_and_each_is_one() -> None:
    assert len(MUTANTS) >= 60
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_each_is_a_line_of_the_code_and_names_tests_that_are_there() -> None:
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        assert mutant.mutated(source) != source
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(), test
