"""Layers outside of Python: saved programs, AOTInductor, ONNX in its own runtime, and TorchScript.
(The table of test_layers.py covers torch.compile.)"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fresh
import khot
import modes
from drawn import floats
from khot._core.dispatch import OPERATORS
from khot._kernels.reference.topk_mask import sorted_topk_mask
from khot.nn import Anneal

DYNAMIC = torch.export.Dim.DYNAMIC

# torch's own: its exporter copies specs of a deprecated type
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


@dataclass(frozen=True)
class Row:
    """Inputs are float32, bool or integer; the batch lies along ``dim`` of all of them."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    dim: int = 0
    random: bool = False  # in train mode
    in_onnx: bool = True

    def layer(self, training: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train(training)

    def larger(self) -> tuple[Tensor, ...]:
        """Another batch, of another size."""
        return tuple(torch.cat([x.flip(self.dim), x, x], self.dim) for x in self.inputs)

    def sizes(self) -> tuple[dict[int, Any], ...]:
        return tuple({self.dim: DYNAMIC} for _ in self.inputs)


def of(row: Any) -> Row:
    """A row of the table of layers, in float32; routers get a mask, too."""
    inputs = tuple(x.float() if x.is_floating_point() else x for x in row.inputs)
    if row.name in MASKED:
        inputs += (floats(2, 7, seed=1) > 0,)
    return Row(
        row.name, row.make, inputs, int(row.name in OF_COLUMNS), row.random, row.name not in NOT_IN_ONNX
    )


def annealed() -> Anneal:
    return Anneal(4.0, 2.0, steps=4)


TIES = torch.tensor([[1.0, 1, 1, 1], [0, 2, 2, 2], [-0.0, 0, -math.inf, 0], [3, 1, 3, 3]])
MASK = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
MASKED = {
    "ExpertChoiceRouter",
    "TokenChoiceRouter",
    "TokenChoiceRouter-balanced",
    "BalancedRouter",
    "TopKRouter",
}
OF_COLUMNS = {"SoftTopK-learned", "TopKAttention"}
NOT_IN_ONNX = {"KHotGate-prices", "TopKRouter-groups"}  # which has no budgets, and no stable sort
ROWS = [
    *map(of, modes.ROWS.values()),
    Row("SoftTopK", lambda: khot.nn.SoftTopK(2), (TIES,)),
    Row("SoftTopK-masked", lambda: khot.nn.SoftTopK(annealed(), tau=annealed()), (floats(3, 3), MASK)),
    Row(
        "TopKAttention-annealed",
        lambda: khot.nn.TopKAttention(8, 2, annealed(), batch_first=True),
        (floats(2, 5, 8), floats(2, 6, 8, seed=1), floats(2, 6, 8, seed=2)),
    ),
]
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(tree_leaves(got), tree_leaves(want), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if not modes.ALIKE.search(row.name)], ids=lambda row: row.name
)
def test_saved_program(row: Row) -> None:
    """In eval mode, and in train mode where that gives something else."""
    seen: list[list[Tensor]] = []
    for training in (False, True)[: 2 - row.random]:
        result = tree_leaves(row.layer(training)(*row.inputs))
        if any(all(map(torch.equal, result, other)) for other in seen):
            continue
        seen.append(result)
        layer, buffer = row.layer(training), io.BytesIO()
        torch.export.save(torch.export.export(layer, row.inputs, dynamic_shapes=row.sizes()), buffer)
        buffer.seek(0)
        program = torch.export.load(buffer).module()
        for inputs in (row.inputs, row.larger()):
            want, got = layer(*inputs), program(*inputs)
            assert type(got) is type(want)
            assert_same(got, want)


ESTIMATORS = set(get_args(khot.estimators.EstimatorName))
GATES: list[dict[str, Any]] = [
    {"k": 2.5},
    {"k": None},
    {"k": Anneal(3.0, 2.0, steps=4)},
    {"k": 2, "tau": Anneal(3.0, 2.0, steps=4), "estimator": "gumbel"},
    {"k": 2, "design": "sampford"},
    {"k": 2, "design": "pivotal"},
    {"k": None, "design": "poisson"},
    *({"k": 2, "estimator": name} for name in sorted(ESTIMATORS - {"simple"})),
]
LARGE_GATES: list[dict[str, Any]] = [
    {"k": 2, "estimator": "simple"},
    *({"k": 2, "design": name} for name in ("conditional_poisson", "brewer", "systematic")),
]


