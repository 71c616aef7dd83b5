"""Whether documents are separate for a model and a data set."""

import dataclasses

from heinsen_jax.attention import mechanism, names
from heinsen_jax.data import AnyDataConfig, DataConfig, Dataset, TextDataset
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig


def resolve_documents(
    data: AnyDataConfig, dataset: Dataset, model: LanguageModelConfig
) -> tuple[AnyDataConfig, list[str]]:
    """The configuration with `data.documents` resolved for this data set and model; and lines that
    describe documents and packing, with the reason of a default. No lines for tasks.

    Raises:
      UserError: separate documents are required, which a mechanism does not support.
    """
    if not isinstance(data, DataConfig) or not isinstance(dataset, TextDataset):
        return data, []
    chosen, reason = dataset.documents(data), ""
    if chosen == "separate" and (unable := _without_segments(model)):
        if data.documents is not None or data.packing == "best_fit":
            able = [name for name in names() if mechanism(name).capabilities.segments]
            asked = "documents=separate" if data.documents else "packing=best_fit"
            raise UserError(
                f"data.{asked}: model.attention={unable!r}, as configured, does not support "
                "segments; set data.documents=continuous and data.packing=windows, or choose one "
                f"of {', '.join(able)}"
            )
        chosen, reason = "continuous", f", since {unable!r} does not support segments"
    elif chosen == "continuous" and data.documents is None:
        reason = ", since no end-of-text token divides the corpus"
    lines = [f"documents: {chosen}{reason}"]
    if data.packing == "best_fit":
        lines.append(f"packing: best_fit, with {dataset.padding(data):.2%} padding")
    return dataclasses.replace(data, documents=chosen), lines


def _without_segments(model: LanguageModelConfig) -> str | None:
    """The first mechanism that does not support segments, as configured."""
    layers = zip(model.layer_pattern, model.mechanisms(), strict=True)
    return next((name for name, config in layers if not config.capabilities.segments), None)
