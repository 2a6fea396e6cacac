"""Section: a table of a recipe, and the types of its values."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, lt=2**63)]  # torch's and numpy's whole numbers end there
Step = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Function = Annotated[str, Field(pattern=r"^[^:]+:[^:]+$")]
Options = dict[str, object]


class Section(BaseModel):
    """A table of the recipe; an unknown key, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
