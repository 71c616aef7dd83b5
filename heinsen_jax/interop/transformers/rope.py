"""Fields of rotary positions in a `config.json`."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import PositiveFloat

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.attention.rotary import PositionsConfig
from heinsen_jax.typing import JSON

OBJECTS = "rope_parameters", "rope_scaling"
"""Objects with the fields, in current and in earlier versions."""
PLAIN = {"rope_theta": "rotary_base", "partial_rotary_factor": "rotary_fraction"}
SCALING: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rotary_factor"},
    "llama3": {
        "factor": "rotary_factor",
        "low_freq_factor": "rotary_low_turns",
        "high_freq_factor": "rotary_high_turns",
        "original_max_position_embeddings": "rotary_original_length",
    },
    "yarn": {
        "factor": "rotary_factor",
        "beta_slow": "rotary_low_turns",
        "beta_fast": "rotary_high_turns",
        "original_max_position_embeddings": "rotary_original_length",
    },
}
"""Options of mechanisms by the names of fields: PLAIN for all types, SCALING for each type."""
USED = {
    kind: {*names} | ({"attention_factor"} if kind == "yarn" else set())
    for kind, names in SCALING.items()
}
"""The fields that each type has."""


Size = Annotated[int, pydantic.Field(gt=0, lt=2**31)]
Count = Annotated[int, pydantic.Field(gt=0, lt=10_000)]
"""A number of layers, few enough to list them."""


class Fields(pydantic.BaseModel):
    """Fields of a JSON object; others are refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
    )


class Rope(Fields):
    """Rotary positions; none if `rope_theta` is None."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: PositiveFloat | None = 10000.0
    partial_rotary_factor: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Size | None = None
    beta_slow: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    """Factor of rotated queries and keys; 0.1 log(factor) + 1 by default in yarn."""
    truncate: Literal[True] | None = pydantic.Field(default=None, exclude=True)
    # Axes of images, which have the same positions in text.
    mrope_section: list[int] | None = pydantic.Field(default=None, exclude=True)
    mrope_interleaved: bool = pydantic.Field(default=False, exclude=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _has_defaults(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("rope_type") != "yarn":
            return fields
        factor = fields.get("factor")
        factor = max(factor, 1.0) if isinstance(factor, int | float) else 1.0
        attention = 0.1 * math.log(factor) + 1
        defaults = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": attention}
        return defaults | {k: v for k, v in fields.items() if v is not None}

    @pydantic.model_validator(mode="after")
    def _has_the_fields_of_its_type(self) -> "Rope":
        kind = self.rope_type
        for name in sorted(frozenset().union(*USED.values())):
            if name in USED[kind] and getattr(self, name) is None:
                raise ValueError(f"rope_type {kind} needs {name}; add it")
            if name not in USED[kind] and getattr(self, name) is not None:
                raise ValueError(f"rope_type {kind} does not use {name}; correct one of them")
        if kind == "yarn" and self.partial_rotary_factor != 1:
            raise ValueError("rope_type yarn with partial_rotary_factor is unsupported")
        return self

    def options(self) -> dict[str, FieldValue]:
        """Options of mechanisms with rotary positions."""
        if self.rope_theta is None:
            return {"positions": "none"}
        kind = {"rotary_interpolation": "pairs"} if self.rope_type == "yarn" else {}
        pairs = (PLAIN | SCALING[self.rope_type]).items()
        options = {option: getattr(self, name) for name, option in pairs}
        return {"positions": "rotary"} | kind | options

    @property
    def score_factor(self) -> float:
        """Factor of the scores, for the factor of queries and keys."""
        return 1.0 if self.attention_factor is None else self.attention_factor**2

    @classmethod
    def of(cls, config: PositionsConfig, key_depth: int, plain: float | None = None) -> "Rope":
        """The positions of a layer; in yarn with `attention_factor`, for a layer without it that
        has the scale `plain`, or 1 / sqrt(key_depth)."""
        if config.positions == "none":
            return cls(rope_theta=None)
        kind = "linear" if config.rotary_factor != 1 else "default"
        if config.rotary_original_length is not None:
            kind = "llama3" if config.rotary_interpolation == "turns" else "yarn"
        pairs = (PLAIN | SCALING[kind]).items()
        values = {name: getattr(config, option) for name, option in pairs}
        if kind == "yarn":
            default = key_depth**-0.5
            values["attention_factor"] = math.sqrt((config.scale or default) / (plain or default))
        return cls.model_validate({"rope_type": kind} | values)

    def scaling(self) -> dict[str, JSON] | None:
        """The field `rope_scaling`."""
        fields = self.model_dump(exclude={*PLAIN}, exclude_none=True)
        return None if self.rope_type == "default" else fields


class Given(NamedTuple):
    """A value of a `config.json`.

    Attributes:
      place: names of its field and of the object that holds it, if any.
      value: its value.
    """

    place: str
    value: JSON


def given_fields(values: Mapping[str, Any], further_names: Mapping[str, str]) -> dict[str, Given]:
    """The fields of `Rope` in a `config.json` of any version.

    Args:
      values: its content.
      further_names: further names of fields outside of `OBJECTS`.

    Raises:
      ValueError: two places have different values for a field.
    """
    every: list[tuple[str, Given]] = []
    for outer in OBJECTS:
        if not isinstance(inner := values.get(outer), dict | None):
            raise ValueError(f"{outer}={inner!r} must be an object; correct it")
        every += [
            ("rope_type" if name == "type" else name, Given(f"{outer}.{name}", value))
            for name, value in (inner or {}).items()
        ]
    for name, other in further_names.items():
        names = [x for x in dict.fromkeys((other, name)) if x in values]
        every += [(name, Given(x, values[x])) for x in names]
    by_name: dict[str, Given] = {}
    for name, given in every:
        first = by_name.setdefault(name, given)
        if first.value != given.value:
            raise ValueError(
                f"{first.place}={first.value!r} and {given.place}={given.value!r} differ; remove "
                "one"
            )
    return by_name


def place_of(names: Sequence[str], given: Mapping[str, Given]) -> str:
    """Name of a field of `Rope` in a file with the given fields, or of their object without
    `names`."""
    if names and names[0] in given:
        return given[names[0]].place
    outers = (x.place.partition(".")[0] for x in given.values() if "." in x.place)
    return ".".join([next(outers, OBJECTS[0]), *names])
