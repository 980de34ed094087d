"""The architecture: imports go one way, private names stay private, and public names are documented."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import khot

PACKAGE = Path(khot.__file__).parent
ROOT = Path(__file__).resolve().parents[1]

# from the bottom up; a module may import from its own layer and from those before it
LAYERS = [
    ("cdfs", "_core"),
    ("_kernels",),
    ("_ops",),
    (
        "assignment",
        "budgets",
        "counting",
        "magnitude",
        "masks",
        "permutahedron",
        "quantiles",
        "ranking",
        "selection",
        "transport",
    ),
    ("baselines", "sampling"),
    ("estimators",),
    ("distributions",),
    ("losses", "nn"),
    ("_callbacks", "_kernel_gates", "_kernel_machine"),
    ("lightning", "sklearn", "transformers"),
    ("_config",),
    ("__init__",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[str]:
    found = ["khot"]
    for module in pkgutil.walk_packages([str(PACKAGE)], "khot."):
        if not module.name.startswith(("khot._C", "khot._eager")):
            found.append(module.name)
    return found


def path(name: str) -> Path:
    base = PACKAGE.joinpath(*name.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(path(name).read_text(encoding="utf-8"))


@cache
def listed(name: str) -> frozenset[str]:
    """The names in ``__all__`` of a module, without importing it."""
    for node in tree(name).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def is_module(name: str) -> bool:
    return path(name).is_file()


def imports(name: str) -> list[tuple[str, str | None]]:
    """(module, name imported from it or None) for every import from khot, anywhere in the file."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found += [(a.name, None) for a in node.names if a.name.split(".")[0] == "khot"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "khot":
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((inner, None) if is_module(inner) else (node.module, alias.name))
    return found


def layer(name: str) -> int:
    parts = name.split(".")
    return LEVEL[parts[1] if len(parts) > 1 else "__init__"]


MODULES = modules()


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} <= set(LEVEL)


def test_imports_run_one_way() -> None:
    found = [(name, module) for name in MODULES for module, _ in imports(name)]
    assert [(name, module) for name, module in found if layer(module) > layer(name)] == []


def test_no_circle() -> None:
    graph = {name: {module for module, _ in imports(name) if module != name} for name in MODULES}
    # a package may import its parts, but a part that imports a name from its package makes a circle
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def used(name: str) -> list[tuple[str, str]]:
    """Names imported from a module, and attributes taken of an imported module."""
    taken: list[tuple[str, str]] = [(m, n) for m, n in imports(name) if n is not None]
    aliases: dict[str, str] = {}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "khot":
            for alias in node.names:
                if is_module(f"{node.module}.{alias.name}"):
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    shadowed = {a.arg for node in ast.walk(tree(name)) if isinstance(node, ast.arguments) for a in node.args}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module and node.value.id not in shadowed and not is_module(f"{module}.{node.attr}"):
                taken.append((module, node.attr))
    triton = "khot._kernels.triton"  # whose files have no `__all__`: what they share has no underscore
    return [(m, n) for m, n in taken if not (name.startswith(triton) and m.startswith(triton))]


def test_what_is_used_elsewhere_is_in_all() -> None:
    taken = {(m, n) for name in MODULES for m, n in used(name) if m != "khot" and not n.startswith("__")}
    assert {(m, n) for m, n in taken if n not in listed(m)} == set()


def test_what_the_gpu_files_share_has_no_underscore() -> None:
    triton = "khot._kernels.triton"
    found = [(name, m, n) for name in MODULES if name.startswith(triton) for m, n in imports(name) if n]
    assert len(found) > 500
    assert [each for each in found if each[2].startswith("_") and each[1].startswith(triton)] == []


def test_all_is_there() -> None:
    public = {name: importlib.import_module(name) for name in MODULES if "._" not in name}
    assert [(m, n) for m, module in public.items() for n in listed(m) if not hasattr(module, n)] == []


