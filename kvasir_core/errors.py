"""Our exceptions, all of them.

KvasirError
├── IllegalEvent      a shell reported something that cannot have happened now
├── PlanError         a plan contradicts itself or a limit; nothing was loaded
└── ScenarioError     a scenario, trace or profile file is wrong; names file, line, key
"""


class KvasirError(Exception):
    """Base class; never raised itself."""


class IllegalEvent(KvasirError):
    """The event cannot have happened now. The core's state is unchanged."""


class PlanError(KvasirError):
    """A plan contradicts itself or breaks a limit; the message names both numbers."""


class ScenarioError(KvasirError):
    """An input file is wrong; the message names file, line, key, value and what would be right."""
