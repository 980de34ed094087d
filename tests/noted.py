"""The launches of kernels under Triton's interpreter, noted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

__all__ = ["Launches"]


class Launches:
    """Notes the launches of kernels, and what their arguments are once they have run."""

    def __init__(self, module: ModuleType, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.given: dict[str, dict[str, Any]] = {}
        for name in names:
            monkeypatch.setattr(module, name, self._noting(getattr(module, name), name))

    def _noting(self, kernel: Any, name: str) -> Any:
        outer = self

        class Noting:
            fn = object()  # a kernel of its own

            def __getitem__(self, grid: object) -> Callable[..., None]:
                def run(*args: Any, **constants: Any) -> None:
                    kernel[grid](*args, **constants)
                    outer.names.append(name)
                    given = dict(zip(kernel.arg_names, args, strict=False))
                    for each in given.pop("scratch", None), given.pop("t", None):  # by what they hold
                        if hasattr(each, "_asdict"):
                            given |= {f"{field}_pointer": value for field, value in each._asdict().items()}
                    if given.get("state_pointer") is not None:
                        state = given["state_pointer"]
                        given["status"] = state.reshape(len(state), -1)[:, 0].tolist()
                    outer.given[name] = given

                return run

        return Noting()