def test_public_names_are_documented() -> None:
    """The reverse: what a public module lists in ``__all__`` has its place in docs/api."""
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r'<a id="(khot[\w.]+)">', pages)}
    public = [n for n in MODULES if not any(part.startswith("_") for part in n.split(".")[1:])]
    lacking = {(n, each) for n in public for each in listed(n) if each not in shown}
    assert {pair for pair in lacking if not is_module(f"{pair[0]}.{pair[1]}")} == set()


def test_only_one_file_touches_torch_s_private_names() -> None:
    found = []
    for file in PACKAGE.rglob("*.py"):
        if file.name != "torch_internals.py":
            text = file.read_text(encoding="utf-8")
            if re.search(
                r"\btorch\._(?!_version|dynamo)|torch\.\w+\._[a-z]|from torch\._|forward_ad\._"
                r"|from torch[\w.]* import .*\b_[a-z]",
                text,
            ):
                found.append(file.relative_to(PACKAGE).as_posix())
    assert found == []


def modules_of_the_reference() -> list[str]:
    """The modules whose names users write: those that have something on a page of the reference."""
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r'<a id="(khot[\w.]+)">', pages)
    return sorted({name.rpartition(".")[0] for name in shown})


@pytest.mark.parametrize("name", modules_of_the_reference())
def test_tab_shows_what_is_public(name: str) -> None:
    module = pytest.importorskip(name, exc_type=ImportError)
    assert {n for n in dir(module) if not n.startswith("__")} == set(module.__all__)


def test_the_map_of_the_gpu_kernels_has_every_file() -> None:
    folder = PACKAGE / "_kernels" / "triton"
    named = re.findall(r"`(\w+\*?)\.py`", (folder / "README.md").read_text(encoding="utf-8"))
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert files == {name for name in named if not name.endswith("*")}


@cache
def device_functions() -> dict[str, ast.FunctionDef]:
    """Each function that Triton compiles."""
    return {
        f"{file.stem}.{node.name}": node
        for file in sorted((PACKAGE / "_kernels" / "triton").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and "jit" in " ".join(map(ast.unparse, node.decorator_list))
    }


#: Device functions of more than :data:`FEW` parameters, and why. Values that belong together are one of them
#: (:mod:`khot._kernels.triton.arguments`).
MANY = {
    "around._around": "its strides are of any alignment, and Triton specialises what is within a tuple",
}
FEW = 16


def test_device_functions_have_few_parameters() -> None:
    many = {name for name, node in device_functions().items() if len(node.args.args) > FEW}
    assert many == set(MANY)


def test_what_is_not_specialised_is_a_parameter() -> None:
    """A parameter that a tuple holds is specialised, whatever is said of it."""
    said = [
        (name, each.value, {arg.arg for arg in node.args.args})
        for name, node in device_functions().items()
        for decorator in node.decorator_list
        for each in ast.walk(decorator)
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and name != "around._around"
    ]
    assert len(said) > 100
    assert [(name, parameter) for name, parameter, known in said if parameter not in known] == []


def test_no_argument_has_a_field_that_tuples_have() -> None:
    """In a kernel, a named tuple is one of Triton's, whose own attributes hide fields of these names."""
    found = [
        f"{file.stem}.{node.name}.{field.target.id}"
        for file in sorted((PACKAGE / "_kernels" / "triton").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    taken = {"values", "type", "count", "index", "dtype"}
    assert len(found) > 40 and [name for name in found if name.rpartition(".")[2] in taken] == []


def fields_in_tuples(function: ast.FunctionDef) -> list[str]:
    """Of its constants, where Triton 3.5 and 3.6 fail: as a member of a tuple, a width of a tensor that is
    made, or the bound of an unrolled loop."""
    constants = {arg.arg for arg in function.args.args if arg.annotation is not None}
    members: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple | ast.List):
            members += node.elts
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.static_range":
            members += node.args
    fields = [x for x in members if isinstance(x, ast.Attribute) and ast.unparse(x.value) in constants]
    return list(map(ast.unparse, fields))


def test_fields_of_constants_have_names_in_tuples() -> None:
    """As in `PIECES: tl.constexpr = T.pieces`."""
    assert {name: found for name, f in device_functions().items() if (found := fields_in_tuples(f))} == {}