def saved(layer: nn.Module, x: Tensor) -> nn.Module:
    """The program that torch.export makes, saves and loads, for batches of any size."""
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,), dynamic_shapes=({0: DYNAMIC},)), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


@pytest.mark.parametrize(
    "options",
    [*GATES, *(pytest.param(options, marks=pytest.mark.slow) for options in LARGE_GATES)],
    ids=str,
)
def test_saved_gate_that_draws(options: dict[str, Any]) -> None:
    """It draws anew in each call, and by the same law as the layer: each of 6 differences of means exceeds 6
    standard deviations with probability 2e-9."""
    torch.manual_seed(0)
    gate = khot.nn.KHotGate(6, **options)
    gate.logits.data = floats(6, seed=1)
    x = torch.ones(4000, 6)
    if options.get("estimator") in {"sequential_softmax", "ncpss"}:
        with pytest.raises(RuntimeError):
            saved(gate, torch.ones(3, 6))(x)
        return
    program = saved(gate, torch.ones(3, 6))
    got, again, want = program(x).detach(), program(x).detach(), gate(x).detach()
    assert not torch.equal(got, again)
    assert set(got.sum(-1).unique().tolist()) <= set(want.sum(-1).unique().tolist())
    deviation = (2 * want.mean(0) * (1 - want.mean(0)) / len(x)).sqrt()
    assert ((got.mean(0) - want.mean(0)).abs() < 6 * deviation).all()


