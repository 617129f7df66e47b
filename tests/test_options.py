"""Whatever an option is set to, it runs or is refused; `option_probes` has the rule, and tries more."""

import inspect
import random
from typing import Any

import pytest

from lightning_rl import A2C, OnPolicyAlgorithm
from tests import option_probes
from tests.option_probes import ALGORITHMS, DATA_MODULES, VALUES, Case, options_of, outcome

CLASSES = [*ALGORITHMS, *DATA_MODULES]


def faults(cases: list[Case], trains: bool) -> list[str]:
    found = [(case, outcome(case, trains)) for case in cases]
    return [f"{case}: {result.error!r}" for case, result in found if result.kind == "fault"]


@pytest.mark.parametrize("made", CLASSES)
def test_an_option_of_any_kind_is_taken_or_refused(made):
    generator = random.Random(made.__name__)
    cases = list(option_probes.cases_of_every_kind(made, generator))
    cases += [option_probes.random_case(made, generator) for _ in range(20)]
    assert len(cases) > len(options_of(made)) > 30
    assert not faults(cases, trains=False)


def test_an_option_that_all_algorithms_have_takes_or_refuses_every_value():
    names = [name for name, (owner, _) in options_of(A2C).items() if owner is OnPolicyAlgorithm]
    assert "optimizer" in names
    assert not faults([Case(A2C, {name: value}) for name in names for value in VALUES], trains=False)


@pytest.mark.parametrize("made", DATA_MODULES)
def test_an_option_of_the_data_takes_or_refuses_every_value(made):
    assert not faults([Case(made, {name: value}) for name in options_of(made) for value in VALUES], trains=False)


@pytest.mark.parametrize("made", CLASSES)
def test_what_takes_an_option_trains_with_it(made, in_tmp_path):
    generator = random.Random(made.__name__)
    cases: list[Case] = []
    while len(cases) < 3:
        case = option_probes.random_case(made, generator)
        if case.is_bounded and outcome(case, trains=False).kind == "made":
            cases.append(case)
    assert not faults(cases, trains=True)


@pytest.mark.parametrize("made", CLASSES)
def test_the_default_of_an_option_is_taken(made):
    for name, (owner, parameter) in options_of(made).items():
        if owner is made and parameter.default is not inspect.Parameter.empty:
            assert outcome(Case(made, {name: parameter.default}), trains=False).kind == "made", name


def test_an_option_that_raises_anything_else_is_found():
    class Own(A2C):
        def __init__(self, *args: Any, temperature: Any = (), **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = len(temperature)

    cases = list(option_probes.cases_of_every_kind(Own, random.Random(0)))
    assert {"temperature", "learning_rate", "observation_space"} <= {name for case in cases for name in case.options}
    assert any("has no len()" in fault for fault in faults(cases, trains=False))
