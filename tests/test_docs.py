"""README and docs/: their commands exist as written, their links lead somewhere."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvasir_rt.cli import group as runtime
from kvasir_sim.cli import group as simulator

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = {"kvasir-sim": simulator, "kvasir-rt": runtime}
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands_of(page: Path) -> Iterator[str]:
    """Lines of code blocks that call one of ours."""
    for block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith(tuple(f"{name} " for name in COMMANDS)):
                yield line.strip()


CALLS = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands_of(page)]


def parse(command: click.Command, arguments: list[str], parent: click.Context | None) -> None:
    """As click would, down to the last subcommand, without running anything."""
    name = command.name or ""
    with command.make_context(name, arguments, parent=parent) as context:
        if isinstance(command, click.Group):
            rest = [*context._protected_args, *context.args]
            subcommand = command.get_command(context, rest[0])
            assert subcommand is not None, rest[0]
            parse(subcommand, rest[1:], context)


@pytest.mark.parametrize(("page", "line"), CALLS)
def test_every_command_of_the_pages_is_one(page: str, line: str) -> None:
    words = shlex.split(re.split(r"\s[|>#;&]", line)[0])
    try:
        parse(COMMANDS[words[0]], words[1:], None)
    except click.exceptions.Exit:
        pass  # --help and the like.
    except click.ClickException as error:
        pytest.fail(f"{page}: {line}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_the_pages_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def test_the_ring_of_the_tutorial_is_planned_and_meets_what_it_promises(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "plan_a_ring.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "plan.yaml").write_text(text)
    runner = CliRunner()
    planned = str(tmp_path / "planned.yaml")
    words = ["plan", str(tmp_path / "plan.yaml"), "--out", planned]
    result = runner.invoke(simulator, words)
    assert result.exception is None, result.output
    out = tmp_path / "run"
    result = runner.invoke(simulator, [planned, "--out", str(out), "--no-plots", "--json"])
    assert result.exception is None, result.output
    assert json.loads(result.stdout)["verdict"]["kind"] in {"balanced", "bottlenecked", "starved"}


def commands_under(group: click.Group) -> Iterator[str]:
    with group.make_context(group.name or "", [], resilient_parsing=True) as context:
        yield from group.list_commands(context)


HELP = [(name, command) for name, group in COMMANDS.items() for command in commands_under(group)]


@pytest.mark.parametrize(("name", "command"), HELP)
def test_every_command_has_a_page_that_explains_every_option(name: str, command: str) -> None:
    result = CliRunner().invoke(COMMANDS[name], [command, "--help"])
    assert result.exception is None
    with COMMANDS[name].make_context(name, [], resilient_parsing=True) as context:
        found = COMMANDS[name].get_command(context, command)
    assert found is not None
    assert found.help, "what it does"
    for option in found.params:
        if isinstance(option, click.Option):
            assert option.opts[-1] in result.output
            assert option.help or option.show_default or option.type.name == "choice", option.name