def test_saved_router_in_a_new_process(tmp_path: Path) -> None:
    path, x = tmp_path / "router.pt2", floats(2, 7, 5)
    torch.export.save(torch.export.export(khot.nn.TokenChoiceRouter(5, 4, 2).eval(), (x,)), path)
    code = (
        "import sys, torch, khot\n"
        "routing = torch.export.load(sys.argv[1]).module()(torch.ones(2, 7, 5))\n"
        "assert type(routing) is khot.nn.Routing and routing.selection.sum() == 28"
    )
    done = fresh.run(code, path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_exported_choice_is_that_of_the_operator(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    operator = OPERATORS["topk_mask"].overload
    seen = set()
    for _ in range(200):
        batch, n = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(2))
        special = torch.tensor([-math.inf, math.inf, math.nan, -0.0, 0.0, 0.5, 1.0, 2.0], dtype=dtype)
        often = torch.tensor([1.0, 0.2, 0.1, 2.0, 2.0, 2.0, 2.0, 2.0])
        x = special[torch.multinomial(often, batch * n, True, generator=generator)].view(batch, n)
        k = torch.rand(batch, generator=generator, dtype=torch.float64) * (n + 1)
        k = k.round() if n % 2 else k
        want = operator(x, k)
        torch.testing.assert_close(sorted_topk_mask(x, k), want, rtol=0, atol=0, equal_nan=True)
        seen |= {bool(row.isnan().any()) for row in want}
    assert seen == {True, False}


def in_onnx_runtime(
    model: nn.Module, inputs: tuple[Tensor, ...], **options: Any
) -> Callable[..., list[Tensor]]:
    import onnxruntime

    program = torch.onnx.export(model, inputs, dynamo=True, verbose=False, **options)
    assert program is not None
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        outputs = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
        return [torch.from_numpy(y) for y in outputs]

    return run


class Together(nn.Module):
    """Layers of the table as one model, because every export takes seconds, however small the model."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows, self.layers = rows, nn.ModuleList(row.layer() for row in rows)

    def forward(self, *inputs: Tensor) -> list[Any]:
        rest = iter(inputs)
        pairs = zip(self.rows, self.layers, strict=True)
        return [layer(*(next(rest) for _ in row.inputs)) for row, layer in pairs]


def test_onnx_of_layers_together() -> None:
    """One layer of each class, not optimised; the slow test has all of them, each optimised by itself."""
    left_out = ["-learned", "-masked", "annealed", "-shares", "-score", "-cost", "-expert", "-hard"]
    left_out += ["-transcoder", "TokenChoice", "TopKRouter", "Anneal"]  # experts have one
    rows = [row for row in ROWS if row.in_onnx and not any(part in row.name for part in left_out)]
    model = Together(rows).eval()
    inputs = tuple(x for row in rows for x in row.inputs)
    sizes = tuple(size for row in rows for size in row.sizes())
    run = in_onnx_runtime(model, inputs, dynamic_shapes=(sizes,), optimize=False)
    for batch in (inputs, tuple(x for row in rows for x in row.larger())):
        assert_same(run(*batch), model(*batch))


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.in_onnx], ids=lambda row: row.name)
def test_onnx(row: Row) -> None:
    layer = row.layer()
    run = in_onnx_runtime(layer, row.inputs, dynamic_shapes=row.sizes())
    for inputs in (row.inputs, row.larger()):
        assert_same(run(*inputs), layer(*inputs))


class Masks(nn.Module):
    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return khot.topk_mask(x, 2), khot.topk_mask(x, k), khot.topk_mask(x.half(), 1, 0, largest=False)


def test_onnx_of_masks() -> None:
    """Ties, infinities, NaN, rows without an answer, a k for each row, other dims, half precision."""
    x = torch.cat([TIES, torch.full((1, 4), -math.inf), torch.full((1, 4), math.nan), floats(2, 4)])
    k = torch.tensor([0.0, 4, 1, 3, 0, 2, 2.5, 5])
    run = in_onnx_runtime(Masks().eval(), (x, k))
    want = [OPERATORS["topk_mask"].overload(x, v) for v in (torch.tensor(2.0), k)]
    want.append(OPERATORS["topk_mask"].overload(-x.half().mT, torch.tensor(1.0)).mT)
    torch.testing.assert_close(run(x, k), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")  # on purpose
@pytest.mark.parametrize(
    "layer",
    [
        khot.nn.SoftTopK(2, soft_eval=True).eval(),
        pytest.param(khot.nn.SoftTopK(2, hard=True), marks=pytest.mark.slow),
        pytest.param(khot.nn.TokenChoiceRouter(4, 4, 2), marks=pytest.mark.slow),
    ],
    ids=["soft_eval", "hard", "router"],
)
def test_onnx_has_no_soft_choice(layer: nn.Module) -> None:
    with pytest.raises(
        torch.onnx.errors.OnnxExporterError, match=r"translating node .*khot\.soft_topk"
    ) as caught:
        torch.onnx.export(layer, (floats(3, 4),), dynamo=True, verbose=False)
    error: BaseException = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert "No ONNX function found for <OpOverload(op='khot.soft_topk'" in str(error)


def test_onnx_has_no_choice_under_a_budget() -> None:
    gate = khot.nn.KHotGate(4, 2.0, cost=[1.0, 0.5, 2, 1]).eval()
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=r"translating node .*khot\.budget_mask"):
        torch.onnx.export(gate, (floats(3, 4),), dynamo=True, verbose=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MixtureOfExperts-expert choice", "TopKSAE-annealed"])
def test_aot_inductor(name: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == name)
    layer = row.layer()
    program = torch.export.export(layer, row.inputs, dynamic_shapes=row.sizes())
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    for inputs in (row.inputs, row.larger()):
        assert_same(compiled(*inputs), layer(*inputs))


# What torch.jit.trace does not take in eval mode. docs/export.md lists it, too.
NOT_TRACED = {
    "TopKRouter-groups",
    "MixtureOfExperts-top k",
    *(name for name in modes.ROWS if name.startswith("prune_global")),
}


@each
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of each check of an argument
@torch.no_grad()
def test_torch_script(row: Row) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        torch.jit.script(row.layer())
    if not row.inputs:  # of which torch.jit.trace asks for some
        return
    layer, buffer = row.layer(), io.BytesIO()
    if row.name in NOT_TRACED:
        with pytest.raises((RuntimeError, torch.jit.TracingCheckError)):
            torch.jit.trace(layer, row.inputs)(*row.larger())
        return
    torch.jit.save(torch.jit.trace(layer, row.inputs), buffer)
    buffer.seek(0)
    program = torch.jit.load(buffer)
    for inputs in (row.inputs, row.larger()):
        assert_same(program(*inputs), layer(*inputs))
