"""Every number on a command line: what is no number, or out of range, is refused by its option."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from kvasir_rt.cli import group as runtime
from kvasir_scenario.option_numbers import Number, Whole
from kvasir_sim.cli import group as simulator

GROUPS = {"kvasir-sim": simulator, "kvasir-rt": runtime}
NUMERIC = (click.types.IntParamType, click.types.FloatParamType)
HUGE = "9" * 5000  # More digits than Python turns into a number.


def numeric_options() -> Iterator[tuple[str, str, click.Option]]:
    for name, group in GROUPS.items():
        with group.make_context(name, [], resilient_parsing=True) as context:
            for command_name in group.list_commands(context):
                command = group.get_command(context, command_name)
                assert command is not None
                for option in command.params:
                    if isinstance(option.type, NUMERIC):
                        assert isinstance(option, click.Option)
                        yield name, command_name, option


OPTIONS = list(numeric_options())


def call(name: str, command_name: str, option: click.Option, value: str) -> Result:
    """With the option alone: it is read before anything that is missing is missed."""
    return CliRunner().invoke(GROUPS[name], [command_name, f"{option.opts[0]}={value}"])


def test_there_are_numeric_options_of_both_programs() -> None:
    assert {name for name, _, _ in OPTIONS} == set(GROUPS)
    assert len(OPTIONS) > 30


@pytest.mark.parametrize(
    ("name", "command_name", "option"),
    OPTIONS,
    ids=[f"{name} {command} {option.opts[0]}" for name, command, option in OPTIONS],
)
def test_what_is_no_number_in_range_is_refused_and_the_option_named(
    name: str, command_name: str, option: click.Option
) -> None:
    kind = option.type
    assert isinstance(kind, Whole | Number), "other types let nan, or numbers without end, through"
    least, most = kind.min, kind.max
    assert least is not None
    assert most is not None
    wrong = ["nan", "inf", "-inf", "-1e999", "1e999", HUGE, f"-{HUGE}", "", "many", str(least - 1)]
    wrong += ["0"] if least > 0 or kind.min_open else []
    wrong += [str(most + 1) if isinstance(kind, Whole) else str(most * 1.001)]
    wrong += ["1.5"] if isinstance(kind, Whole) else []
    for value in wrong:
        result = call(name, command_name, option, value)
        assert result.exit_code == 2, (value[:20], result.output)
        assert option.opts[0] in result.output
        assert f"it must be {kind.wanted}" in " ".join(result.output.split())
        assert len(result.output) < 1000, "no wall of digits"
    for value in (str(most), str(least if not kind.min_open else most)):
        assert kind.convert(value, option, None) == pytest.approx(float(value))
