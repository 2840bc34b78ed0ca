"""The model files that slices are cut from: what each holds, and which ranges exist."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvasir_core.swarm.events import ModelRegistered
from kvasir_core.swarm.words import ModelName
from kvasir_rt.errors import ModelFileError, UnsupportedModel
from kvasir_rt.gguf_file import GgufFile, open_gguf
from kvasir_rt.gguf_header import TensorInfo
from kvasir_rt.model.shape import ModelShape

PARTS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """A mixture of experts in an opened file."""

    gguf: GgufFile
    shape: ModelShape
    facts: ModelRegistered
    opened: os.stat_result

    def tensors(self, layer: int) -> tuple[TensorInfo, ...]:
        """Gate, up and down of a layer that holds experts; axis 0 counts them."""
        return tuple(self.gguf.tensors[tensor_name(layer, part)] for part in PARTS)

    def is_same_file(self, path: Path) -> bool:
        """Whether the path leads to the file that is open."""
        try:
            return os.path.samestat(path.stat(), self.opened)
        except (OSError, ValueError):  # ValueError: no path at all, as one with a zero byte.
            return False


def tensor_name(layer: int, part: str) -> str:
    return f"blk.{layer}.ffn_{part}_exps.weight"


def open_expert_model(name: ModelName, path: Path) -> ExpertModel:
    """Open a model and check that its experts are as its metadata says.

    Raises:
        ModelFileError: It is no such file, or a tensor has another shape.
        UnsupportedModel: It has no experts: dense models are never offered.
    """
    gguf = open_gguf(path)
    try:
        shape = ModelShape.of(gguf)
        layers = tuple(
            layer for layer in range(shape.layers) if tensor_name(layer, "gate") in gguf.tensors
        )
        if not shape.experts or not layers:
            raise UnsupportedModel(
                f"{path}: has no routed experts; only mixtures of experts are offered to workers"
            )
        for layer in layers:
            _check_layer(gguf, shape, layer)
        opened = path.stat()
    except OSError as error:
        gguf.close()
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    except BaseException:
        gguf.close()
        raise
    facts = ModelRegistered(name, layers, shape.experts, shape.hidden)
    return ExpertModel(gguf, shape, facts, opened)


def _check_layer(gguf: GgufFile, shape: ModelShape, layer: int) -> None:
    wide = (shape.experts, shape.expert_ffn, shape.hidden)
    shapes = {"gate": wide, "up": wide, "down": (shape.experts, shape.hidden, shape.expert_ffn)}
    for part, expected in shapes.items():
        name = tensor_name(layer, part)
        found = gguf.tensors.get(name)
        if found is None or found.shape != expected:
            raise ModelFileError(
                f"{gguf.path}: tensor {name!r} "
                f"{'is missing' if found is None else f'has shape {list(found.shape)}'}; "
                f"the model's metadata asks for {list(expected)}"
            )
