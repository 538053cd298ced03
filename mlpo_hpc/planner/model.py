"""The shape of a transformer, and what follows from it: parameters and floating-point operations."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from mlpo_hpc.errors import ConfigError

UNGATED = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}
"""``model_type`` of models whose feed-forward layers have two matrices and not three."""
TIED = {"gpt2", "gpt_neo", "opt", "bloom", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text"}
"""``model_type`` of models whose ends are one matrix where the file says nothing."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
MULTIPLES = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}
LEAST_GUESS = 10**9
"""Parameters below which a shape is not guessed: the ends are too large a part."""
HEAD_WIDTH = 128
USUAL_VOCABULARY = 50304


class Model(BaseModel):
    """A decoder-only transformer, by the keys of a ``config.json``; biases and position tables are not counted."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    layers: int = Field(validation_alias=AliasChoices("num_hidden_layers", "n_layer", "num_layers"), gt=0)
    hidden: int = Field(validation_alias=AliasChoices("hidden_size", "n_embd"), gt=0)
    heads: int = Field(validation_alias=AliasChoices("num_attention_heads", "n_head"), gt=0)
    kv_heads: int | None = Field(default=None, validation_alias="num_key_value_heads", gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    ffn: int | None = Field(default=None, validation_alias=AliasChoices("intermediate_size", "n_inner"), gt=0)
    vocabulary: int = Field(validation_alias="vocab_size", gt=0)
    tied: bool = Field(default=False, validation_alias="tie_word_embeddings")
    """Whether one matrix is both ends."""
    kind: str = Field(default="llama", validation_alias="model_type")

    @property
    def layer_numel(self) -> int:
        """Parameters of one layer: attention, feed-forward, two norms."""
        width = self.head_dim or self.hidden // self.heads
        attention = 2 * self.hidden * width * (self.heads + (self.kv_heads or self.heads))
        matrices = 2 if self.kind in UNGATED else 3
        return attention + matrices * self.hidden * (self.ffn or 4 * self.hidden) + 2 * self.hidden

    @property
    def numel(self) -> int:
        """Parameters."""
        ends = 1 if self.tied else 2
        return self.layers * self.layer_numel + ends * self.vocabulary * self.hidden + self.hidden

    def forward_flops(self, sequence: int) -> float:
        """Floating-point operations of the forward pass of one text token.

        Source: PaLM (arXiv 2204.02311), appendix B, a third of its 6 N + 12 L H Q T.
        """
        return 2 * self.numel + 4 * self.layers * self.hidden * sequence


def presets() -> list[str]:
    """Names of the shapes that are built in."""
    return list(_preset_table())


@cache
def _preset_table() -> dict[str, Any]:
    return tomllib.loads(files("mlpo_hpc.planner").joinpath("presets.toml").read_text())


def find_model(text: str) -> Model:
    """A preset, a number of parameters such as ``13B``, or a ``config.json`` or the folder that has one.

    Raises
    ------
    ConfigError
        If it is none of these, or the file tells no shape.
    """
    if text in _preset_table():
        return Model.model_validate(_preset_table()[text])
    if match := re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([MBT]?)", text, re.IGNORECASE):
        return guess(float(match[1]) * MULTIPLES[match[2].upper()])
    path = Path(text)
    if not path.exists():
        raise ConfigError(f"{text!r} is no preset, no number such as 13B and no file; presets: {', '.join(presets())}")
    return _read(path / "config.json" if path.is_dir() else path)


def _read(path: Path) -> Model:
    try:
        shape = json.loads(path.read_text())
        if not isinstance(shape, dict):
            raise ValueError(f"a JSON object is needed, not {type(shape).__name__}")
        shape = shape.get("text_config", shape)  # of models that see: their text is what is large
        if any(shape.get(key) for key in EXPERTS):
            raise ValueError("a mixture of experts is not modelled: give its number of parameters, such as 47B")
        return Model.model_validate({"tie_word_embeddings": shape.get("model_type") in TIED, **shape})
    except ValidationError as error:
        missing = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{path} tells no shape of a transformer: {missing}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def guess(numel: float) -> Model:
    """A usual shape with about so many parameters: 12 L H^2 of them, as wide as 128 times its number of layers.

    Raises
    ------
    ConfigError
        If it is small.
    """
    if numel < LEAST_GUESS:
        raise ConfigError(f"no shape is guessed for {numel:,.0f} parameters (under 1B): give a config.json")
    layers = round((numel / (12 * HEAD_WIDTH**2)) ** (1 / 3))
    # Four matrices of attention take 4 L H^2; three of width F take the rest, after both ends.
    hidden = HEAD_WIDTH * layers
    rest = numel - 2 * USUAL_VOCABULARY * hidden - 4 * layers * hidden**2
    ffn = max(hidden, round(rest / (3 * layers * hidden)))
    heads = max(1, hidden // HEAD_WIDTH)
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return Model.model_validate({**shape, "intermediate_size": ffn, "vocab_size": USUAL_VOCABULARY})
