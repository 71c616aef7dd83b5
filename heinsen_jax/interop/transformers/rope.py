"""Fields of rotary positions in a `config.json`."""

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
SCALING = {
    "default": {},
    "linear": {"factor": "rotary_factor"},
    "llama3": {
        "factor": "rotary_factor",
        "low_freq_factor": "rotary_low_turns",
        "high_freq_factor": "rotary_high_turns",
        "original_max_position_embeddings": "rotary_original_length",
    },
}
"""Options of mechanisms by the names of fields: PLAIN for all types, SCALING for each type."""


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

    rope_type: Literal["default", "linear", "llama3"] = "default"
    rope_theta: PositiveFloat | None = 10000.0
    partial_rotary_factor: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Size | None = None
    # Axes of images, which have the same positions in text.
    mrope_section: list[int] | None = pydantic.Field(default=None, exclude=True)
    mrope_interleaved: bool = pydantic.Field(default=False, exclude=True)

    @pydantic.model_validator(mode="after")
    def _has_the_fields_of_its_type(self) -> "Rope":
        kind, used = self.rope_type, SCALING[self.rope_type]
        for name in SCALING["llama3"]:
            if name in used and getattr(self, name) is None:
                raise ValueError(f"rope_type {kind} needs {name}; add it")
            if name not in used and getattr(self, name) is not None:
                raise ValueError(f"rope_type {kind} does not use {name}; correct one of them")
        return self

    def options(self) -> dict[str, FieldValue]:
        """Options of mechanisms with rotary positions."""
        if self.rope_theta is None:
            return {"positions": "none"}
        pairs = (PLAIN | SCALING[self.rope_type]).items()
        return {"positions": "rotary"} | {option: getattr(self, name) for name, option in pairs}

    @classmethod
    def of(cls, config: PositionsConfig) -> "Rope":
        if config.positions == "none":
            return cls(rope_theta=None)
        kind = "linear" if config.rotary_factor != 1 else "default"
        if config.rotary_original_length is not None:
            kind = "llama3"
        pairs = (PLAIN | SCALING[kind]).items()
        values = {name: getattr(config, option) for name, option in pairs}
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
