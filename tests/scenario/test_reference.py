"""docs/scenario.md says what the schema says."""

import re
from pathlib import Path

from kvasir_scenario.reference import scenario_reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scenario.md"


def test_the_page_is_what_the_schema_writes() -> None:
    assert PAGE.read_text() == scenario_reference(), (
        "python -m kvasir_scenario.reference > docs/scenario.md"
    )


def test_every_link_leads_to_a_section() -> None:
    text = scenario_reference()
    titles = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert links
    assert links <= titles
