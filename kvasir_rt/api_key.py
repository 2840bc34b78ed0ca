"""The key that clients of a served model must send: from a file, or from the environment."""

import os
from pathlib import Path

from kvasir_rt.errors import ServeError

API_KEY_VARIABLE = "KVASIR_API_KEY"
API_KEY_CHARACTERS_MIN = 8


def read_api_key(path: Path | None) -> str | None:
    """The key from a file, else from the environment, else None.

    Raises:
        ServeError: The file cannot be read, or the key is too short to be one.
    """
    if path is not None:
        try:
            key = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ServeError(f"cannot read the API key from {path}: {error}") from None
    elif API_KEY_VARIABLE in os.environ:
        key = os.environ[API_KEY_VARIABLE].strip()
    else:
        return None
    if len(key) < API_KEY_CHARACTERS_MIN:
        raise ServeError(
            f"the API key has {len(key)} characters; it must have at least {API_KEY_CHARACTERS_MIN}"
        )
    return key
