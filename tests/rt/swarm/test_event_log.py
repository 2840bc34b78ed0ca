"""A core's event log on a disk without room: it ends, what it tells of goes on."""

import json
import logging
from pathlib import Path

import pytest

from kvasir_core.events import TimePassed
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.units import Nanos
from kvasir_rt.swarm.event_log import EventLog


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("events", [1, 10_000])  # Seen at a flush, or at a write.
def test_a_full_disk_ends_the_log_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, events: int
) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = EventLog(path, SwarmPolicy(), 1)
    for now in range(events):
        log.write(TimePassed(), Nanos(now))
    for _ in range(2):
        log.flush()
        log.write(TimePassed(), Nanos(events))
    log.close()
    assert [each.getMessage() for each in errors(caplog)] == [
        "the event log ends here: it cannot be written"
    ]
    assert "events" not in json.loads((tmp_path / "log.core.json").read_text())


def test_a_log_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(IsADirectoryError):
        EventLog(tmp_path / "log", SwarmPolicy(), 1)
    assert [each.name for each in tmp_path.iterdir()] == ["log"]
