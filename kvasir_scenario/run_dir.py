"""A run's directory: whose it is, what may be replaced, and how files appear in it.

A directory is ours when it carries our marker. Only names that a run writes are ever deleted, and a
file gets its name when it is complete, so that no reader meets half of one.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvasir_core.errors import OutputError, ScenarioError

MARKER = ".kvasir-run"
MARKER_TEXT = "This directory holds one run of Kvasir; another run may replace its files.\n"
TABLES = ("requests", "micro_batches", "stages", "spans", "samples", "swarm")
PLOTS = ("timeline", "time_split", "latency", "queue_and_kv")
SWARM_PLOTS = ("elastic_curve",)  # Where there are experts.
PAGE = "report.html"
VARIANTS = "variants"  # One run directory per what-if variant.
WRITTEN = (
    "report.json",  # First to go: tables of another run must never stand beside it.
    PAGE,
    "scenario.yaml",
    "events.jsonl",
    "coordinator_events.jsonl",
    "hub_events.jsonl",
    *(f"{table}.{kind}" for table in TABLES for kind in ("parquet", "csv")),
    *(f"{plot}.png" for plot in (*PLOTS, *SWARM_PLOTS)),
)


def partial_path(path: Path) -> Path:
    """Where `path` is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def named_output(path: Path) -> Iterator[None]:
    """What goes wrong with a file that is being written is said with its name.

    Raises:
        OutputError: The file cannot be written, as on a full disk.
    """
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        todo = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise OutputError(f"{path} cannot be written: {why}; {todo}name another place") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write: the file appears at `path` when all is written, or not at all.

    Raises:
        OutputError: It cannot be written.
    """
    partial = partial_path(path)
    with named_output(path):
        try:
            yield partial
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all.

    Raises:
        OutputError: It cannot be written.
    """
    with whole_file(path) as partial:
        partial.write_bytes(content)


def prepare_run_dir(path: Path) -> Path:
    """Make `path` an empty run directory; an earlier run there is replaced.

    Files that no run writes stay untouched, also beside an earlier run.

    Raises:
        ScenarioError: It is a file, cannot be made, or holds something that is not a run.
    """
    try:
        if path.is_dir():
            _remove_run(path)
        else:
            path.mkdir(parents=True)
        (path / MARKER).write_text(MARKER_TEXT, encoding="utf-8")
    except OSError as error:
        raise ScenarioError(
            f"--out {path}: cannot be used as a run directory: {error.strerror}; "
            "name a new or empty directory"
        ) from error
    return path


@contextmanager
def nothing_of_a_stopped_run(path: Path | None) -> Iterator[None]:
    """A run that was stopped, refused or found no room leaves nothing; an empty folder goes too."""
    try:
        yield
    except (KeyboardInterrupt, OutputError, ScenarioError):
        if path is not None:
            with suppress(OSError):
                _remove_run(path)
                (path / MARKER).unlink()
                if not any(path.iterdir()):
                    path.rmdir()
        raise


def _remove_run(path: Path) -> None:
    """Remove what a run wrote in `path`.

    Raises:
        ScenarioError: The directory holds something and is not a run's.
    """
    names = sorted(entry.name for entry in os.scandir(path))
    if names and MARKER not in names:
        raise ScenarioError(
            f"--out {path}: holds {names[0]!r} and is not an earlier run (no {MARKER} in it); "
            "name a new or empty directory"
        )
    for name in WRITTEN:
        (path / name).unlink(missing_ok=True)
        partial_path(path / name).unlink(missing_ok=True)
    variants = path / VARIANTS
    if not variants.is_dir() or variants.is_symlink():
        return
    for variant in sorted(variants.iterdir()):
        if (variant / MARKER).is_file() and not variant.is_symlink():
            _remove_run(variant)
            (variant / MARKER).unlink()
            if not any(variant.iterdir()):
                variant.rmdir()
    if not any(variants.iterdir()):
        variants.rmdir()
