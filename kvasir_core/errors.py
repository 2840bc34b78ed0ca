"""Our exceptions, all of them.

KvasirError
├── IllegalEvent      a shell reported something that cannot have happened now
├── OutputError       a result cannot be written, as on a full disk; names the file
├── PlanError         a plan contradicts itself or a limit; nothing was loaded
└── ScenarioError     a scenario, trace or profile file is wrong; names file, line, key
"""


class KvasirError(Exception):
    """Base class; never raised itself."""

    exit_status = 2  # Of a command that ends with it: wrong input. 1: the world said no.


class IllegalEvent(KvasirError):
    """The event cannot have happened now. The core's state is unchanged."""


class OutputError(KvasirError):
    """A result cannot be written; the message names the file, why, and what to do."""

    exit_status = 1


class PlanError(KvasirError):
    """A plan contradicts itself or breaks a limit; the message names both numbers."""


class ScenarioError(KvasirError):
    """An input file is wrong; the message names file, line, key, value and what would be right."""
