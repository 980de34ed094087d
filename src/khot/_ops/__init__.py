"""The registered operators. Each has a file with its schema, kernel, shapes, and rule (vjp and jvp)."""

import importlib
import pkgutil

from khot import _kernels

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

_kernels.register()  # now that the operators are defined
